"""`plures federate client`: reads a client's rows, checks the server, and keeps the connection to it.

It imports what a client needs and no more: there may be many on a machine.
"""

import email.utils
import os
import re
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from plures.data.reading import Reading
from plures.errors import RunFailed, UsageError
from plures.federate import credentials, node
from plures.federate.address import Address
from plures.federate.client import Client
from plures.federate.policy import FILE, read_policy
from plures.files import lock
from plures.runs import signals
from plures.runs.callbacks import Say
from plures.runs.config import make_config
from plures.runs.scene import reading_of

FORGET_SECONDS = 120.0  # until the server has noticed that a client is gone
AWAY_SECONDS, AGAIN_SECONDS = 2.0, 5.0  # until we try again: if there is no server, and if it does not take us


def say(line: str) -> None:
    """Print a line and flush, so that it reaches a pipe at once."""
    print(line, flush=True)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end this process in order, together with its children; more of them disturb nothing."""
    before = {number: signal.getsignal(number) for number in signals.NUMBERS}
    if not isinstance(before[signal.SIGINT], signals.Interrupts):
        signals.set_handler(signals.Interrupts())
    try:
        yield
    except KeyboardInterrupt:
        say("stopped")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reading_of_client(
    target: str | None, drop: str | None, time_column: str | None, task: str | None, schema: Path | None
) -> Reading:
    """How a client reads its table."""
    given = {"target": target, "drop": drop, "time_column": time_column, "task": task}
    given |= {"data_schema": None if schema is None else str(schema)}
    return reading_of(make_config({key: value for key, value in given.items() if value is not None}))


def run_client(
    data: Path,
    name: str,
    home: Path,
    models: tuple[str, ...],
    methods: tuple[str, ...],
    threads: int,
    reading: Reading = Reading(),  # noqa: B008
) -> None:
    """Run a client, which takes part in runs with its own rows, until Ctrl-C."""
    kit = credentials.open_kit(home, name)
    torch.set_num_threads(threads)
    place = kit.folder / "private"
    place.mkdir(exist_ok=True)
    os.chmod(place, 0o700)
    tell = _say_and_log(place / "log.txt")
    policy = read_policy(kit.folder)
    client = Client(name, data, place, tell, models, methods, policy, reading)
    tell(f"{name}: {len(client.data.y)} rows in {data}; they and our own state stay here, in {place}")
    tell(f"rules of {kit.folder / FILE}: {policy.changes() or 'the defaults'}")
    _check_server(kit.server, tell)
    keys = credentials.operator_keys(kit.folder, policy.operators)
    if not keys:
        tell("requests are not signed: whoever the server lets in may ask (operators in policy.toml)")

    def answer(message: bytes) -> bytes:
        return client.answer(message, lambda sealed: credentials.unseal(keys, name, sealed))

    with stop_on_signals(), lock(place / "pid", name):
        _stay_connected(kit, place / "connected", answer, tell)


def _stay_connected(kit: credentials.Kit, mark: Path, answer: node.Answer, tell: Say) -> None:
    """Answer messages, and connect again whenever the connection ends, until the server refuses us.

    mark: a file that tells a later process that we have been connected before.
    """
    until, is_away = time.monotonic() + FORGET_SECONDS, False
    while True:
        is_connected = False
        try:
            with node.connect(kit.server, kit.key) as connection:
                is_connected, is_away = True, False
                mark.touch()
                tell(f"connected to {kit.server}; waiting for runs (Ctrl-C ends)")
                connection.serve(answer)
        except node.NotConnected as error:
            if is_connected:
                tell(f"the connection ended ({error}); connecting again")
                until = time.monotonic() + FORGET_SECONDS
            elif error.is_away:
                if not is_away:
                    tell(f"no server at {kit.server} ({error}); trying until there is one")
                is_away, until = True, time.monotonic() + FORGET_SECONDS
                time.sleep(AWAY_SECONDS)
            elif error.is_unknown and mark.exists() and time.monotonic() < until:
                # Flower has one code for an unknown key and for a key that is still connected, as after a crash.
                tell(
                    "the server thinks that we are still connected, as after a crash, or has just been started; "
                    f"trying again in {AGAIN_SECONDS:.0f} s"
                )
                time.sleep(AGAIN_SECONDS)
            else:
                unknown = f"it does not know our key {kit.key}, or another client is connected with it"
                why = unknown if error.is_unknown else str(error)
                raise RunFailed(f"the server at {kit.server} did not take us: {why}") from None


def _say_and_log(log: Path) -> Say:
    """A function that prints each line and appends it to a log."""

    def tell(line: str) -> None:
        with open(log, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        say(line)

    return tell


def _check_server(address: Address, tell: Say) -> None:
    """Report a missing or a wrong server at once: Flower would only retry again and again."""
    if not address.is_listening():
        tell(f"no server at {address} yet; trying until there is one")
        return
    if address.ca is None:
        if not _speaks_plain_http(address):
            raise UsageError(
                f"the server at {address} wants TLS and refuses plain HTTP; use a folder with certificates"
            )
        return
    context = ssl.create_default_context(cafile=str(address.ca))
    try:
        with socket.create_connection((address.host, address.port), timeout=5) as plain:
            with context.wrap_socket(plain, server_hostname=address.host) as link:
                link.sendall(f"HEAD / HTTP/1.0\r\nHost: {address.host}\r\n\r\n".encode())
                head = link.recv(4096).decode("latin-1")
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"the server at {address} is not the one that {address.ca} vouches for: {error.verify_message}. "
            "Ask its operator for the right ca.crt"
        ) from None
    except OSError as error:
        raise UsageError(
            f"the server at {address} does not speak TLS ({error}); is it one without certificates?"
        ) from None
    _check_clock(head, time.time())


AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 300.0  # how far Flower lets a client's clock be from the server's


def _check_clock(head: str, now: float) -> None:
    """Refuse a clock with which Flower would take every message of ours for a replayed one."""
    found = re.search(r"(?im)^date: *(.+?) *\r?$", head)
    if not found:
        return
    try:
        skew = now - email.utils.parsedate_to_datetime(found[1]).timestamp()
    except ValueError:
        return
    # The header has whole seconds, and was written up to a second ago.
    if skew - 2 > AHEAD_SECONDS or skew < -BEHIND_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        raise UsageError(
            f"our clock is {abs(skew):.0f} seconds {way} the server's; up to {AHEAD_SECONDS:.0f} ahead and "
            f"{BEHIND_SECONDS:.0f} behind are allowed. Set it by the network, e.g. with `timedatectl set-ntp true`"
        )


def _speaks_plain_http(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=5) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return plain.recv(5) == b"HTTP/"
    except OSError:
        return False
