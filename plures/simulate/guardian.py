"""Ends what is left of a Ray that a run has started, once the run is gone. It is started as a file, alone.

Ray's own daemons end with the process that started them, but its agents are children of one of those daemons: if a run
is killed while they start, they wait for a server that is gone. This process is outside of the run's session, so that
what kills the run does not kill it too. Its standard input is a pipe whose other end the run holds.
"""

import os
import re
import select
import signal
import sys
import time

LONGEST = 10.0  # seconds that we look, for all of which we do if the run was killed: processes may be starting
PAUSE = 0.1  # seconds between looks
OUTPUT = ("raylet.out", "raylet.err")  # of Ray's daemon


def processes_of(run: int) -> dict[int, str]:
    """Process -> session, for the daemon of each Ray that the process `run` has started, and all that it has started.

    They change their commands, but all of them keep the daemon's output open, which is a file of the session; and Ray
    names a session by its date and by the process that started it. Who only reads that file is none of them.
    """
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != run:
            try:
                for number in os.listdir(f"/proc/{entry}/fd"):
                    folders = os.readlink(f"/proc/{entry}/fd/{number}").split("/")
                    if folders[-1] in OUTPUT and _writes(entry, number):
                        found |= {int(entry): name for name in folders if re.fullmatch(f"session_.*_{run}", name)}
            except OSError:
                continue  # it has ended, or belongs to another user
    return found


def _writes(process: str, number: str) -> bool:
    """Whether a process has a file open for writing, and not for reading alone."""
    with open(f"/proc/{process}/fdinfo/{number}", encoding="ascii") as file:
        flags = next(line.split()[1] for line in file if line.startswith("flags"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def wait_for_end(run: int) -> None:
    """Wait until the run says that it is done with Ray, or has ended."""
    while True:
        ready, _, _ = select.select([0], [], [], 0.5)
        # A process that the run has forked may hold the pipe open.
        if ready or os.getppid() != run:
            return


def end(run: int, spared: set[str]) -> None:
    """Kill all that is left of the run's Ray; not that of `spared` sessions, which are older than the run."""
    until = time.monotonic() + LONGEST
    while True:
        left = [process for process, session in processes_of(run).items() if session not in spared]
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > until or (not left and os.getppid() == run):
            return
        time.sleep(PAUSE)


def main() -> None:
    """Wait for the end of the run whose number is given."""
    run = int(sys.argv[1])
    older = set(processes_of(run).values())
    print("ready", flush=True)
    wait_for_end(run)
    end(run, older)


if __name__ == "__main__":
    main()
