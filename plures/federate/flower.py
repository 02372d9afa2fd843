"""The interface to Flower, which carries the messages.

Server and clients are Flower's own SuperLink and SuperNodes, in their mode `process`: they carry messages, check keys
and monitor connections, and start no code. Messages are handled by the processes that users start: `plures federate
client` answers them, and `plures federate start` sends them. So only installed code runs, never code that came with a
message, and a message needs no new process.

These parts of Flower are not its public interface: `pyproject.toml` sets an upper bound on its version.
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
from typing import Any, NamedTuple, TypeVar

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
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
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
from flwr.superlink.grid import HttpGrid, http_grid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from plures.errors import RunFailed, UsageError
from plures.federate import wire
from plures.federate.client import Client
from plures.runs.callbacks import Say

logging.getLogger("flwr").setLevel(logging.ERROR)
for _pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
    assert _pull.__kwdefaults__ is not None
    _pull.__kwdefaults__["initial_backoff"] = 0.1  # seconds (not 1) until a missing piece is requested again


class _Allowance:
    """How many bytes an answer may have. What has more is not read to its end, so that it cannot fill the memory."""

    most = 1 << 33
    lock = threading.Lock()

    def pull(self, object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        """As Flower's `pull_objects`, for the pieces of one answer."""
        left = self.most + self.most // 100 + SMALL  # Flower adds some bytes to each piece

        def pull_piece(object_id: str) -> bytes:
            nonlocal left
            content = pull_object_fn(object_id)
            with self.lock:
                left -= len(content)
                if left < 0:
                    raise inflatable_utils.ObjectPullError(object_id, TOO_LARGE)
            return content

        return inflatable_utils.pull_objects(object_ids, pull_piece)


allowance = _Allowance()
http_grid.pull_objects = allowance.pull
TOO_LARGE = "the answer has more bytes than were expected"
LEAST_DELAY, MOST_DELAY = 0.1, 0.5  # seconds between requests for a message
SMALL = 1 << 20  # largest size in bytes of a message that is not cut into pieces
Names = dict[int, str]  # number of a node -> name of the client
RECONNECT_SECONDS = 20.0  # that a run waits for a server that is not there
NONCE = 16  # random bytes before each message, so that no two are equal
SENT = "message"  # name of our record among Flower's records


class Address(NamedTuple):
    """The address of a server, and the certificate to verify it with."""

    host: str
    port: int
    ca: Path | None  # certificate of the authority; None for plain HTTP

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def certificate(self) -> bytes | None:
        """The certificate of the authority; None for plain HTTP."""
        return self.ca.read_bytes() if self.ca is not None else None

    def is_listening(self) -> bool:
        """Whether a process listens at this address."""
        try:
            with socket.create_connection((self.host, self.port), timeout=2):
                return True
        except OSError:
            return False


# Messages as Flower's records: bytes that Flower does not interpret


def to_records(content: bytes) -> RecordDict:
    """A message as Flower's records."""
    # Flower stores equal pieces once, and deletes them when one of the runs that had them ends; repeated answers are
    # equal.
    unique = secrets.token_bytes(NONCE) + content
    if len(unique) <= SMALL:  # carried in three pieces; an array needs at least five
        return RecordDict({SENT: ConfigRecord({SENT: unique})})
    array = Array(dtype="uint8", shape=(len(unique),), stype="safetensors", data=unique)
    return RecordDict({SENT: ArrayRecord({SENT: array})})


def from_records(records: RecordDict) -> bytes:
    """The message in Flower's records; empty if they hold none of ours."""
    try:
        found = records[SENT][SENT]
        return bytes(found if isinstance(found, bytes) else found.data)[NONCE:]
    except (KeyError, AttributeError, TypeError):
        return b""  # the reader will refuse it


# Operator of the server


class Operator:
    """Controls a SuperLink, with the rights of its operator."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._client = ControlHttpClient.from_server_address(
            str(address), address.ca is None, address.certificate, [RuntimeVersionHttpInterceptor("flwr CLI")]
        )

    def nodes(self) -> list[Any]:
        """The registered nodes."""
        with explain_errors(self.address):
            return [
                node for node in self._client.ListNodes(ListNodesRequest()).nodes_info if node.status != "unregistered"
            ]

    def register(self, name: str, public_key: bytes) -> int:
        """Register a client by its key. Returns the number of its node."""
        with explain_errors(self.address):
            return int(self._client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name)).node_id)

    def unregister(self, node: int) -> None:
        """Take a node's right to connect, at once and for ever: its key cannot be registered again."""
        with explain_errors(self.address):
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def start_run(self) -> int:
        """Start a Flower run, within which messages are sent. Returns its number."""
        with tempfile.TemporaryDirectory() as folder, explain_errors(self.address):
            Path(folder, "pyproject.toml").write_text(_APP, encoding="utf-8")
            Path(folder, "README.md").write_text("An empty app: Plures runs what is installed.\n", encoding="utf-8")
            content = build_fab_from_disk(Path(folder))
            request = StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})))
            return int(self._client.StartRun(request).run_id)

    def stop_run(self, number: int) -> None:
        """End a Flower run whose sender was killed, so that clients do not wait for the rest of its messages."""
        try:
            self._client.StopRun(StopRunRequest(run_id=number))
        except httpx.HTTPStatusError:
            pass  # it has ended already

    def close(self) -> None:
        """Close the connection."""
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
def explain_errors(address: Address) -> Iterator[None]:
    """Turn errors of the connection to the server into RunFailed with an explanation."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise RunFailed(f"the server at {address} refused: {error.response.status_code} {_reason(error)}.") from None
    except httpx.HTTPError as error:
        raise RunFailed(
            f"the server at {address} cannot be reached ({type(error).__name__}); "
            "start it with `plures federate server`, and check its certificate."
        ) from None


def _reason(error: httpx.HTTPStatusError) -> str:
    return wire.printable(error.response.text.replace("\n", " ")) or "without a reason"


# Messages of the server


Seal = Callable[[str, bytes], bytes]  # (name of the client, message) -> message with a signature, or without it


def server_app(
    address: Address,
    main: Callable[["FlowerLink"], None],
    names: Callable[[Grid], Names],
    seal: Seal,
    is_removed: Callable[[str], bool],
) -> ServerApp:
    """The ServerApp for all methods: it calls `main` with a link to the clients."""
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        main(FlowerLink(address, grid, names, seal, is_removed))

    return app


class FlowerLink:
    """A link to the clients over Flower's grid, as `server.Link` describes."""

    def __init__(
        self,
        address: Address,
        grid: Grid,
        names: Callable[[Grid], Names],
        seal: Seal,
        is_removed: Callable[[str], bool],
    ) -> None:
        self._address, self._grid, self._names, self._seal = address, grid, names, seal
        self._is_removed = is_removed
        self._nodes: dict[str, int] = {}

    def clients(self) -> list[str]:
        with explain_errors(self._address):
            connected = _patiently(lambda: self._names(self._grid))
        self._nodes |= {name: node for node, name in connected.items()}
        return sorted(connected.values())

    def push(self, client: str, message: bytes) -> str:
        if self._is_removed(client):
            return ""
        if client not in self._nodes:
            self.clients()
        lost = f"{client} is not connected"  # in place of a number: it counts as lost and is sent again
        if client not in self._nodes:
            return lost
        node, sealed = self._nodes[client], self._seal(client, message)
        with explain_errors(self._address):
            number = _patiently(lambda: push(self._grid, node, sealed))
        if not number:
            del self._nodes[client]  # it may come back under another number
        return number or lost

    def pull(self, numbers: list[str], most: int) -> list[tuple[str, bytes | None]]:
        lost = [number for number in numbers if " " in number]
        allowance.most = most
        with explain_errors(self._address):
            found = _patiently(lambda: pull(self._grid, [number for number in numbers if number not in lost]))
        return found + [(number, None) for number in lost]


Found = TypeVar("Found")


def _patiently(ask: Callable[[], Found]) -> Found:
    """Ask again for some time if the server is not there: it may be starting again, with a new certificate."""
    until = time.monotonic() + RECONNECT_SECONDS
    while True:
        try:
            return ask()
        except httpx.TransportError:
            if time.monotonic() > until:
                raise
            time.sleep(MOST_DELAY)


def push(grid: Grid, node: int, message: bytes) -> str:
    """Send a message to a node. Returns its number; empty if the node is unknown."""
    sent = list(grid.push_messages([Message(to_records(message), node, "query")]))
    if not sent:
        raise RunFailed("the server did not accept a message; is it too large?")
    return sent[0] or ""


def pull(grid: Grid, numbers: list[str]) -> list[tuple[str, bytes | None]]:
    """(number, answer) for each answer that has arrived; the answer is None if the message was lost."""
    found = []
    for message in grid.pull_messages(numbers) if numbers else []:
        content = from_records(message.content) if message.has_content() else None
        if message.has_error() and TOO_LARGE in message.error.reason:
            content = wire.TOO_LARGE
        found.append((message.metadata.reply_to_message_id, content))
    return found


def run_server_app(address: Address, secret: bytes, app: ServerApp) -> None:
    """Acquire a Flower run and run the app within it, in this process."""
    runtime = _runtime(address, [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_PROTECTED)])
    began, token = time.monotonic(), None
    while token is None:
        with explain_errors(address):
            token = _acquire_token(runtime, TaskType.SERVER_APP)
        if time.monotonic() - began > 30:
            raise RunFailed(
                "the server gave us no Flower run to send messages in; does another program acquire its runs?"
            )
        time.sleep(LEAST_DELAY)
    runtime.close()
    grid = HttpGrid(str(address), address.ca is None, address.certificate, token=token)
    # Flower would retry for ever if the server is gone, and would end this process by a signal if the run is unknown.
    grid._retry_invoker = None
    client, status = grid._runtime_client, SubStatus.FAILED
    with explain_errors(address):
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
                pass  # the server is gone, and the run with it
            grid.close()


# Messages of a client


def client_app(client: Client, unseal: Callable[[bytes], bytes]) -> ClientApp:
    """The ClientApp for all methods: it answers every message that `unseal` does not refuse."""
    app = ClientApp()

    @app.query()
    def _query(message: Message, context: Context) -> Message:
        return Message(to_records(client.answer(from_records(message.content), unseal)), reply_to=message)

    return app


def run_client_app(runtime_port: int, secret: bytes, app: ClientApp, is_alive: Callable[[], bool]) -> None:
    """Answer the messages that a SuperNode on this machine receives, one at a time."""
    address = Address("127.0.0.1", runtime_port, None)
    runtime = _runtime(address, [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_PROTECTED)])
    arrived: SimpleQueue[_Task] = SimpleQueue()
    last = time.monotonic()
    while is_alive():
        try:
            if (token := _acquire_token(runtime, TaskType.CLIENT_APP)) is not None:
                # The rest of a message may take long, or never arrive if its sender died: others can overtake it.
                threading.Thread(target=_fetch, args=(address, token, arrived), daemon=True).start()
            task = arrived.get(timeout=_poll_delay(last))
            task.answer(app)
            last = time.monotonic()
        except Empty:
            continue
        except httpx.HTTPError:
            time.sleep(MOST_DELAY)  # the SuperNode is ending, or has dropped the message
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


def _fetch(address: Address, token: str, arrived: "SimpleQueue[_Task]") -> None:
    client = _runtime(address, [RuntimeTokenHttpInterceptor(token)])
    heartbeat = _heartbeat(client)
    try:
        message, context, _, _ = pull_task_input(client)
    except Exception:  # Flower could not deliver it
        heartbeat.stop()
        client.close()
    else:
        arrived.put(_Task(client, heartbeat, message, context))


# Both sides

_PROTECTED = frozenset({"/flwr.proto.Runtime/AcquireTask"})


def _runtime(address: Address, interceptors: list[Any]) -> RuntimeHttpClient:
    known = RuntimeVersionHttpInterceptor("SuperExec")
    return RuntimeHttpClient.from_server_address(
        str(address), address.ca is None, address.certificate, [known, *interceptors]
    )


def _acquire_token(runtime: RuntimeHttpClient, kind: str) -> str | None:
    """The token of a waiting task; None if there is none."""
    found = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return str(found.token) if found.HasField("task") and found.token else None


def _poll_delay(last: float) -> float:
    """Seconds until the next request for a message: the longer there was none, the longer the delay."""
    return min(MOST_DELAY, max(LEAST_DELAY, (time.monotonic() - last) / 20))


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
def child_process(program: str, arguments: list[str], home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of Flower that ends when this process does, even by SIGKILL: `watchdog.py` watches a pipe to it."""
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
        assert process.stdin is not None
        process.stdin.close()


def free_port() -> int:
    """A port of 127.0.0.1 that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def node_command(server: Address, key: Path | None, runtime_port: int, secret_file: Path) -> list[str]:
    """The arguments of a SuperNode."""
    arguments = ["--superlink", str(server), "--isolation", "process", "--host", "127.0.0.1"]
    arguments += ["--port", str(runtime_port), "--superexec-auth-secret-file", str(secret_file)]
    if server.ca is None:
        return [*arguments, "--insecure"]
    if key is None:
        raise UsageError("a node needs its key, unless the server uses plain HTTP")
    return [*arguments, "--root-certificates", str(server.ca), "--auth-supernode-private-key", str(key)]


def say_and_log(log: Path, also: Say) -> Say:
    """A function that passes each line to `also` and appends it to a log."""

    def say(line: str) -> None:
        with open(log, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        also(line)

    return say
