"""Flower carries the messages: the only file that imports it.

Server and clients are Flower's own SuperLink and SuperNodes, in their mode `process`: they move messages, check
keys and watch who is alive, and start no code. Each message is taken up by the process that the user started:
the clients' by `plures federate client` and the server's by `plures federate start`. So the code that is run is the
one that was installed, never one that came with a message; and a message costs no new process.

These parts of Flower are not its public interface: the version is bounded above in `pyproject.toml`.
"""

import hashlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

os.environ.update(
    {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
)

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest, StopRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from plures.errors import RunFailed, UsageError
from plures.federate import wire
from plures.federate.client import Client
from plures.runs.callbacks import Say

logging.getLogger("flwr").setLevel(logging.ERROR)
for _pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
    assert _pull.__kwdefaults__ is not None
    _pull.__kwdefaults__["initial_backoff"] = 0.1  # seconds, not 1, until a piece that is on its way is asked for again

LEAST_NAP, MOST_NAP = 0.1, 0.5  # seconds between questions for a message
SMALL = 1 << 20  # bytes of a message that is not cut into pieces
Names = dict[int, str]  # number of a node -> name of the client
NONCE = 16  # bytes before a message, so that no two are equal
SENT = "message"  # the name of what travels among Flower's records


class Address(NamedTuple):
    """Where the server is, and how to know that it is the server."""

    host: str
    port: int
    ca: Path | None  # certificate of the authority; None is plain HTTP

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def certificate(self) -> bytes | None:
        return self.ca.read_bytes() if self.ca is not None else None

    def answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=2):
                return True
        except OSError:
            return False


# One message as Flower's records: our bytes, which Flower does not look into


def to_records(content: bytes) -> RecordDict:
    # Flower keeps equal pieces once, and loses them if a run ends that had them too; an answer given twice is equal.
    unique = secrets.token_bytes(NONCE) + content
    if len(unique) <= SMALL:  # carried in three pieces; an array takes five at least
        return RecordDict({SENT: ConfigRecord({SENT: unique})})
    array = Array(dtype="uint8", shape=(len(unique),), stype="safetensors", data=unique)
    return RecordDict({SENT: ArrayRecord({SENT: array})})


def from_records(records: RecordDict) -> bytes:
    try:
        found = records[SENT][SENT]
        return bytes(found if isinstance(found, bytes) else found.data)[NONCE:]
    except (KeyError, AttributeError, TypeError):
        return b""  # no message of ours, which whoever reads it finds


# The server's operator


class Operator:
    """Talks to a SuperLink as whoever runs it."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._client = ControlHttpClient.from_server_address(
            str(address), address.ca is None, address.certificate, [RuntimeVersionHttpInterceptor("flwr CLI")]
        )

    def nodes(self) -> list[Any]:
        with told(self.address):
            return [
                node for node in self._client.ListNodes(ListNodesRequest()).nodes_info if node.status != "unregistered"
            ]

    def register(self, name: str, public_key: bytes) -> int:
        with told(self.address):
            return int(self._client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name)).node_id)

    def start_run(self) -> int:
        """A run of Flower's, which is what messages are sent in."""
        with tempfile.TemporaryDirectory() as folder, told(self.address):
            Path(folder, "pyproject.toml").write_text(_APP, encoding="utf-8")
            Path(folder, "README.md").write_text("An empty app: Plures runs what is installed.\n", encoding="utf-8")
            content = build_fab_from_disk(Path(folder))
            request = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})))
            return int(self._client.StartRun(request).run_id)

    def stop_run(self, number: int) -> None:
        """End a run of Flower's whose sender has died, so that clients do not wait for the rest of its messages."""
        try:
            self._client.StopRun(StopRunRequest(run_id=number))
        except httpx.HTTPStatusError:
            pass  # it has ended already

    def close(self) -> None:
        self._client.close()


_APP = """
[project]
name = "plures-messages"
version = "1.0.0"
description = "Carries messages of Plures"
license = "Apache-2.0"
dependencies = []
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "plures"
[tool.flwr.app.components]
serverapp = "plures.federate.flower:nothing"
clientapp = "plures.federate.flower:nothing"
[tool.flwr.app.config]
"""


@contextmanager
def told(address: Address) -> Iterator[None]:
    """What goes wrong between us and the server, in words."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise RunFailed(f"the server at {address} refused: {error.response.status_code} {_reason(error)}.") from None
    except httpx.HTTPError as error:
        raise RunFailed(
            f"the server at {address} cannot be reached ({type(error).__name__}); "
            "start it with `plures federate server`, and look at its certificate."
        ) from None


def _reason(error: httpx.HTTPStatusError) -> str:
    return wire.printable(error.response.text.replace("\n", " ")) or "without a reason"


# The server's messages


def server_app(address: Address, main: Callable[["FlowerLink"], None], names: Callable[[Grid], Names]) -> ServerApp:
    """The one ServerApp for all methods: `main` is given the way to the clients."""
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        main(FlowerLink(address, grid, names))

    return app


class FlowerLink:
    """The way to the clients over Flower's grid."""

    def __init__(self, address: Address, grid: Grid, names: Callable[[Grid], Names]) -> None:
        self._address, self._grid, self._names = address, grid, names
        self._nodes: dict[str, int] = {}

    def clients(self) -> list[str]:
        with told(self._address):
            there = self._names(self._grid)
        self._nodes |= {name: node for node, name in there.items()}
        return sorted(there.values())

    def push(self, client: str, message: bytes) -> str:
        if client not in self._nodes:
            self.clients()
        if client not in self._nodes:
            return f"{client} is not there"  # as good as lost: it may come
        with told(self._address):
            return push(self._grid, self._nodes[client], message)

    def pull(self, numbers: list[str]) -> list[tuple[str, bytes | None]]:
        lost = [number for number in numbers if " " in number]
        with told(self._address):
            found = pull(self._grid, [number for number in numbers if number not in lost])
        return found + [(number, None) for number in lost]


def push(grid: Grid, node: int, message: bytes) -> str:
    sent = list(grid.push_messages([Message(to_records(message), node, "query")]))
    if not sent or not sent[0]:
        raise RunFailed("the server did not take a message; is it too large?")
    return sent[0]


def pull(grid: Grid, numbers: list[str]) -> list[tuple[str, bytes | None]]:
    found = []
    for message in grid.pull_messages(numbers) if numbers else []:
        content = from_records(message.content) if message.has_content() else None
        found.append((message.metadata.reply_to_message_id, content))
    return found


def run_server_app(address: Address, secret: bytes, app: ServerApp) -> None:
    """Take up a run of Flower's and carry the app out in it, here."""
    runtime = _runtime(address, [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_PROTECTED)])
    began, token = time.monotonic(), None
    while token is None:
        with told(address):
            token = _acquired(runtime, TaskType.SERVER_APP)
        if time.monotonic() - began > 30:
            raise RunFailed("the server gave no run to send messages in; is another program taking its runs?")
        time.sleep(LEAST_NAP)
    runtime.close()
    grid = HttpGrid(str(address), address.ca is None, address.certificate, token=token)
    # Flower would try for ever to reach a server that is gone, and end us by a signal if that has forgotten the run.
    grid._retry_invoker = None
    client, status = grid._runtime_client, SubStatus.FAILED
    with told(address):
        heartbeat = _heartbeat(client)
        try:
            found = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = found.task_id, found.run.run_id
            TaskIdentity.node_id = found.context.node_id
            grid.set_run(run_from_proto(found.run))
            app(grid=grid, context=context_from_proto(found.context))
            status = SubStatus.COMPLETED
        finally:
            heartbeat.stop()
            try:
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
            except httpx.HTTPError:
                pass  # the server is gone, and with it the run
            grid.close()


# A client's messages


def client_app(client: Client) -> ClientApp:
    """The one ClientApp for all methods."""
    app = ClientApp()

    @app.query()
    def _query(message: Message, context: Context) -> Message:
        return Message(to_records(client.answer(from_records(message.content))), reply_to=message)

    return app


def run_client_app(runtime_port: int, secret: bytes, app: ClientApp, is_alive: Callable[[], bool]) -> None:
    """Answer the messages that a SuperNode of this machine receives, one after another."""
    address = Address("127.0.0.1", runtime_port, None)
    runtime = _runtime(address, [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_PROTECTED)])
    here: SimpleQueue[_Task] = SimpleQueue()
    last = time.monotonic()
    while is_alive():
        try:
            if (token := _acquired(runtime, TaskType.CLIENT_APP)) is not None:
                # The rest of a message may be on its way for long, or for ever if its sender died: others pass it.
                threading.Thread(target=_fetch, args=(address, token, here), daemon=True).start()
            task = here.get(timeout=_nap(last))
            task.answer(app)
            last = time.monotonic()
        except Empty:
            continue
        except httpx.HTTPError:
            time.sleep(MOST_NAP)  # the SuperNode is ending, or has forgotten the message
    runtime.close()


class _Task(NamedTuple):
    """A message that has arrived."""

    client: RuntimeHttpClient
    heartbeat: HeartbeatSender
    message: Message
    context: Context

    def answer(self, app: ClientApp) -> None:
        try:
            push_message(self.client, app(message=self.message, context=self.context), self.context)
            push_task_output(self.client, self.context, SubStatus.COMPLETED, "")
        finally:
            self.heartbeat.stop()
            self.client.close()


def _fetch(address: Address, token: str, here: "SimpleQueue[_Task]") -> None:
    client = _runtime(address, [RuntimeTokenHttpInterceptor(token)])
    heartbeat = _heartbeat(client)
    try:
        message, context, _, _ = pull_task_input(client)
    except Exception:  # it will not arrive, for a reason of Flower's
        heartbeat.stop()
        client.close()
    else:
        here.put(_Task(client, heartbeat, message, context))


# What both have in common

_PROTECTED = frozenset({"/flwr.proto.Runtime/AcquireTask"})


def _runtime(address: Address, interceptors: list[Any]) -> RuntimeHttpClient:
    known = RuntimeVersionHttpInterceptor("SuperExec")
    return RuntimeHttpClient.from_server_address(
        str(address), address.ca is None, address.certificate, [known, *interceptors]
    )


def _acquired(runtime: RuntimeHttpClient, kind: str) -> str | None:
    """The token of a task, if there is one."""
    found = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return str(found.token) if found.HasField("task") and found.token else None


def _nap(last: float) -> float:
    """Seconds until the next question for a message: the longer there was none, the more."""
    return min(MOST_NAP, max(LEAST_NAP, (time.monotonic() - last) / 20))


def _heartbeat(client: RuntimeHttpClient) -> HeartbeatSender:
    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.HTTPError:
            return False
        return True

    sender = HeartbeatSender(beat)
    sender.start()
    return sender


# Processes


@contextmanager
def child(program: str, arguments: list[str], home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program of Flower's that ends when we do, however we end: `watchdog.py` waits for our end of a pipe."""
    home.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"FLWR_HOME": str(home.resolve())}
    command = [sys.executable, str(Path(__file__).with_name("watchdog.py")), program, *arguments]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def node_command(server: Address, key: Path | None, runtime_port: int, secret_file: Path) -> list[str]:
    arguments = ["--superlink", str(server), "--isolation", "process", "--host", "127.0.0.1"]
    arguments += ["--port", str(runtime_port), "--superexec-auth-secret-file", str(secret_file)]
    if server.ca is None:
        return [*arguments, "--insecure"]
    if key is None:
        raise UsageError("a node needs its key where the server is not plain HTTP")
    return [*arguments, "--root-certificates", str(server.ca), "--auth-supernode-private-key", str(key)]


def say_to(log: Path, also: Say) -> Say:
    """Say it here and in a log."""

    def say(line: str) -> None:
        with open(log, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        also(line)

    return say
