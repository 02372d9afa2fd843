"""The functions behind the commands `plures federate ...`.

This module needs Flower, from the extra `deploy`, and is imported by those commands alone.
"""

import email.utils
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

from plures._version import __version__
from plures.data.reading import Reading
from plures.errors import RunFailed, UsageError
from plures.federate import audit, backup, credentials, flower, server, wire
from plures.federate.client import Client
from plures.federate.credentials import Home
from plures.federate.flower import Address, FlowerLink
from plures.federate.policy import FILE, read_policy
from plures.federate.server import Caps, FederatedClients, RoundLimits
from plures.files import lock, lock_holder, note_after_crash, read_toml, write_text
from plures.runs.callbacks import Callback, Say
from plures.runs.config import Config, make_config
from plures.runs.folders import new_folder
from plures.runs.loop import Result
from plures.runs.scene import reading_of

FORGET_SECONDS = 120.0  # until the server has noticed that a client is gone
STOP_SERVER_SECONDS, STOP_RUN_SECONDS = 30.0, 3600.0  # longest time to stop; a run completes its round first


def say(line: str) -> None:
    """Print a line and flush, so that it reaches a pipe at once."""
    print(line, flush=True)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does: in order, together with its children."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say("stopped")
    finally:
        signal.signal(signal.SIGTERM, old)


# Certificates and keys


def init(folder: Path, clients: list[str], address: str, port: int, hosts: list[str], insecure: bool) -> None:
    """Make certificates and keys, or add clients, and print what to type next."""
    server_home = credentials.make_home(folder, clients, port, address, hosts, insecure)
    say(f"{folder}: clients {', '.join(server_home.clients()) or 'none yet, add some with --client NAME'}")
    if insecure:
        say("plain HTTP, and clients need no key: only for trying things out on one machine")
    say(f"what to type next is in {folder / 'README.md'}")


# The server


def run_server(home: Path) -> None:
    """Run the server, which carries messages between clients and runs, until Ctrl-C."""
    here = credentials.open_home(home)
    place = home / "server"
    place.mkdir(exist_ok=True)
    if here.address.is_listening():
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
        stop_on_signals(),
        lock(place / "pid", "the server"),
        flower.child_process("flower-superlink", command, place / "flwr", log) as process,
    ):
        wait_until(lambda: here.address.is_listening() or process.poll() is not None, 60)
        _watch_server(here, process)
        raise RunFailed(f"the server ended: {_last_error(log)}")


def _watch_server(here: Home, process: Any) -> None:
    """Let clients in and out as their keys come and go, until the server ends."""
    operator = flower.Operator(here.address)
    seen: dict[Path, float] | None = None
    try:
        while process.poll() is None:
            files = here.key_files()
            if files != seen:
                seen = files
                _synchronize(here, operator)
                allowed = f"clients that may take part: {', '.join(here.clients()) or 'none yet'}"
                allowed = allowed if not here.insecure else "any client on this machine may take part"
                say(f"listening on {'http' if here.insecure else 'https'}://{here.address}; {allowed}")
            time.sleep(1)
    finally:
        operator.close()


def _synchronize(here: Home, operator: Any) -> None:
    """Let the server know the keys of all clients that have a folder, and no others."""
    if here.insecure:
        return
    keys: dict[bytes, str] = {}
    for name in here.clients():
        try:
            keys[here.public_key(name)] = name
        except UsageError as error:
            say(f"{name} cannot take part: {error}")
    nodes = operator.nodes()
    for node in nodes:
        if node.public_key not in keys:
            operator.unregister(node.node_id)
            say(f"{node.name or node.node_id} may no longer take part: its key is not in {here.folder / 'clients'}")
    there = {node.public_key for node in nodes}
    for key, name in keys.items():
        if key not in there:
            operator.register(name, key)


def _synchronize_now(here: Home) -> None:
    """The same from another process, if the server is running."""
    if here.address.is_listening():
        operator = flower.Operator(here.address)
        try:
            _synchronize(here, operator)
        finally:
            operator.close()


def remove(name: str, home: Path) -> None:
    """Take a client's right to take part, at once."""
    here = credentials.open_home(home)
    place = credentials.remove_client(here, name)
    _synchronize_now(here)
    say(f"{name} can no longer connect; its folder is now {place}. To let it in again, make a new key with `init`")


def rotate(name: str | None, public_key: Path | None, home: Path) -> None:
    """New keys for a client, whose old ones are worth nothing from now on; or a new certificate for the server."""
    here = credentials.open_home(home)
    if name is None:
        credentials.rotate_certificate(here)
        say(f"{home / 'server.crt'} is new, by the same authority; clients need nothing, a running server takes it up")
        return
    credentials.rotate_key(here, name, public_key)
    _synchronize_now(here)
    whose = "its own new key" if public_key else f"the new node.key in {home / 'clients' / name}: carry it there"
    say(f"{name} can no longer connect with its old key; it needs {whose}")


def wait_until(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition is true, at most this long. Returns whether it became true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if is_done():
            return True
        time.sleep(0.1)
    return False


def _last_error(log: Path) -> str:
    """The last error in a log of Flower, without colour codes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8", errors="replace"))
    error = text.rpartition("ERROR")[2].partition("For more information")[0] if "ERROR" in text else text[-300:]
    return f"{' '.join(error.split()).lstrip(': ')[:400]} (more in {log})"


# A client


def reading_of_client(
    target: str | None, drop: str | None, time_column: str | None, task: str | None, schema: Path | None
) -> Reading:
    """How a client reads its table."""
    given = {"target": target, "drop": drop, "time_column": time_column, "task": task}
    given |= {"data_schema": None if schema is None else str(schema)}
    return reading_of(make_config({key: value for key, value in given.items() if value is not None}))


def run_client(
    data: Path,
    name: str,
    home: Path,
    models: tuple[str, ...],
    methods: tuple[str, ...],
    threads: int,
    reading: Reading = Reading(),  # noqa: B008
) -> None:
    """Run a client, which takes part in runs with its own rows, until Ctrl-C."""
    kit = credentials.open_kit(home, name)
    torch.set_num_threads(threads)
    place = kit.folder / "private"
    place.mkdir(exist_ok=True)
    os.chmod(place, 0o700)
    tell = flower.say_and_log(place / "log.txt", say)
    policy = read_policy(kit.folder)
    client = Client(name, data, place, tell, models, methods, policy, reading)
    tell(f"{name}: {len(client.data.y)} rows in {data}; they and our own state stay here, in {place}")
    tell(f"rules of {kit.folder / FILE}: {policy.changes() or 'the defaults'}")
    _check_server(kit.server, tell)
    secret_file, log = place / "secret", place / "supernode.log"
    secret_file.touch(0o600)
    secret_file.write_bytes(secrets.token_bytes(32))
    keys = credentials.operator_keys(kit.folder, policy.operators)
    if not keys:
        tell("requests are not signed: whoever the server lets in may ask (operators in policy.toml)")
    app = flower.client_app(client, lambda sealed: credentials.unseal(keys, name, sealed))
    connected, until = place / "connected", time.monotonic() + FORGET_SECONDS
    with stop_on_signals(), lock(place / "pid", name):
        while True:
            port = flower.free_port()
            log.write_bytes(b"")
            command = flower.node_command(kit.server, kit.key, port, secret_file)
            was_connected = False
            with flower.child_process("flower-supernode", command, place / "flwr", log) as process:
                wait_until(lambda: process.poll() is not None or b"SuperNode ID" in log.read_bytes(), 3600)
                if process.poll() is None:
                    was_connected = True
                    connected.touch()
                    tell(f"connected to {kit.server}; waiting for runs (Ctrl-C ends)")
                flower.run_client_app(port, secret_file.read_bytes(), app, lambda: process.poll() is None)
            why = _last_error(log)
            if was_connected and "[code: 2004]" not in why:
                tell(f"the connection ended ({_ending(process.returncode)}); connecting again")
                until = time.monotonic() + FORGET_SECONDS
                time.sleep(1)
                continue
            if "[code: 2004]" in why:
                # Flower has one code for an unknown key and for a key that is still connected, as after a crash.
                why = f"it does not know our key {kit.key}, or another client is connected with it"
                if connected.exists() and time.monotonic() < until:
                    tell("the server thinks that we are still connected, as after a crash; trying again in 5 s")
                    time.sleep(5)
                    continue
            raise RunFailed(f"the server at {kit.server} did not take us: {why}")


def _ending(code: int | None) -> str:
    """How a process ended, in words."""
    return f"its process was killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _check_server(address: Address, tell: Say) -> None:
    """Report a missing or a wrong server at once: Flower would only retry again and again."""
    if not address.is_listening():
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
            with context.wrap_socket(plain, server_hostname=address.host) as link:
                link.sendall(f"HEAD / HTTP/1.0\r\nHost: {address.host}\r\n\r\n".encode())
                head = link.recv(4096).decode("latin-1")
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"the server at {address} is not the one that {address.ca} vouches for: {error.verify_message}. "
            "Ask its operator for the right ca.crt"
        ) from None
    except OSError as error:
        raise UsageError(
            f"the server at {address} does not speak TLS ({error}); is it one without certificates?"
        ) from None
    _check_clock(head, time.time())


AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 300.0  # how far Flower lets a client's clock be from the server's


def _check_clock(head: str, now: float) -> None:
    """Refuse a clock with which Flower would take every message of ours for a replayed one."""
    found = re.search(r"(?im)^date: *(.+?) *\r?$", head)
    if not found:
        return
    try:
        skew = now - email.utils.parsedate_to_datetime(found[1]).timestamp()
    except ValueError:
        return
    # The header has whole seconds, and was written up to a second ago.
    if skew - 2 > AHEAD_SECONDS or skew < -BEHIND_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        raise UsageError(
            f"our clock is {abs(skew):.0f} seconds {way} the server's; up to {AHEAD_SECONDS:.0f} ahead and "
            f"{BEHIND_SECONDS:.0f} behind are allowed. Set it by the network, e.g. with `timedatectl set-ntp true`"
        )


def _speaks_plain_http(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=5) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return plain.recv(5) == b"HTTP/"
    except OSError:
        return False


# Runs

ProgressOf = Callable[[str, Path], tuple[Callback, Say]]  # (name of the method, log file) -> callback and printer


def refuse_options_of_simulation(given: dict[str, Any]) -> None:
    """Refuse options about data and computation, which are up to the clients in a federation."""
    for key in given:
        if key in wire.SIMULATION_ONLY:
            raise UsageError(f"--{key.replace('_', '-')} is for simulations; in a federation the data is with clients")


def start(
    config: Config | None,
    home: Path,
    resume: Path | None,
    wait: float,
    limits: RoundLimits,
    caps: Caps,
    out: Path | None,
    say: Say,
    progress_of: ProgressOf,
) -> Result:
    """Start a run with the connected clients, or resume one."""
    if (config is None) == (resume is None):
        raise UsageError("give a METHOD to start a run, or --resume RUN to resume one")
    found: list[Result] = []
    note = _note_in(home)

    def main(link: FlowerLink, number: int) -> None:
        if config is not None:
            names = _wait_for_clients(link, credentials.open_home(home).clients(), config.clients, wait, say)
            about = server.new_experiment(server.collect_hellos(link, names, config, limits, say, caps, note))
            server.make_scene(config, about)
            folder = new_folder(config.model_copy(update={"data": "federation"}), out)
            scene = server.write_start(config, about, folder)
        else:
            assert resume is not None
            folder = resume
            scene, about = server.open_scene(folder)
        callback, tell = progress_of(scene.config.method, folder / "log.txt")
        with lock(folder / "pid", "the run", str(number)):
            _list_run(home, folder)
            clients = FederatedClients(scene, about, folder, tell, link, limits, caps, note)
            if resume is not None:
                clients.load()
            for line in wire.manifest_lines(clients.shapes):
                tell(line)
            found.append(server.play(clients, callback))

    _run_with_link(home, main, note_after_crash(resume / "pid") if resume is not None else "")
    return found[0]


def make_schema(home: Path, out: Path | None, seed: int, test_share: float, wait: float, deadline: float) -> None:
    """Let the connected clients agree on a schema of their tables, and write it down."""
    found: list[str] = []

    def main(link: FlowerLink, number: int) -> None:
        names = _wait_for_clients(link, credentials.open_home(home).clients(), None, wait, say)
        found.append(server.collect_schema(link, names, seed, test_share, RoundLimits(deadline=deadline), say))

    _run_with_link(home, main)
    path = out or home / "schema.toml"
    write_text(path, found[0])
    say(f"the schema is in {path}")


def _note_in(home: Path) -> server.Note:
    """Writes the audit log of a federation."""
    return lambda client, asked, answered: audit.write(home / "server" / audit.FILE, client, asked, answered)


def _run_with_link(home: Path, main: Callable[[FlowerLink, int], None], killed_run: str = "") -> None:
    """Call `main` with a link to the clients and the number of a new Flower run. A killed Flower run is ended first."""
    here = credentials.open_home(home)
    os.environ["FLWR_HOME"] = str((home / "server" / "flwr").resolve())
    operator = flower.Operator(here.address)
    try:
        _synchronize(here, operator)
        if killed_run.isdigit():
            operator.stop_run(int(killed_run))
        number = operator.start_run()
        names = _ask_names if here.insecure else _registered_names
        key = here.operator_key
        app = flower.server_app(
            here.address,
            lambda link: main(link, number),
            names,
            lambda client, message: credentials.seal(key, client, message),
            lambda client: not here.insecure and client not in here.clients(),
        )
        flower.run_server_app(here.address, here.secret, app)
    finally:
        operator.close()


def _registered_names(grid: Grid) -> dict[int, str]:
    """The names of the connected nodes, by the keys that they have shown."""
    return {node.node_id: node.name for node in grid.get_nodes()}


def _ask_names(grid: Grid) -> dict[int, str]:
    """The names of the connected nodes, as they say themselves: for servers that need no key."""
    hello = wire.pack(wire.HelloRequest(seed=0, test_share=0.25), {})
    sent = {flower.push(grid, node, hello): node for node in grid.get_node_ids()}
    found: dict[int, str] = {}
    until = time.monotonic() + 15
    while len(found) < len(sent) and time.monotonic() < until:
        for number, answer in flower.pull(grid, list(sent)):
            name = wire.check_fields(wire.Hello, wire.unpack(answer or b"", wire.most_bytes())[0]).name
            if name in found.values():
                raise RunFailed(f"two clients say that their name is {name}.")
            found[sent[number]] = name
        time.sleep(server.POLL_SECONDS)
    return found


def _wait_for_clients(link: FlowerLink, known: list[str], wanted: int | None, wait: float, say: Say) -> list[str]:
    """The names of the connected clients, once there are enough."""
    n = wanted or max(1, len(known))
    has_said = False
    until = time.monotonic() + wait
    while True:
        names = link.clients()
        if len(names) >= n:
            return names
        if time.monotonic() > until:
            raise RunFailed(
                f"{len(names)} of {n} clients are connected ({', '.join(names) or 'none'}); start the others, "
                "or run with fewer: --clients N"
            )
        if not has_said:
            missing = [name for name in known if name not in names]
            say(f"waiting for {n - len(names)} more clients" + (f" of {', '.join(missing)}" if missing else ""))
            has_said = True
        time.sleep(1)


def _list_run(home: Path, folder: Path) -> None:
    """Add a run to the list of runs, which `status` prints."""
    path = home / "server" / "runs.txt"
    have = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if str(folder.resolve()) not in have:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{folder.resolve()}\n")


# Status and stop


def status(home: Path) -> dict[str, Any]:
    """The address of the server, the states of all clients, and the progress of all runs."""
    here = credentials.open_home(home)
    is_up = here.address.is_listening()
    clients = dict.fromkeys(here.clients(), "not known to the server")
    if is_up:
        operator = flower.Operator(here.address)
        clients |= {node.name or str(node.node_id): node.status for node in operator.nodes()}
        operator.close()
    runs = [_run_status(folder) for folder in _runs(home)]
    about = {name: _client_status(name, home) for name in sorted(clients)}
    found = {"server": str(here.address) if is_up else None, "clients": dict(sorted(clients.items()))}
    return found | {"details": about, "runs": runs, "plures": __version__}


def _client_status(name: str, home: Path) -> dict[str, Any]:
    """What the audit log and the runs tell of a client: when it last answered, its version, refusals and silence."""
    lines = [line for line in audit.read(home / "server" / audit.FILE) if line.get("who") == name]
    answers = [line for line in lines if line.get("answered") != "nothing"]
    version = None
    for folder in _runs(home):
        clients = json.loads((folder / server.ABOUT).read_text(encoding="utf-8"))["clients"]
        version = next((one.get("version") for one in clients if one["name"] == name), version)
    return {
        "last_seen": answers[-1]["at"] if answers else None,
        "version": version,
        "refused": sum(str(line.get("answered")).startswith("refused") for line in lines),
        "silent": len(lines) - len(answers),
    }


def print_status(home: Path, as_json: bool) -> None:
    """Print the status as lines, or as JSON."""
    found = status(home)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    say(f"server   {'listening on ' + found['server'] if found['server'] else 'not running'}")
    for name, state in found["clients"].items():
        about = found["details"][name]
        seen = f"last answer {about['last_seen']}" if about["last_seen"] else "no answer yet"
        version = f", Plures {about['version']}" if about["version"] else ""
        say(f"client   {name}: {state}, {seen}, {about['refused']} refused, {about['silent']} silent{version}")
    for one in found["runs"]:
        say(f"run      {one['folder']}: {one['method']}, {one['state']}, {one['round']} of {one['rounds']} rounds")


def _runs(home: Path) -> list[Path]:
    path = home / "server" / "runs.txt"
    names = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Path(name) for name in names if (Path(name) / "config.toml").exists()]


def _run_status(folder: Path) -> dict[str, Any]:
    values = read_toml(folder / "config.toml")
    numbers = [int(path.name) for path in (folder / "checkpoint").glob("[0-9]*")]
    is_done = (folder / "summary.json").exists()
    state = "ended" if is_done else "running" if lock_holder(folder / "pid") else "stopped"
    known = {"method": values["method"], "rounds": values["rounds"]}
    return {"folder": str(folder), "state": state, "round": max(numbers, default=0)} | known


def stop(run: Path | None, home: Path) -> None:
    """Stop a run after its current round, so that it can be resumed; or stop the server."""
    path, what = (home / "server" / "pid", "the server") if run is None else (run / "pid", f"the run {run}")
    process = lock_holder(path)
    if process is None:
        raise UsageError(f"{what} is not running")
    os.kill(process, signal.SIGTERM)
    if not wait_until(lambda: lock_holder(path) is None, STOP_SERVER_SECONDS if run is None else STOP_RUN_SECONDS):
        raise RunFailed(f"{what} (process {process}) does not end.")
    say(f"{what} has stopped")


# Backups


def back_up(target: Path, home: Path) -> None:
    """Write all that the server needs to begin again into one file."""
    runs = _runs(home)
    backup.write(credentials.open_home(home), runs, target)
    say(f"{target}: {home} with its keys, and {len(runs)} runs. Whoever has it can be this server: keep it safe")


def restore(source: Path, folder: Path, address: str | None) -> None:
    """Make the folder of a federation from a backup."""
    here = backup.restore(source, folder, address)
    say(f"{folder}: clients {', '.join(here.clients()) or 'none'}; runs are in {folder / 'runs'}")
    if address:
        say(f"clients find the server at {here.host}:{here.open_port}: change host and port in their client.toml")
    say(f"start it with: plures federate server --home {folder}")


# New clients


def adapt(run: Path, client: str, epochs: int, home: Path, deadline: float, as_json: bool) -> None:
    """Let a client that did not take part make a personal model, which it keeps; during a run or after it."""
    scene, about = server.open_scene(run)
    if client in [one.name for one in about.clients]:
        raise UsageError(f"{client} takes part in {run}: its personal model is written when the run ends")

    def main(link: FlowerLink, number: int) -> None:
        wait_until(lambda: client in link.clients(), 30)
        limits = RoundLimits(deadline=deadline)
        clients = FederatedClients(scene, about, run, say, link, limits, note=_note_in(home))
        clients.load()
        found = server.adapt(clients, client, epochs)
        if as_json:
            print(json.dumps(found, indent=2))
            return
        metric = scene.metric
        for number, value in enumerate(found["curve"]):
            say(f"after {number} epochs: {metric.word} {metric.text(value)} on its {found['n_test']} test rows")
        say(f"{client} has its own model, from the state after round {found['round']}")

    _run_with_link(home, main)
