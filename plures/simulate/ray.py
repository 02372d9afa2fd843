"""Ray: workers that are Ray actors, on this machine or on a cluster.

What all groups share goes into Ray's object store: data, method and model once per run, a message
for all once per cohort. What belongs to some clients goes only to the actor that has their group. Ray
unpickles what it is sent, so a cluster must be trusted.
"""

import importlib.util
import ipaddress
import itertools
import logging
import os
import socket
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plures import tree
from plures.engine import Usage
from plures.errors import RunFailed, UsageError
from plures.methods.messages import Each, Message, Same
from plures.simulate.executor import warm_up
from plures.simulate.tables import Tables
from plures.simulate.work import Job, Work
from plures.simulate.workers import error_line, job_failed, worker_lost
from plures.tree import Tree

LOSSES = 3  # of actors that had the same group, after which the run is given up
PATIENCE = 120  # seconds that an actor may take to find a place and to start


def refuse_without_ray() -> None:
    """Raise, with how to install it, if Ray is not there."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--executor ray needs Ray, which is not installed; install it with: pip install 'plures[ray]'")


# Trees travel as numpy arrays, which Ray copies least


def _pack(of: Tree) -> Tree:
    return tree.map(Tensor.numpy, of)


def _view(rows: np.ndarray) -> Tensor:
    """An array of the object store as a tensor; nobody may write to it."""
    with warnings.catch_warnings(action="ignore"):  # torch warns of just that
        return torch.from_numpy(rows)


def _unpack(of: Tree) -> Tree:
    """Tensors in memory as torch lays it out, so that kernels take the same path for the same numbers."""
    return tree.map(lambda x: _view(x).clone(), of)


def _last_line(error: Exception) -> str:
    """Of an error of Ray, which tells where it happened before it tells what."""
    return str(error).strip().splitlines()[-1]


class Worker:
    """An actor: it knows one run or more, and does one group after another."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # so that any number of workers gives the same bits
        self.runs: dict[int, Work] = {}

    def ready(self) -> None:
        """Answers when the actor has started."""

    def prepare(self, run: int, work: Work, x: np.ndarray, y: np.ndarray, each: bool, message: Tree) -> None:
        """Take what the groups of a run are run with, and trace what the main process has traced."""
        self.runs[run] = work._replace(population=work.population._replace(x=_view(x), y=_view(y)))
        warm_up(self.runs[run], (Each if each else Same)(_unpack(message)))

    def compute(self, run: int, job: Job, message: Tree, clients: Tree) -> tuple[Tree, Usage, str]:
        """What a job gives, or in what it failed."""
        try:
            result, usage = self.runs[run].compute(job, job.message(_unpack(message)), _unpack(clients))
            return _pack(result), usage, ""
        except Exception as error:
            return {}, Usage(), error_line(error)

    def forget(self, run: int) -> None:
        """Let go of what a run needed."""
        self.runs.pop(run, None)


class Cluster:
    """Ray, started here or joined, and our actors in it."""

    def __init__(self, address: str | None, n_workers: int) -> None:
        refuse_without_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address is None:
            # The name misleads: with 0, Ray listens on this machine only, on any system.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            os.environ.setdefault("RAY_worker_niceness", "0")  # else they give way to all other work
        import ray

        self.ray = ray
        self._ours = not ray.is_initialized()
        self._stack = ExitStack()
        if self._ours:
            if address is None:
                self._stack.enter_context(guarded())
            try:
                _connect(ray, address, n_workers)
            except BaseException:
                self._stack.close()
                raise
        self._actor = ray.remote(num_cpus=1)(Worker)
        self.workers = [self._actor.remote() for _ in range(n_workers)]
        try:
            self._wait_for(self.workers)
        except BaseException:
            self.close()
            raise

    def replace(self, k: int) -> None:
        """Another actor in the place of one that was lost."""
        self.ray.kill(self.workers[k])
        self.workers[k] = self._actor.remote()
        self._wait_for([self.workers[k]])

    def _wait_for(self, workers: list[Any]) -> None:
        refs = [worker.ready.remote() for worker in workers]
        done, missing = self.ray.wait(refs, num_returns=len(refs), timeout=PATIENCE)
        if missing:
            raise RunFailed(
                f"Ray found no place for {len(missing)} of {len(self.workers)} workers in {PATIENCE} seconds; it has "
                f"{self.ray.cluster_resources().get('CPU', 0):g} cores, and each worker takes one. Use fewer --workers."
            )
        try:
            self.ray.get(done)
        except self.ray.exceptions.RayError as error:
            raise RunFailed(f"a Ray worker did not start ({_last_line(error)})") from None

    def close(self) -> None:
        for worker in self.workers:
            self.ray.kill(worker)
        if self._ours:
            self.ray.shutdown()
        self._stack.close()


@contextmanager
def guarded() -> Iterator[None]:
    """Within it, a Ray that this process starts ends with it, even by SIGKILL while Ray starts: `guardian.py` looks.

    Where there is no /proc, as on macOS, Ray has a guardian of its own.
    """
    if not Path("/proc/self/fd").exists():
        yield
        return
    command = [sys.executable, "-I", str(Path(__file__).with_name("guardian.py")), str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as guardian:  # which is told by the end of its input, and waited for
        assert guardian.stdout is not None
        guardian.stdout.readline()  # it has seen which sessions are older than ours
        yield


def _connect(ray: Any, address: str | None, n_workers: int) -> None:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is not None:
        try:
            _knock(address)
            ray.init(address=address, **quiet)
        except Exception as error:
            raise UsageError(
                f"there is no Ray cluster at {address!r} that can be joined: {error_line(error)}"
            ) from None
        return
    try:
        ray.init(address="local", num_cpus=n_workers, include_dashboard=False, **quiet)
    except Exception as error:
        raise RunFailed(f"Ray did not start: {error_line(error)}") from None
    listens_on = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(listens_on).is_loopback:
        ray.shutdown()
        raise UsageError(
            f"Ray would listen on {listens_on} to all the network, because it was imported before Plures could tell "
            "it otherwise. Do not import ray before, or start it yourself with ray.init()."
        )


def _knock(address: str) -> None:
    """Fails at once where nobody listens; Ray would try for a quarter of an hour."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("an address is HOST:PORT, ray://HOST:PORT or auto")
    socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


_open: Cluster | None = None
_users = 0  # of the open cluster
_runs = itertools.count()


@contextmanager
def cluster(address: str | None, n_workers: int) -> Iterator[Cluster]:
    """Ray and so many actors. Runs that are open at the same time share them, because an actor is slow to start."""
    global _open, _users
    if _open is None:
        _open = Cluster(address, n_workers)
    _users += 1
    try:
        yield _open
    finally:
        _users -= 1
        if _users == 0:
            _open.close()
            _open = None


class RayWorkers:
    """Actors; each takes the next job when it is free. One that is lost is replaced, and its job done again."""

    def __init__(self, work: Work, tables: Tables, message: Message, n_workers: int, address: str | None) -> None:
        self._tables, self._run, self._stack = tables, next(_runs), ExitStack()
        self._cluster = self._stack.enter_context(cluster(address, n_workers))
        self._numbers = range(min(n_workers, len(self._cluster.workers)))
        try:
            self._shared = self._put(work, message)
            self._prepare(list(self._numbers))
        except BaseException:
            self.close()
            raise

    def _put(self, work: Work, message: Message) -> list[Any]:
        """What all actors need, in the object store; the tables apart, so that nobody copies them."""
        put, population, nothing = self._cluster.ray.put, work.population, torch.empty(0)
        light = work._replace(population=population._replace(x=nothing, y=nothing))
        try:
            stored = put(light)
        except Exception as error:
            raise UsageError(
                f"the model or the method cannot be sent to Ray's workers ({error_line(error)}); "
                "it must keep nothing between calls. Or use --executor vectorised."
            ) from None
        tables = [put(population.x.numpy()), put(population.y.numpy())]
        return [stored, *tables, isinstance(message, Each), put(_pack(message.tree))]

    def _prepare(self, numbers: list[int]) -> None:
        """Tell some actors what the run is about; those that are gone are replaced."""
        for _ in range(LOSSES):
            told = {k: self._cluster.workers[k].prepare.remote(self._run, *self._shared) for k in numbers}
            numbers = [k for k, ref in told.items() if self._is_lost(ref)]
            if not numbers:
                return
            for k in numbers:
                self._cluster.replace(k)
        raise RunFailed("Ray's workers end as soon as they begin; are they out of memory? Use fewer --workers.")

    def _is_lost(self, ref: Any) -> bool:
        try:
            self._cluster.ray.get(ref)
        except self._cluster.ray.exceptions.RayTaskError as error:
            raise RunFailed(
                f"a Ray worker cannot do this run ({_last_line(error)}); all machines of the cluster need the same "
                "packages, and the module of a model of your own"
            ) from None
        except self._cluster.ray.exceptions.RayError:
            return True
        return False

    def run(self, jobs: list[Job]) -> Usage:
        ray, workers = self._cluster.ray, self._cluster.workers
        for_all = None if jobs[0].is_each else ray.put(_pack(self._tables.message(jobs[0]).tree))
        waiting, free = list(reversed(jobs)), list(self._numbers)
        busy: dict[Any, tuple[int, Job]] = {}
        losses: Counter[int] = Counter()
        total, failure = Usage(), ""
        while True:
            while waiting and free and not failure:
                k, job = free.pop(), waiting.pop()
                message = _pack(self._tables.message(job).tree) if for_all is None else for_all
                clients = _pack(self._tables.states(job))
                busy[workers[k].compute.remote(self._run, job, message, clients)] = k, job
            if not busy:
                break
            (ready, *_), _ = ray.wait(list(busy))
            k, job = busy.pop(ready)
            free.append(k)
            try:
                result, usage, said = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                result, usage, said = {}, Usage(), _last_line(error)
            except ray.exceptions.RayError:
                losses[job.group] += 1
                if losses[job.group] == LOSSES:
                    raise worker_lost(job) from None
                self._prepare([k])
                waiting.append(job)
                continue
            failure = failure or said
            total = total.plus(usage)
            if not said:
                self._tables.write(job, tree.map(_view, result))
        if failure:
            raise job_failed(failure)
        return total

    def close(self) -> None:
        for k in self._numbers:
            self._cluster.workers[k].forget.remote(self._run)
        self._shared = []
        self._stack.close()
