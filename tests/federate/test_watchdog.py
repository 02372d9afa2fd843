"""What we change in Flower's server: connections that say nothing are closed, and answers have bounds."""

import asyncio
import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn", reason="it comes with Flower: pip install 'plures[deploy]'")

import uvicorn
from flwr.proto.error_pb2 import Error
from flwr.proto.message_pb2 import Message, ObjectTree
from flwr.proto.recorddict_pb2 import RecordDict
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from plures.federate import watchdog

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope, receive, send):
    """Answers after a second, which is longer than silence is allowed."""
    assert scope["type"] == "http"
    await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def serving(protocol):
    """The port of a server whose connections are of this class; it keeps them for a minute after a request."""
    config = uvicorn.Config(app, port=0, http=protocol, lifespan="off", ws="none", log_level="error")
    config.timeout_keep_alive = 60
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.force_exit = server.should_exit = True
        thread.join()


def n_closed(sockets, seconds):
    """How many of the connections the server closes in so many seconds."""
    until, n = time.monotonic() + seconds, 0
    for one in sockets:
        one.settimeout(max(0.01, until - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            n += one.recv(100) == b""
    return n


@pytest.mark.parametrize("is_watched", [True, False], ids=["ours", "as uvicorn has it"])
def test_connections_without_a_request_are_closed_and_slow_answers_come(is_watched):
    protocol = type("Protocol", (AutoHTTPProtocol,), {})
    if is_watched:
        watchdog._cut_off_silent(protocol, 0.3)
    with serving(protocol) as port, contextlib.ExitStack() as stack:
        connect = lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port)))  # noqa: E731
        silent = [connect() for _ in range(40)]
        halves = [connect() for _ in range(5)]
        for one in halves:
            one.sendall(REQUEST[:20])
        asking = connect()
        asking.sendall(REQUEST)
        asking.settimeout(20)
        assert asking.recv(1000).startswith(b"HTTP/1.1 200")
        asking.sendall(REQUEST[:20])  # half of a second one
        assert n_closed([*silent, *halves], 3) == (45 if is_watched else 0)
        with contextlib.suppress(TimeoutError):
            asking.recv(1000)  # the rest of the answer, if it came in two parts
        assert n_closed([asking], 3) == is_watched


def tree_of(n_pieces):
    return ObjectTree(object_id="0", children=[ObjectTree(object_id=str(k)) for k in range(n_pieces - 1)])


def test_an_answer_that_is_far_larger_than_what_was_asked_is_refused_before_it_is_stored():
    stored = []
    fleet = SimpleNamespace(
        push_messages=lambda request, state: stored.append(len(request.message_object_trees[0].children) + 1),
        push_object=lambda request, state: stored.append(len(request.object_content)),
    )
    runtime = SimpleNamespace(push_messages=lambda request, state, task: stored.append("asked"))
    watchdog._bound_answers(fleet, runtime)

    def answer(n_pieces):
        fleet.push_messages(request=SimpleNamespace(message_object_trees=[tree_of(n_pieces)]), state=None)

    answer(16)
    with pytest.raises(ValueError, match="more pieces"):
        answer(17)
    asked = SimpleNamespace(message_object_trees=[tree_of(2), tree_of(10), tree_of(3)])
    runtime.push_messages(request=asked, state=None, task=None)
    answer(16 + 16 * 10)
    with pytest.raises(ValueError, match="more pieces"):
        answer(16 + 16 * 10 + 1)
    fleet.push_object(request=SimpleNamespace(object_content=bytes(5 << 20)), state=None)
    with pytest.raises(ValueError, match="too large"):
        fleet.push_object(request=SimpleNamespace(object_content=bytes((6 << 20) + 1)), state=None)
    assert stored == [16, "asked", 176, 5 << 20]


def test_what_has_been_fetched_is_dropped_and_so_are_errors_in_the_name_of_a_client_that_is_gone():
    whole = Message(content=RecordDict(items=[RecordDict.Item(key="message")]))
    error, in_pieces = Message(error=Error(code=3)), Message(content=RecordDict())
    for number, message in (("whole", whole), ("error", error), ("pieces", in_pieces)):
        message.metadata.message_id = number
    found = SimpleNamespace(messages_list=[whole, error, in_pieces])
    dropped = []
    state = SimpleNamespace(
        _object_push_session_by_root={}, object_store=SimpleNamespace(delete=lambda number: dropped.append(number))
    )
    state_class = type("State", (), {"delete_messages": None, "delete_node": None})
    fleet = SimpleNamespace(pull_messages=None, push_messages=None)
    runtime = SimpleNamespace(pull_messages=lambda request, state, task: found)
    watchdog._forget_what_is_done(SimpleNamespace(InMemoryLinkState=state_class), fleet, runtime)
    assert runtime.pull_messages(request=None, state=state, task=None) is found
    assert dropped == ["whole", "error"]  # pieces are dropped when they have been fetched
