"""Runs Flower's SuperLink, which ends when its parent does. It is started as a file: it needs nothing of Plures.

Its standard input is a pipe whose other end only the parent holds. When the parent ends, even by SIGKILL, the pipe
closes.
"""

import os
import signal
import ssl
import sys
import threading
import time
from typing import Any


def _end_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(5)
    os._exit(1)


def _reload_certificates() -> None:
    """Let a server take up a new certificate, for new connections, when its file changes. Connections stay open."""
    load = ssl.SSLContext.load_cert_chain

    def load_and_watch(self: ssl.SSLContext, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
        load(self, certfile, keyfile, password)

        def watch() -> None:
            seen = os.stat(certfile).st_mtime_ns
            while True:
                time.sleep(1)
                try:
                    now = os.stat(certfile).st_mtime_ns
                    if now != seen:
                        load(self, certfile, keyfile, password)
                        seen = now
                except (OSError, ssl.SSLError):
                    continue  # the files are being written

        threading.Thread(target=watch, daemon=True).start()

    setattr(ssl.SSLContext, "load_cert_chain", load_and_watch)  # noqa: B010


MOST_WHOLE = 2 << 20  # bytes of an answer that is not cut into pieces; ours are cut from half of that on


def _forget_what_is_done(states: Any, fleet: Any, runtime: Any) -> None:
    """Let a SuperLink that keeps its state in memory drop a message when it has been fetched, or when its time is over.

    Flower drops the pieces of a message when their receiver confirms them, which nobody does for a message that travels
    whole, for one that comes too late, or for the errors that Flower makes up in the name of a client that is gone.
    """
    state_class = states.InMemoryLinkState
    delete_messages, delete_node = state_class.delete_messages, state_class.delete_node

    def forget(state: Any, number: str) -> None:
        session = state._object_push_session_by_root.get(number)
        if session is not None:
            state._cleanup_push_session(session, cleanup_messages=False)
        state.object_store.delete(number)

    def delete_with_pieces(self: Any, message_ins_ids: set[str]) -> None:
        with self.lock:
            numbers = set(message_ins_ids)
            for number in message_ins_ids:
                answer = self.message_res_store.get(self.message_ins_id_to_message_res_id.get(number, ""))
                if answer is not None and not answer.metadata.delivered_at:
                    numbers.add(answer.metadata.message_id)
            delete_messages(self, message_ins_ids)
            for number in numbers:
                forget(self, number)

    def delete_any_node(self: Any, owner_aid: str, node_id: int) -> None:
        node = self.nodes.get(node_id)
        if node is not None and node.online_until is None:
            node.online_until = 0.0  # it has never connected, and Flower compares this with a number
        delete_node(self, owner_aid, node_id)

    state_class.delete_messages, state_class.delete_node = delete_with_pieces, delete_any_node

    def forget_fetched(response: Any, state: Any) -> Any:
        for message in response.messages_list:
            if message.content.items or message.HasField("error"):
                forget(state, message.metadata.message_id)
        return response

    pull_of_node, pull_of_run, push_of_node = fleet.pull_messages, runtime.pull_messages, fleet.push_messages

    def pull_messages_of_node(request: Any, state: Any, store: Any) -> Any:
        return forget_fetched(pull_of_node(request=request, state=state, store=store), state)

    def pull_messages_of_run(request: Any, state: Any, task: Any) -> Any:
        return forget_fetched(pull_of_run(request=request, state=state, task=task), state)

    def push_messages_of_node(request: Any, state: Any) -> Any:
        if request.ByteSize() > MOST_WHOLE:
            raise ValueError("an answer that should have been cut into pieces")
        return push_of_node(request=request, state=state)

    fleet.pull_messages, runtime.pull_messages = pull_messages_of_node, pull_messages_of_run
    fleet.push_messages = push_messages_of_node


MOST_PIECE = 6 << 20  # bytes of a piece of an answer; Flower's are of 5 MiB at most
PIECES, TIMES_PIECES = 16, 16  # that an answer may have: so many, and so many times those of the largest message sent


def _bound_answers(fleet: Any, runtime: Any) -> None:
    """Let a server refuse an answer that is far larger than what was asked, before any of its pieces is stored.

    A run refuses answers that are too large when it fetches them; until then they would lie in the server's memory.
    """
    push_of_run, push_of_node, push_piece = runtime.push_messages, fleet.push_messages, fleet.push_object
    largest = 0

    def n_pieces(tree: Any) -> int:
        n, left = 0, [tree]
        while left:
            n += 1
            left += left.pop().children
        return n

    def push_messages_of_run(request: Any, state: Any, task: Any) -> Any:
        nonlocal largest
        largest = max([largest, *map(n_pieces, request.message_object_trees)])
        return push_of_run(request=request, state=state, task=task)

    def push_messages_of_node(request: Any, state: Any) -> Any:
        if any(n_pieces(tree) > PIECES + TIMES_PIECES * largest for tree in request.message_object_trees):
            raise ValueError("an answer in more pieces than any that was asked for")
        return push_of_node(request=request, state=state)

    def push_object_of_node(request: Any, state: Any) -> Any:
        if len(request.object_content) > MOST_PIECE:
            raise ValueError("a piece of an answer that is too large")
        return push_piece(request=request, state=state)

    runtime.push_messages = push_messages_of_run
    fleet.push_messages, fleet.push_object = push_messages_of_node, push_object_of_node


SILENT_SECONDS = 30.0  # that a connection may be open without a request


def _cut_off_silent(protocol: Any, seconds: float) -> None:
    """Let a server close connections without a request; uvicorn keeps those that never made one, or only half of it.

    protocol: the class of uvicorn that has a connection.
    """
    connection_made = protocol.connection_made

    def connection_made_and_watched(self: Any, transport: Any) -> None:
        connection_made(self, transport)

        def look(before: Any) -> None:
            now = self.cycle  # the last request that came to the end of its header
            if transport.is_closing():
                return
            if now is before and (now is None or now.response_complete):
                transport.close()
            else:
                self.loop.call_later(seconds, look, now)

        self.loop.call_later(seconds, look, None)

    protocol.connection_made = connection_made_and_watched


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose modules would hide others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _reload_certificates()
    from flwr.server.superlink.linkstate import in_memory_linkstate
    from flwr.superlink.cli import flower_superlink
    from flwr.superlink.servicer.fleet import fleet_handlers
    from flwr.superlink.servicer.runtime import runtime_handlers
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    _cut_off_silent(AutoHTTPProtocol, SILENT_SECONDS)
    _forget_what_is_done(in_memory_linkstate, fleet_handlers, runtime_handlers)
    _bound_answers(fleet_handlers, runtime_handlers)
    flower_superlink()
