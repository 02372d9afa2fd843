"""Messages as Flower carries them: small ones whole, large ones in pieces, and no more is read than is expected."""

import contextlib
import json
import random
import tracemalloc

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'plures[deploy]'")

from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from plures.federate import envelope, wire
from plures.federate.flower import FlowerLink


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Flower's messages say who sends them."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def sent(content: bytes):
    """What goes over the network for a message: how it is announced, and its pieces by number."""
    made = envelope.outgoing(Message(envelope.to_records(content), 1, "train"))
    pieces: dict[str, bytes] = {}
    made.push(set(made.pieces), pieces.__setitem__)
    return made, pieces


@pytest.mark.parametrize("n_bytes", [0, 10, envelope.SMALL - envelope.NONCE, envelope.SMALL, 50 << 20])
def test_a_message_arrives_as_it_was_sent(n_bytes):
    content = (b"plures" * (n_bytes // 6 + 1))[:n_bytes]
    made, pieces = sent(content)
    assert bool(pieces) == (n_bytes > envelope.SMALL - envelope.NONCE)
    found = envelope.Incoming(made.proto, made.tree, n_bytes)
    assert found.is_whole or found.pull(pieces.__getitem__)
    assert found.content() == content


def test_an_answer_of_many_bytes_is_not_read_to_its_end():
    """60 MB where 1 MB is expected: no more than the pieces in which that is noticed are fetched."""
    made, pieces = sent(random.Random(0).randbytes(60 << 20))
    fetched = []

    def pull(number):
        fetched.append(len(pieces[number]))
        return pieces[number]

    found = envelope.Incoming(made.proto, made.tree, 1 << 20)
    with pytest.raises(envelope.TooLarge):
        found.pull(pull)
    assert sum(fetched) < 30 << 20 < sum(map(len, pieces.values()))


@pytest.mark.parametrize(
    "listed", [[0] * 2000, [0, 99], ["x"], 7, None], ids=["again and again", "not there", "words", "none", "nothing"]
)
def test_an_array_that_lists_other_pieces_than_it_has_is_none(listed):
    """Of 5 MB that travel, 2,000 times as much would be made."""
    made, pieces = sent(random.Random(0).randbytes(4 << 20))
    number, content = next((key, x) for key, x in pieces.items() if x.startswith(b"Array "))
    head, _, body = content.partition(b"\0")
    body = json.dumps(json.loads(body) | {"arraychunk_ids": listed}).encode()
    pieces[number] = b" ".join([*head.split(b" ")[:-1], str(len(body)).encode()]) + b"\0" + body
    found = envelope.Incoming(made.proto, made.tree, 8 << 20)
    assert found.pull(pieces.__getitem__)
    with at_most_mb(100):
        assert found.content() == b""


@contextlib.contextmanager
def at_most_mb(most):
    """No more memory than this is taken in here."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most << 20
    finally:
        tracemalloc.stop()


def test_an_answer_of_many_bytes_that_travels_whole_is_none():
    made, _ = sent(b"small")
    made.proto.content.items[0].config_record.items[0].value.bytes = bytes(envelope.SMALL + envelope.NONCE + 1)
    assert envelope.Incoming(made.proto, made.tree, 1 << 30).content() == b""


class Relay:
    """A Flower run with one answer, which is larger than expected."""

    def __init__(self, made, pieces) -> None:
        self.made, self.pieces, self.forgotten = made, pieces, []

    def push(self, messages):
        self.asked = messages[0].number
        return []

    def pull(self, numbers, most):
        found = envelope.Incoming(self.made.proto, self.made.tree, most)
        found.message.metadata.__dict__["_reply_to_message_id"] = self.asked
        return [found]

    def fetch(self, answer):
        return answer.pull(self.pieces.__getitem__)

    def forget(self, answer):
        self.forgotten.append(answer.number)


def test_an_answer_that_is_too_large_is_refused_and_the_server_drops_it_at_once():
    made, pieces = sent(random.Random(0).randbytes(12 << 20))
    relay = Relay(made, pieces)
    link = FlowerLink(
        None, lambda: relay, lambda channel: {7: "a"}, lambda client, message: message, lambda name: False
    )
    number = link.push("a", b"a request")
    assert link.pull([number], 1 << 20) == [(number, wire.TOO_LARGE)]
    assert relay.forgotten == [made.number]
