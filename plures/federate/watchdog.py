"""Runs a program of Flower that ends when its parent does. It is started as a file, so that it does not import torch.

Its standard input is a pipe whose other end only the parent holds. When the parent ends, even by SIGKILL, the pipe
closes.
"""

import os
import signal
import ssl
import sys
import threading
import time
from types import SimpleNamespace
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


class _Polling:
    """How long a SuperNode sleeps between its requests for messages.

    By default it sleeps three seconds, and half a second while a message is being answered, so that a round of small
    models would spend more time on messages than on training.
    """

    def __init__(self, pace: Any) -> None:
        self.pace, self.asleep = pace, 0.0

    def sleep(self, seconds: float) -> None:
        if seconds < 1:  # a message is being answered: the longer this takes, the longer it sleeps
            if self.asleep == 0.0:
                self.pace.note_message()
            nap = min(seconds, max(0.05, self.asleep / 10))
            self.asleep += nap
        else:
            self.asleep = 0.0
            nap = self.pace.delay(0.1, seconds)
        time.sleep(nap)


def _answer_in_turn(node: Any) -> None:
    """Let a SuperNode send the answer to the message that it has just received, before it asks for the next one.

    By itself it sends one answer for each message. If a run is killed, an answer to one of its messages may come later,
    and from then on every answer would wait until the next message arrives.
    """
    pull, push, run = node._pull_and_store_message, node._push_messages, {"id": None}

    def pull_and_note(**arguments: Any) -> Any:
        run["id"] = pull(**arguments)
        return run["id"]

    def push_until_answered(send: Any, **arguments: Any) -> None:
        answered = []

        def send_and_note(message: Any, *rest: Any) -> Any:
            answered.append(message.metadata.run_id)
            return send(message, *rest)

        while run["id"] not in answered:
            push(send=send_and_note, **arguments)

    node._pull_and_store_message, node._push_messages = pull_and_note, push_until_answered


if __name__ == "__main__":
    from pace import Pace  # type: ignore[import-not-found]  # here: this folder is on the path, and `plures` is large

    sys.path.pop(0)  # the folder of this file, whose modules would hide others
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Imported here: each program needs other parts of Flower, and imports take seconds.
    if program == "flower-superlink":
        _reload_certificates()
        from flwr.superlink.cli import flower_superlink as main
    else:
        from flwr.supercore.inflatable.inflatable_utils import pull_objects
        from flwr.supernode import start_client_internal
        from flwr.supernode.cli import flower_supernode as main

        assert pull_objects.__kwdefaults__ is not None
        pull_objects.__kwdefaults__["initial_backoff"] = 0.1  # as in flower.py
        start_client_internal.time = SimpleNamespace(sleep=_Polling(Pace()).sleep)
        _answer_in_turn(start_client_internal)
    main()
