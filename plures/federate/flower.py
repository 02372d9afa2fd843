"""The interface to Flower's SuperLink, which carries the messages.

It runs in its mode `process`: it carries messages, checks keys and monitors connections, and starts no code. Messages
are handled by the processes that users start: `plures federate client` answers them, and `plures federate start` sends
them. So only installed code runs, never code that came with a message, and a message needs no new process.

These parts of Flower are not its public interface: `pyproject.toml` sets an upper bound on its version.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from plures.federate import envelope  # first: it sets Flower's options

import httpx  # isort: skip
from flwr.app import Message
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from plures.errors import RunFailed
from plures.federate import wire
from plures.federate.address import Address
from plures.federate.envelope import Incoming, Outgoing, outgoing, to_records

Names = dict[int, str]  # number of a node -> name of the client
RECONNECT_SECONDS = 120.0  # that a run waits for a server that is not there
RETRY_SECONDS = 0.5
BEAT_SECONDS = 15.0  # between signs of life of a run
BATCH_BYTES = 8 << 20  # of small messages that are sent at once
LIFETIME = 3600.0  # seconds until a message that nobody fetched is forgotten; runs set it by their deadline


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
        with explain_errors(self.address), suppress(httpx.HTTPStatusError):  # it may have ended already
            self._client.StopRun(StopRunRequest(run_id=number))

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


def message_to(node: int, content: bytes, lifetime: float) -> Outgoing:
    """A message to a node, which is forgotten after some seconds if nobody fetches it."""
    return outgoing(Message(to_records(content), node, "query", ttl=lifetime))


class Channel:
    """A Flower run, within which this process sends messages to nodes and gets their answers."""

    def __init__(self, address: Address, secret: bytes, operator: Operator) -> None:
        self.number = operator.start_run()
        token = _acquire_token(address, secret)
        self._client = _runtime(address, [RuntimeTokenHttpInterceptor(token)])
        found = self._client.PullTaskInput(PullTaskInputRequest())
        self._node, self._run = Node(node_id=SUPERLINK_NODE_ID), found.run.run_id
        TaskIdentity.task_id, TaskIdentity.run_id = found.task_id, found.run.run_id
        TaskIdentity.node_id = found.context.node_id
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(httpx.HTTPError, RuntimeError):
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def close(self, status: str) -> None:
        """End the Flower run."""
        if self._ended.is_set():
            return
        self._ended.set()
        with suppress(httpx.HTTPError):  # the server may be gone, and the run with it
            self._client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
        self._client.close()

    def nodes(self) -> list[Any]:
        """The nodes that are connected."""
        return list(self._client.GetNodes(GetNodesRequest()).nodes)

    def push(self, messages: list[Outgoing]) -> list[str]:
        """Send messages at once. Returns the numbers of those whose node is unknown."""
        asked = PushAppMessagesRequest(
            messages_list=[one.proto for one in messages], message_object_trees=[one.tree for one in messages]
        )
        found = self._client.PushMessages(asked)
        push = make_push_object_fn_protobuf(self._client.PushObject, self._node, self._run, found.session_id)
        for one in messages:
            one.push(set(found.objects_to_push) & one.pieces.keys(), push)
        return [one.number for one, number in zip(messages, found.message_ids, strict=True) if not number]

    def pull(self, numbers: list[str], most: int) -> list[Incoming]:
        """The answers to these messages that have been announced since they were last asked for."""
        found = self._client.PullMessages(PullAppMessagesRequest(message_ids=numbers))
        pairs = zip(found.messages_list, found.message_object_trees, strict=True)
        return [Incoming(proto, tree, most) for proto, tree in pairs]

    def fetch(self, answer: Incoming) -> bool:
        """Fetch the pieces of an answer; whether all are there."""
        if answer.is_whole:
            return True
        if not answer.pull(make_pull_object_fn_protobuf(self._client.PullObject, self._node, self._run)):
            return False
        self.forget(answer)
        return True

    def forget(self, answer: Incoming) -> None:
        """Let the server drop the pieces of an answer."""
        received = ConfirmMessageReceivedRequest(node=self._node, run_id=self._run, message_object_id=answer.number)
        self._client.ConfirmMessageReceived(received)


class FlowerLink:
    """A link to the clients, as `server.Link` describes.

    Small messages are sent together, when answers are asked for next. If the server was started again, it has forgotten
    our messages: they count as lost, and are sent again within a new Flower run.
    """

    lifetime = LIFETIME

    def __init__(
        self,
        address: Address,
        make_channel: Callable[[], Channel],
        names: Callable[[Channel], Names],
        seal: Seal,
        is_removed: Callable[[str], bool],
    ) -> None:
        self._address, self._make_channel, self._names, self._seal = address, make_channel, names, seal
        self._is_removed = is_removed
        self._nodes: dict[str, int] = {}
        self._outbox: dict[str, Outgoing] = {}
        self._lost: set[str] = set()
        self._open: set[str] = set()  # numbers of messages that were sent
        self._incoming: list[Incoming] = []  # answers of which pieces are missing
        with explain_errors(address):
            self.channel = make_channel()

    def clients(self) -> list[str]:
        connected = self._ask(lambda: self._names(self.channel), Names())
        self._nodes |= {name: node for node, name in connected.items()}
        return sorted(connected.values())

    def push(self, client: str, message: bytes) -> str:
        if self._is_removed(client):
            return ""
        if client not in self._nodes:
            self.clients()
        if client not in self._nodes:
            lost = f"{client} is not connected"  # in place of a number: it is sent again later
            self._lost.add(lost)
            return lost
        node, sealed = self._nodes[client], self._seal(client, message)
        made = message_to(node, sealed, self.lifetime)
        if made.pieces or sum(one.n_bytes for one in self._outbox.values()) + made.n_bytes > BATCH_BYTES:
            self._flush()
        self._outbox[made.number] = made
        if made.pieces:
            self._flush()
        return made.number

    def pull(self, numbers: list[str], most: int) -> list[tuple[str, bytes | None]]:
        self._flush()
        asked = [number for number in numbers if number in self._open]
        if asked:
            self._incoming += self._ask(lambda: self.channel.pull(asked, most), [])
        found: list[tuple[str, bytes | None]] = []
        for answer in list(self._incoming):
            try:
                if not self._ask(partial(self.channel.fetch, answer), False):
                    continue
                content = answer.content()
            except envelope.TooLarge:
                content = wire.TOO_LARGE
                self._ask(partial(self.channel.forget, answer), None)  # else it stays until its time is over
            except ObjectPullError:
                content = None  # its sender died while it sent it
            self._incoming.remove(answer)
            found.append((answer.message.metadata.reply_to_message_id, content))
        lost = [number for number in numbers if number in self._lost]
        found += [(number, None) for number in lost]
        self._lost -= set(lost)
        self._open -= {number for number, _ in found}
        return found

    def _flush(self) -> None:
        """Send what is in the outbox."""
        if not self._outbox:
            return
        sent = list(self._outbox.values())
        unknown = set(self._ask(lambda: self.channel.push(sent), list[str]()))
        self._open |= self._outbox.keys() - unknown - self._lost
        self._lost |= unknown
        if unknown:
            self._nodes.clear()  # they may come back under other numbers
        self._outbox.clear()

    def _ask(self, ask: Callable[[], "Found"], otherwise: "Found") -> "Found":
        """Ask the server. If it was started again, begin a new Flower run in it, and return `otherwise`."""
        with explain_errors(self._address):
            try:
                return _patiently(ask)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in FORGOTTEN:
                    raise
            self._lost |= self._open | self._outbox.keys()
            self._open.clear()
            self._nodes.clear()
            self._incoming.clear()
            self.channel.close(SubStatus.FAILED)
            self.channel = _patiently(self._make_channel)
            return otherwise

    def close(self, is_done: bool) -> None:
        """End the Flower run."""
        self.channel.close(SubStatus.COMPLETED if is_done else SubStatus.FAILED)


FORGOTTEN = (401, 403, 404)  # what a server says to a token that it does not know
Found = TypeVar("Found")


def _patiently(ask: Callable[[], Found]) -> Found:
    """Ask again for some time if the server is not there: it may be starting again."""
    until = time.monotonic() + RECONNECT_SECONDS
    while True:
        try:
            return ask()
        except httpx.TransportError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_SECONDS)


_PROTECTED = frozenset({"/flwr.proto.Runtime/AcquireTask"})


def _runtime(address: Address, interceptors: list[Any]) -> RuntimeHttpClient:
    known = RuntimeVersionHttpInterceptor("SuperExec")
    return RuntimeHttpClient.from_server_address(
        str(address), address.ca is None, address.certificate, [known, *interceptors]
    )


def _acquire_token(address: Address, secret: bytes) -> str:
    """The token of the Flower run that was just started."""
    runtime = _runtime(address, [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_PROTECTED)])
    until = time.monotonic() + 30
    try:
        while time.monotonic() < until:
            found = runtime.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if found.HasField("task") and found.token:
                return str(found.token)
            time.sleep(0.1)
    finally:
        runtime.close()
    raise RunFailed("the server gave us no Flower run to send messages in; does another program acquire its runs?")


# Processes


@contextmanager
def superlink(arguments: list[str], home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run Flower's SuperLink. It ends when this process does, even by SIGKILL: `watchdog.py` watches a pipe to it."""
    home.mkdir(parents=True, exist_ok=True)
    # With a heap for every thread, as glibc has it, each keeps as much as was ever in use there: 250 MB after a while.
    environment = os.environ | {"FLWR_HOME": str(home.resolve()), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(Path(__file__).with_name("watchdog.py")), *arguments]
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
