"""Messages as Flower carries them, for both sides: bytes that Flower does not interpret.

Flower cuts a message into pieces, at least three, each of which is sent and fetched by a request of its own. With small
models these requests would be most of a round. So a small message travels whole, within the request that announces it;
a larger one in pieces, which are fetched one after the other, and others may overtake it.

These parts of Flower are not its public interface: `pyproject.toml` sets an upper bound on its version.
"""

import json
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.update(
    {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
)

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_tree,
    get_object_type_from_object_content,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    inflate_object_from_contents,
    push_objects,
)

logging.getLogger("flwr").setLevel(logging.ERROR)

SMALL = 1 << 20  # largest size in bytes of a message that is not cut into pieces
NONCE = 16  # random bytes before each message, so that no two are equal
SENT = "message"  # name of our record among Flower's records

PullPiece = Callable[[str], bytes]
PushPiece = Callable[[str, bytes], None]


def to_records(content: bytes) -> RecordDict:
    """A message as Flower's records."""
    # Flower stores equal pieces once, and deletes them when one of the runs that had them ends; repeated answers are
    # equal.
    unique = secrets.token_bytes(NONCE) + content
    if len(unique) <= SMALL:
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


class Outgoing(NamedTuple):
    """A message on its way."""

    number: str
    proto: Any  # what announces it; of a small message, all of it
    tree: Any  # which pieces it has
    pieces: dict[str, Any]  # of a small message none
    n_bytes: int

    def push(self, wanted: set[str], push_piece: PushPiece) -> None:
        """Send the pieces that are wanted."""
        push_objects(self.pieces, push_piece, object_ids_to_push=wanted)


def outgoing(message: Message) -> Outgoing:
    """A message with our records, ready to be sent."""
    number = message.object_id
    message.metadata.__dict__["_message_id"] = number
    found = message.content[SENT]
    if isinstance(found, ConfigRecord):
        return Outgoing(number, message_to_proto(message), ObjectTree(object_id=number), {}, len(found[SENT]))
    with no_object_id_recompute():
        proto = message_to_proto(remove_content_from_message(message))
        return Outgoing(number, proto, get_object_tree(message), get_all_nested_objects(message), 0)


class TooLarge(Exception):
    """A message has more bytes than were expected, and was not read to its end."""


class Incoming:
    """A message that has been announced."""

    def __init__(self, proto: Any, tree: Any, most: int) -> None:
        """`most` bytes are expected at most."""
        self.message = message_from_proto(proto)
        self.number = proto.metadata.message_id
        self.is_whole = self.message.has_error() or SENT in self.message.content
        self._missing = [] if self.is_whole else [one.object_id for one in iterate_object_tree(tree)]
        self._pieces: dict[str, bytes] = {}
        self._most = most + most // 100 + SMALL  # Flower adds some bytes to each piece
        self._left = self._most

    def pull(self, pull_piece: PullPiece) -> bool:
        """Fetch the pieces that are there; returns whether the message is whole now. Its sender may have died."""
        while self._missing:
            try:
                content = pull_piece(self._missing[0])
            except ObjectUnavailableError:
                return False
            self._left -= len(content)
            if self._left < 0:
                raise TooLarge
            self._pieces[self._missing.pop(0)] = content
        return True

    def content(self) -> bytes | None:
        """The message, once it is whole; None if it was lost."""
        if self.message.has_error():
            return None
        if self.is_whole:
            found = from_records(self.message.content)
            return found if len(found) <= SMALL else b""  # no client of ours sends a larger one whole
        try:
            if _size_of_arrays(self._pieces) > self._most:
                return b""  # a few pieces that are named again and again: the reader will refuse it
            inflated = inflate_object_from_contents(self.number, self._pieces)
            return from_records(inflated.content) if isinstance(inflated, Message) else b""
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return b""  # pieces that do not fit together: the reader will refuse it


def _size_of_arrays(pieces: dict[str, bytes]) -> int:
    """Bytes of all arrays in a message. An array lists its pieces by number, and equal pieces travel once."""
    total = 0
    for content in pieces.values():
        if get_object_type_from_object_content(content) == Array.__qualname__:
            own = get_object_children_ids_from_object_content(content)
            listed = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(pieces[own[number]]) for number in listed)
    return total
