"""Operation of a federation: what the commands `plures federate ...` do, as functions.

It needs Flower, from the extra `deploy`, and is imported by those commands alone.
"""

import fcntl
import json
import os
import re
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from plures.errors import RunFailed, UsageError
from plures.federate import credentials, flower, server, wire
from plures.federate.client import Client
from plures.federate.credentials import Home
from plures.federate.flower import Address, FlowerLink
from plures.federate.server import FederatedClients, Terms
from plures.files import read_toml
from plures.runs.callbacks import Callback, Say
from plures.runs.config import Config
from plures.runs.folders import new_folder
from plures.runs.loop import Result

FORGET_SECONDS = 120.0  # after which the server has noticed that a client is gone
STOP_SERVER_SECONDS, STOP_RUN_SECONDS = 30.0, 3600.0  # that a stop may take; a run ends its round first


def say(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends us as Ctrl-C does: in order, with our children."""

    def end(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        say("stopped")
    finally:
        signal.signal(signal.SIGTERM, old)


@contextmanager
def held(path: Path, what: str, note: str = "") -> Iterator[None]:
    """Only one process at a time; its number is in the file, so that `stop` finds it, and a note for after a crash."""
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{what} is running already ({path})") from None
        file.truncate(0)
        file.write(f"{os.getpid()} {note}\n")
        file.flush()
        yield
        file.truncate(0)


def left_behind(path: Path) -> str:
    """The note of a process that held a file and was killed."""
    words = path.read_text(encoding="utf-8").split() if path.exists() and holder(path) is None else []
    return words[1] if len(words) > 1 else ""


def holder(path: Path) -> int | None:
    """The process that holds a file; None when there is none."""
    try:
        with open(path, "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except OSError:
                file.seek(0)
                return int((file.read().split() or ["0"])[0]) or None
    except FileNotFoundError:
        return None


# Certificates and keys


def init(folder: Path, clients: list[str], address: str, port: int, hosts: list[str], insecure: bool) -> None:
    """Make certificates and keys, or add clients, and say what to type."""
    made = credentials.make(folder, clients, port, address, hosts, insecure)
    say(f"{folder}: clients {', '.join(made.clients()) or 'none yet, add some with --client NAME'}")
    if insecure:
        say("plain HTTP, and no client has to show a key: for trying things out on one machine")
    say(f"what to type next is in {folder / 'README.md'}")


# The server


def run_server(home: Path) -> None:
    """Carry messages between clients and runs, until Ctrl-C."""
    here = credentials.open_home(home)
    place = home / "server"
    place.mkdir(exist_ok=True)
    if here.address.answers():
        raise UsageError(f"port {here.port} of 127.0.0.1 is taken; stop what listens there, or choose another --port")
    command = ["--host", "127.0.0.1", "--port", str(here.port), "--database", str(place / "state.db")]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(home / "secret")]
    if here.insecure:
        command += ["--insecure"]
    else:
        for option, file in (("ca-certfile", "ca.crt"), ("certfile", "server.crt"), ("keyfile", "server.key")):
            command += [f"--ssl-{option}", str(home / file)]
        command += ["--enable-supernode-auth"]
    log = place / "superlink.log"
    with (
        ended_by_signals(),
        held(place / "pid", "the server"),
        flower.child("flower-superlink", command, place / "flwr", log) as process,
    ):
        wait_until(lambda: here.address.answers() or process.poll() is not None, 60)
        known: set[str] = set()
        operator = flower.Operator(here.address)
        while process.poll() is None:
            new = _register(here, operator, known)
            if new or not known:
                said = f"clients that may take part: {', '.join(here.clients()) or 'none yet'}"
                said = said if not here.insecure else "any client of this machine may take part"
                say(f"listening on {'http' if here.insecure else 'https'}://{here.address}; {said}")
                known |= {*new, ""}
            time.sleep(1)
        raise RunFailed(f"the server ended: {_why_it_ended(log)}")


def _register(here: Home, operator: Any, known: set[str]) -> list[str]:
    """Make the keys of new clients known to the server."""
    names = [name for name in here.clients() if name not in known and not here.insecure]
    if not names:
        return []
    there = {node.public_key for node in operator.nodes()}
    for name in names:
        if (key := here.public_key(name)) not in there:
            operator.register(name, key)
    return names


def wait_until(is_done: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if is_done():
            return True
        time.sleep(0.1)
    return False


def _why_it_ended(log: Path) -> str:
    """The last error in a log of Flower's, without its colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8", errors="replace"))
    said = text.rpartition("ERROR")[2].partition("For more information")[0] if "ERROR" in text else text[-300:]
    return f"{' '.join(said.split()).lstrip(': ')[:400]} (more in {log})"


# A client


def run_client(
    data: Path, name: str, home: Path, models: tuple[str, ...], methods: tuple[str, ...], threads: int
) -> None:
    """Take part in runs with our own rows, which stay here, until Ctrl-C."""
    kit = credentials.open_kit(home, name)
    torch.set_num_threads(threads)
    place = kit.folder / "private"
    place.mkdir(exist_ok=True)
    os.chmod(place, 0o700)
    tell = flower.say_to(place / "log.txt", say)
    client = Client(name, data, place, tell, models, methods)
    tell(f"{name}: {len(client.data.y)} rows in {data}; they and our own state stay here, in {place}")
    _check_server(kit.server, tell)
    secret_file, log = place / "secret", place / "supernode.log"
    secret_file.touch(0o600)
    secret_file.write_bytes(secrets.token_bytes(32))
    answers = flower.client_app(client)
    connected, until = place / "connected", time.monotonic() + FORGET_SECONDS
    with ended_by_signals(), held(place / "pid", name):
        while True:
            port = flower.free_port()
            log.write_bytes(b"")
            command = flower.node_command(kit.server, kit.key, port, secret_file)
            with flower.child("flower-supernode", command, place / "flwr", log) as process:
                wait_until(lambda: process.poll() is not None or b"SuperNode ID" in log.read_bytes(), 3600)
                if process.poll() is None:
                    connected.touch()
                    tell(f"connected to {kit.server}; waiting for runs (Ctrl-C ends)")
                flower.run_client_app(port, secret_file.read_bytes(), answers, lambda: process.poll() is None)
            why = _why_it_ended(log)
            if "[code: 2004]" in why:
                # Flower gives one code for a key that it does not know and for one that is connected, as after a crash.
                why = f"it does not know our key {kit.key}, or another client is connected with it"
                if connected.exists() and time.monotonic() < until:
                    tell("the server thinks that we are still connected, as after a crash; trying again in 5 s")
                    time.sleep(5)
                    continue
            raise RunFailed(f"the server at {kit.server} did not take us: {why}")


def _check_server(address: Address, tell: Say) -> None:
    """Say at once what Flower would only try again and again: no server, or one that is not ours."""
    if not address.answers():
        tell(f"no server at {address} yet; trying until there is one")
        return
    if address.ca is None:
        if not _speaks_plain_http(address):
            raise UsageError(
                f"the server at {address} wants TLS and refuses plain HTTP; use a folder with certificates"
            )
        return
    context = ssl.create_default_context(cafile=str(address.ca))
    try:
        with socket.create_connection((address.host, address.port), timeout=5) as plain:
            context.wrap_socket(plain, server_hostname=address.host).close()
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"the server at {address} is not the one that {address.ca} vouches for: {error.verify_message}. "
            "Ask whoever runs it for the right ca.crt"
        ) from None
    except OSError as error:
        raise UsageError(
            f"the server at {address} does not speak TLS ({error}); is it one without certificates?"
        ) from None


def _speaks_plain_http(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=5) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return plain.recv(5) == b"HTTP/"
    except OSError:
        return False


# Runs

ProgressOf = Callable[[str, Path], tuple[Callback, Say]]  # name of the method and log -> who is told of the run


def refuse_options_of_simulation(given: dict[str, Any]) -> None:
    """In a federation the data is with clients, and so is how they compute."""
    for key in given:
        if key in server.NOT_HERE:
            raise UsageError(f"--{key.replace('_', '-')} is for simulations; in a federation the data is with clients")


def start(
    config: Config | None,
    home: Path,
    resume: Path | None,
    wait: float,
    terms: Terms,
    out: Path | None,
    say: Say,
    progress_of: ProgressOf,
) -> Result:
    """A run with the clients that are there, or one that is resumed."""
    if (config is None) == (resume is None):
        raise UsageError("give a METHOD to start a run, or --resume RUN to go on with one")
    found: list[Result] = []

    def main(link: FlowerLink, number: int) -> None:
        if config is not None:
            names = _present(link, credentials.open_home(home).clients(), config.clients, wait, say)
            about = server.new_experiment(server.hellos(link, names, config, terms, say))
            server.make_scene(config, about)
            folder = new_folder(config.model_copy(update={"data": "federation"}), out)
            scene = server.write_start(config, about, folder)
        else:
            assert resume is not None
            folder = resume
            scene, about = server.open_scene(folder)
        callback, tell = progress_of(scene.config.method, folder / "log.txt")
        with held(folder / "pid", "the run", str(number)):
            _note_run(home, folder)
            clients = FederatedClients(scene, about, folder, tell, link, terms)
            if resume is not None:
                clients.load()
            for line in wire.manifest_lines(clients.shapes):
                tell(line)
            found.append(server.play(clients, callback))

    _linked(home, main, left_behind(resume / "pid") if resume is not None else "")
    return found[0]


def _linked(home: Path, main: Callable[[FlowerLink, int], None], ended: str = "") -> None:
    """Call `main` with the way to the clients and the number of Flower's run; that of one that was killed is ended."""
    from plures.federate import flower

    here = credentials.open_home(home)
    os.environ["FLWR_HOME"] = str((home / "server" / "flwr").resolve())
    operator = flower.Operator(here.address)
    try:
        _register(here, operator, set())
        if ended.isdigit():
            operator.stop_run(int(ended))
        number = operator.start_run()
        names = _names_told if here.insecure else _names_registered
        flower.run_server_app(
            here.address, here.secret, flower.server_app(here.address, lambda link: main(link, number), names)
        )
    finally:
        operator.close()


def _names_registered(grid: Grid) -> dict[int, str]:
    """Of the nodes that are there, by the keys that they have shown."""
    return {node.node_id: node.name for node in grid.get_nodes()}


def _names_told(grid: Grid) -> dict[int, str]:
    """Of the nodes that are there, as they say themselves: where no key has to be shown."""
    from plures.federate import flower

    hello = wire.pack(wire.HelloRequest(seed=0, test_share=0.25), {})
    sent = {flower.push(grid, node, hello): node for node in grid.get_node_ids()}
    found: dict[int, str] = {}
    until = time.monotonic() + 15
    while len(found) < len(sent) and time.monotonic() < until:
        for number, answer in flower.pull(grid, list(sent)):
            name = wire.check_fields(wire.Hello, wire.unpack(answer or b"", wire.room())[0]).name
            if name in found.values():
                raise RunFailed(f"two clients say that their name is {name}.")
            found[sent[number]] = name
        time.sleep(server.POLL_SECONDS)
    return found


def _expected(home: Path) -> list[str]:

    return credentials.open_home(home).clients()


def _present(link: FlowerLink, known: list[str], wanted: int | None, wait: float, say: Say) -> list[str]:
    """The names of the clients that are there, once there are enough."""
    n = wanted or max(1, len(known))
    told = False
    until = time.monotonic() + wait
    while True:
        names = link.clients()
        if len(names) >= n:
            return names
        if time.monotonic() > until:
            raise RunFailed(
                f"{len(names)} of {n} clients are there ({', '.join(names) or 'none'}); start the others, "
                "or run with fewer: --clients N"
            )
        if not told:
            missing = [name for name in known if name not in names]
            say(f"waiting for {n - len(names)} more clients" + (f" of {', '.join(missing)}" if missing else ""))
            told = True
        time.sleep(1)


def _note_run(home: Path, folder: Path) -> None:
    """So that `status` and `stop` know of it."""
    path = home / "server" / "runs.txt"
    have = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if str(folder.resolve()) not in have:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{folder.resolve()}\n")


# Status and stop


def status(home: Path) -> dict[str, Any]:
    """Who is there, and how far runs are."""
    here = credentials.open_home(home)
    is_up = here.address.answers()
    clients = dict.fromkeys(here.clients(), "not known to the server")
    if is_up:
        operator = flower.Operator(here.address)
        clients |= {node.name or str(node.node_id): node.status for node in operator.nodes()}
        operator.close()
    runs = [_state_of(folder) for folder in _runs(home)]
    return {"server": str(here.address) if is_up else None, "clients": dict(sorted(clients.items())), "runs": runs}


def print_status(home: Path, as_json: bool) -> None:
    """The status in lines, or as JSON."""
    found = status(home)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    say(f"server   {'listening on ' + found['server'] if found['server'] else 'not running'}")
    for name, state in found["clients"].items():
        say(f"client   {name}: {state}")
    for one in found["runs"]:
        say(f"run      {one['folder']}: {one['method']}, {one['state']}, {one['round']} of {one['rounds']} rounds")


def _runs(home: Path) -> list[Path]:
    path = home / "server" / "runs.txt"
    names = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Path(name) for name in names if (Path(name) / "config.toml").exists()]


def _state_of(folder: Path) -> dict[str, Any]:
    values = read_toml(folder / "config.toml")
    numbers = [int(path.name) for path in (folder / "checkpoint").glob("[0-9]*")]
    is_done = (folder / "summary.json").exists()
    state = "ended" if is_done else "running" if holder(folder / "pid") else "stopped"
    known = {"method": values["method"], "rounds": values["rounds"]}
    return {"folder": str(folder), "state": state, "round": max(numbers, default=0)} | known


def stop(run: Path | None, home: Path) -> None:
    """Stop a run after its round, so that it can be resumed later; or stop the server."""
    path, what = (home / "server" / "pid", "the server") if run is None else (run / "pid", f"the run {run}")
    process = holder(path)
    if process is None:
        raise UsageError(f"{what} is not running")
    os.kill(process, signal.SIGTERM)
    if not wait_until(lambda: holder(path) is None, STOP_SERVER_SECONDS if run is None else STOP_RUN_SECONDS):
        raise RunFailed(f"{what} (process {process}) does not end.")
    say(f"{what} has stopped")


# New clients


def adapt(run: Path, client: str, epochs: int, home: Path, deadline: float, as_json: bool) -> None:
    """A client that was not in training, while a run goes on or after it, makes a model of its own and keeps it."""
    scene, about = server.open_scene(run)
    if client in [one.name for one in about.clients]:
        raise UsageError(f"{client} takes part in {run}: its own model is written when the run ends")

    def main(link: FlowerLink, number: int) -> None:
        wait_until(lambda: client in link.clients(), 30)
        clients = FederatedClients(scene, about, run, say, link, Terms(deadline=deadline))
        clients.load()
        found = server.adapt(clients, client, epochs)
        if as_json:
            print(json.dumps(found, indent=2))
            return
        for number, accuracy in enumerate(found["curve"]):
            say(f"after {number} epochs: {100 * accuracy:.2f} % of its {found['n_test']} test rows are right")
        say(f"{client} has its own model, from the state after round {found['round']}")

    _linked(home, main)
