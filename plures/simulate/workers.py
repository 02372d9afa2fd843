"""Workers: who does the jobs of a cohort. This process, or forked ones that see the same memory; Ray is in `ray`.

Every worker computes with one thread, so that any number of workers gives the same bits.
"""

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from plures.engine import Usage
from plures.errors import RunFailed
from plures.simulate.tables import Tables
from plures.simulate.work import Job, Work


class Workers(Protocol):
    """Those who do jobs: they read what a job needs from the tables, and write what it gives into them."""

    def run(self, jobs: list[Job]) -> Usage:
        """Do all jobs, of which the first is the longest; all are of one kind and one round."""

    def close(self) -> None: ...


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread in here, as every worker does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def perform(work: Work, tables: Tables, job: Job) -> Usage:
    """One job, in this process: read, compute, write."""
    result, usage = work.compute(job, tables.message(job), tables.states(job))
    tables.write(job, result)
    return usage


SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED_SECONDS = 5.0  # without an answer, until it is looked whether a worker was stopped


class InProcess:
    """No worker but this process."""

    def __init__(self, work: Work, tables: Tables) -> None:
        self._work, self._tables = work, tables

    def run(self, jobs: list[Job]) -> Usage:
        total = Usage()
        for job in jobs:
            try:
                total = total.plus(perform(self._work, self._tables, job))
            except torch.OutOfMemoryError:
                raise RunFailed(
                    f"the device has too little memory for {len(job.ids)} clients at once; choose a smaller --stack, a "
                    "smaller batch or a smaller model"
                ) from None
        return total

    def close(self) -> None:
        pass


class Forked:
    """Worker processes, forked, so that they see the same memory; each takes the next job when it is free."""

    def __init__(self, work: Work, tables: Tables, n_workers: int) -> None:
        fork = multiprocessing.get_context("fork")
        pipes = [fork.Pipe() for _ in range(n_workers)]
        self._ends: list[Connection] = [ours for ours, _ in pipes]
        self._processes = []
        for k, (_, theirs) in enumerate(pipes):
            others = [end for i, pair in enumerate(pipes) for end in pair if not (i == k and end is theirs)]
            process = fork.Process(target=_serve, args=(theirs, others, work, tables), daemon=True)
            # Signals wait until the worker ignores them: a terminal sends Ctrl-C to all.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self._processes.append(process)
        for _, theirs in pipes:
            theirs.close()

    def run(self, jobs: list[Job]) -> Usage:
        waiting = list(reversed(jobs))
        busy: dict[Connection, Job] = {}
        total, failure = Usage(), ""
        for end in self._ends:
            if waiting:
                busy[end] = self._give(end, waiting.pop())
        while busy:
            for ready in self._wait(list(busy)):
                end = next(end for end in busy if end is ready)
                job = busy.pop(end)
                try:
                    answer: dict[str, Any] = json.loads(end.recv_bytes())
                except (EOFError, OSError):
                    raise worker_lost(job) from None
                failure = failure or answer["failure"]
                total = total.plus(Usage(*answer["usage"]))
                if waiting and not failure:
                    busy[end] = self._give(end, waiting.pop())
        if failure:
            raise job_failed(failure)
        return total

    def _wait(self, busy: list[Connection]) -> list[Any]:
        """The workers that have answered. One that somebody has stopped is let go on: nobody else would."""
        while not (ready := wait(busy, timeout=STOPPED_SECONDS)):
            for process in self._processes:
                if process.pid is not None and is_stopped(process.pid):
                    os.kill(process.pid, signal.SIGCONT)
        return ready

    @staticmethod
    def _give(end: Connection, job: Job) -> Job:
        try:
            end.send_bytes(json.dumps(job).encode())
        except OSError:
            raise worker_lost(job) from None
        return job

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()


def is_stopped(process: int) -> bool:
    """Whether a process is stopped by a signal; not known where there is no /proc."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _serve(mine: Connection, others: list[Connection], work: Work, tables: Tables) -> None:
    """The life of a forked worker: jobs come in, what went wrong goes out; results are in the tables."""
    for end in others:
        end.close()  # else this process would not notice that the main process has ended
    for number in SIGNALS:  # which may reach the whole group: the main process decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    torch.set_num_threads(1)
    while True:
        try:
            job = Job(*json.loads(mine.recv_bytes()))
        except (EOFError, OSError):  # the main process has ended, or was killed
            os._exit(0)
        usage, failure = Usage(), ""
        try:
            usage = perform(work, tables, job)
        except BaseException as error:  # the main process raises it; this one must live on
            failure = error_line(error)
        try:
            mine.send_bytes(json.dumps({"failure": failure, "usage": usage}).encode())
        except OSError:
            os._exit(0)


def job_failed(said: str) -> RunFailed:
    """The error for a client function that failed in a worker."""
    return RunFailed(
        f"a client function failed ({said}); rerun with --executor one_by_one --workers 1 --debug to learn where"
    )


def worker_lost(job: Job) -> RunFailed:
    """The error for a worker that ended in the middle of a job."""
    return RunFailed(
        f"a worker process ended while it had clients {job.ids} in round {job.round + 1}; was it out of memory? "
        "Resume it with `plures resume`, perhaps with fewer --workers."
    )


def error_line(error: BaseException) -> str:
    """An error in one line."""
    return traceback.format_exception_only(error)[-1].strip()
