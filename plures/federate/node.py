"""A client's connection to the server, in the client's own process.

Flower has a program for this, the SuperNode, which hands messages on to apps in other processes. A client of ours
has one app, and keeps the connection itself: one process, no second copy of Flower in memory, and no messages between
the two.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plures.federate.envelope import Incoming, TooLarge, outgoing, to_records  # first: it sets Flower's options

import httpx  # isort: skip
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_private_key
from flwr.app import Message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node as NodeNumber
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from plures.errors import UsageError
from plures.federate.address import Address
from plures.federate.pace import Pace

LEAST_DELAY, MOST_DELAY = 0.1, 3.0  # seconds between requests for a message; see `pace`
BEAT_SECONDS, MISSED_BEAT_SECONDS = 20.0, 3.0  # between signs of life, and after one that did not arrive
SEND_SECONDS = 60.0  # that we try to send an answer
STALE_SECONDS = 600.0  # after which we wait no longer for the pieces of a message
MOST_BYTES = 8 << 30  # of a message
NOT_ACTIVATED = ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED  # an unknown key, and one that is still connected

Answer = Callable[[bytes], bytes]


class NotConnected(Exception):
    """The server is not there, or does not take us, or does not know us any more; in words."""

    def __init__(self, words: str, is_away: bool, is_unknown: bool = False) -> None:
        """Whether there is no server, or none that works; whether it does not know our key, or has it connected."""
        super().__init__(words)
        self.is_away, self.is_unknown = is_away, is_unknown


class Node:
    """A connection, under the number that the server gives us."""

    def __init__(self, client: FleetHttpClient, number: int) -> None:
        self._client, self._node = client, NodeNumber(node_id=number)
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Give signs of life, also while we train."""
        pause = BEAT_SECONDS
        while not self._ended.wait(pause):
            asked = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            try:
                self._client.SendNodeHeartbeat(asked)
                pause = BEAT_SECONDS
            except (httpx.HTTPError, RuntimeError):
                pause = MISSED_BEAT_SECONDS

    def close(self) -> None:
        """End the signs of life."""
        self._ended.set()

    def serve(self, answer: Answer) -> None:
        """Answer the messages that come for us, one at a time, until the connection fails with NotConnected."""
        pace, waiting = Pace(), list[tuple[float, Incoming]]()
        while True:
            waiting += self._announced()
            for one in list(waiting):
                began, message = one
                try:
                    is_whole = self._fetch(message)
                    is_over = is_whole or time.monotonic() > began + STALE_SECONDS
                except (httpx.HTTPStatusError, ObjectPullError, TooLarge):
                    is_whole, is_over = False, True  # its run has ended, or nobody of ours sends so much
                if is_over:
                    waiting.remove(one)
                content = message.content() if is_whole else None
                if content is not None:
                    pace.note_message()
                    self._send(Message(to_records(answer(content)), reply_to=message.message))
                    pace.note_answer()
            time.sleep(LEAST_DELAY if waiting else pace.delay(LEAST_DELAY, MOST_DELAY))

    def _announced(self) -> list[tuple[float, Incoming]]:
        with _explained():
            found = self._client.PullMessages(PullMessagesRequest(node=self._node))
        pairs = zip(found.messages_list, found.message_object_trees, strict=True)
        return [(time.monotonic(), Incoming(proto, tree, MOST_BYTES)) for proto, tree in pairs]

    def _fetch(self, message: Incoming) -> bool:
        """Fetch the pieces of a message; whether all are there."""
        if message.is_whole:
            return True
        run = message.message.metadata.run_id
        with suppress(httpx.TransportError):
            if message.pull(make_pull_object_fn_protobuf(self._client.PullObject, self._node, run)):
                received = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=message.number)
                self._client.ConfirmMessageReceived(received)
                return True
        return False

    def _send(self, message: Message) -> None:
        """Send an answer. If that fails for long, the server asks again."""
        sent, run, until = outgoing(message), message.metadata.run_id, time.monotonic() + SEND_SECONDS
        asked = PushMessagesRequest(
            node=self._node, messages_list=[sent.proto], message_object_trees=[sent.tree], clientapp_runtime_list=[0.0]
        )
        while True:
            try:
                found = self._client.PushMessages(asked)
                push = make_push_object_fn_protobuf(self._client.PushObject, self._node, run, found.session_id)
                sent.push(set(found.objects_to_push) & sent.pieces.keys(), push)
                return
            except (httpx.HTTPStatusError, ObjectPushError):
                return  # the run is over, or we are no longer known, which we learn when we ask next
            except httpx.TransportError:
                if time.monotonic() > until:
                    return
                time.sleep(MOST_DELAY)


@contextmanager
def connect(server: Address, key: Path | None) -> Iterator[Node]:
    """Connect to a server with our private key; over plain HTTP with a key that is made for this connection."""
    own = _read_key(key) if key is not None else ec.generate_private_key(ec.SECP384R1())
    public = public_key_to_bytes(own.public_key())
    who = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(own, own.public_key())]
    client = FleetHttpClient.from_server_address(str(server), server.ca is None, server.certificate, who)
    with client:
        with _explained():
            if key is None:
                client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
            asked = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
            number = client.ActivateNode(asked).node_id
        node = Node(client, number)
        try:
            yield node
        finally:
            node.close()
            with suppress(httpx.HTTPError, RuntimeError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=number))
                if key is None:
                    client.UnregisterNode(UnregisterNodeFleetRequest(node_id=number))


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is not a private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} is not a key that Flower takes; make one with `ssh-keygen -t ecdsa -b 384`")
    return key


@contextmanager
def _explained() -> Iterator[None]:
    """Turn errors of the connection into NotConnected."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        status, known = error.response.status_code, FlowerError.from_json(error.response.text)
        said = f"{status} {known.message if known else error.response.text[:200]}"
        raise NotConnected(said, status >= 500, known is not None and known.code == NOT_ACTIVATED) from None
    except httpx.HTTPError as error:
        raise NotConnected(type(error).__name__, is_away=True) from None
