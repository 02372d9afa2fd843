"""The functions behind the commands `plures federate ...`.

This module needs Flower, from the extra `deploy`, and is imported by those commands alone.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plures._version import __version__
from plures.errors import RunFailed, UsageError
from plures.federate import audit, backup, credentials, flower, server, wire
from plures.federate.credentials import Home
from plures.federate.flower import Channel, FlowerLink
from plures.federate.join import say, stop_on_signals
from plures.federate.server import Caps, FederatedClients, RoundLimits
from plures.files import lock, lock_holder, note_after_crash, read_toml, write_text
from plures.runs.callbacks import Callback, Say
from plures.runs.config import Config
from plures.runs.folders import new_folder
from plures.runs.loop import Result

LATE_SECONDS = 30.0  # after the deadline of a round, until its messages are forgotten
STOP_SERVER_SECONDS, STOP_RUN_SECONDS = 30.0, 3600.0  # longest time to stop; a run completes its round first


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
    # Flower's own state is in memory: keys are in our folder, runs have their checkpoints, and messages are sent again.
    command = ["--host", "127.0.0.1", "--port", str(here.port), "--isolation", "process"]
    command += ["--superexec-auth-secret-file", str(home / "secret")]
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
        flower.superlink(command, place / "flwr", log) as process,
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
    removed = here.removed_keys()
    for name in here.clients():
        try:
            key = here.public_key(name)
            if key in removed:
                raise UsageError("its key has been removed; make a new one with `plures federate rotate`")
            keys[key] = name
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
            try:
                operator.register(name, key)
            except RunFailed:  # the server and `start` may do this at the same time
                if key not in {node.public_key for node in operator.nodes()}:
                    raise


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
    opened = server.open_scene(resume) if resume is not None else None  # first: to tell what is wrong needs no server

    def main(link: FlowerLink, number: int) -> None:
        if config is not None:
            names = _wait_for_clients(link, credentials.open_home(home).clients(), config.clients, wait, say)
            about = server.new_experiment(server.collect_hellos(link, names, config, limits, say, caps, note))
            server.make_scene(config, about)
            folder = new_folder(config.model_copy(update={"data": "federation"}), out)
            scene = server.write_start(config, about, folder)
        else:
            assert resume is not None and opened is not None
            folder = resume
            scene, about = opened
        callback, tell = progress_of(scene.config.method, folder / "log.txt")
        with lock(folder / "pid", "the run", str(number)):
            _list_run(home, folder)
            clients = FederatedClients(scene, about, folder, tell, link, limits, caps, note)
            if resume is not None:
                clients.load()
            for line in wire.manifest_lines(clients.shapes):
                tell(line)
            found.append(server.play(clients, callback))

    _run_with_link(home, main, limits.deadline, note_after_crash(resume / "pid") if resume is not None else "")
    return found[0]


def make_schema(home: Path, out: Path | None, seed: int, test_share: float, wait: float, deadline: float) -> None:
    """Let the connected clients agree on a schema of their tables, and write it down."""
    found: list[str] = []

    def main(link: FlowerLink, number: int) -> None:
        names = _wait_for_clients(link, credentials.open_home(home).clients(), None, wait, say)
        found.append(server.collect_schema(link, names, seed, test_share, RoundLimits(deadline=deadline), say))

    _run_with_link(home, main, deadline)
    path = out or home / "schema.toml"
    write_text(path, found[0])
    say(f"the schema is in {path}")


def _note_in(home: Path) -> server.Note:
    """Writes the audit log of a federation."""
    return lambda client, asked, answered: audit.write(home / "server" / audit.FILE, client, asked, answered)


def _run_with_link(home: Path, main: Callable[[FlowerLink, int], None], deadline: float, killed_run: str = "") -> None:
    """Call `main` with a link to the clients and the number of a new Flower run. A killed Flower run is ended first."""
    here = credentials.open_home(home)
    os.environ["FLWR_HOME"] = str((home / "server" / "flwr").resolve())
    operator = flower.Operator(here.address)
    key, is_done = here.operator_key, False

    def make_channel() -> Channel:
        _synchronize(here, operator)
        return Channel(here.address, here.secret, operator)

    try:
        if killed_run.isdigit():
            operator.stop_run(int(killed_run))
        link = FlowerLink(
            here.address,
            make_channel,
            _ask_names if here.insecure else _registered_names,
            lambda client, message: credentials.seal(key, client, message),
            lambda client: not here.insecure and client not in here.clients(),
        )
        link.lifetime = deadline + LATE_SECONDS
        try:
            main(link, link.channel.number)
            is_done = True
        finally:
            link.close(is_done)
    finally:
        operator.close()


def _registered_names(channel: Channel) -> dict[int, str]:
    """The names of the connected nodes, by the keys that they have shown."""
    return {node.node_id: node.name for node in channel.nodes()}


def _ask_names(channel: Channel) -> dict[int, str]:
    """The names of the connected nodes, as they say themselves: for servers that need no key."""
    hello = wire.pack(wire.HelloRequest(seed=0, test_share=0.25), {})
    nodes = [node.node_id for node in channel.nodes()]
    messages = [flower.message_to(node, hello, 60.0) for node in nodes]
    unknown = channel.push(messages) if messages else []
    sent = {one.number: node for one, node in zip(messages, nodes, strict=True) if one.number not in unknown}
    found: dict[int, str] = {}
    until = time.monotonic() + 15
    while len(found) < len(sent) and time.monotonic() < until:
        for answer in channel.pull([number for number, node in sent.items() if node not in found], wire.most_bytes()):
            content = answer.content()
            if content is None:
                continue  # the client has left
            name = wire.check_fields(wire.Hello, wire.unpack(content, wire.most_bytes())[0]).name
            if name in found.values():
                raise RunFailed(f"two clients say that their name is {name}.")
            found[sent[answer.message.metadata.reply_to_message_id]] = name
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

    _run_with_link(home, main, deadline)
