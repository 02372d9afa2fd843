"""Workers that are stopped, and state that does not fit on a disk."""

import errno
import os
import signal
import threading
import time

import pytest
import torch

import plures
from plures.errors import RunFailed
from plures.simulate import client_store, workers

SMALL = {"clients": 4, "rounds": 4, "share": 0.2}


def test_a_worker_that_somebody_stopped_is_let_go_on(monkeypatch):
    monkeypatch.setattr(workers, "STOPPED_SECONDS", 0.2)
    expected = plures.run("fedavg", **SMALL).summary["digest"]
    stopped = []

    class Stop(plures.Callback):
        def played(self, state, row):
            if row.round == 2:
                [worker] = [child for child in children() if not stopped][:1]
                os.kill(worker, signal.SIGSTOP)
                stopped.append(worker)

    def children():
        with open(f"/proc/self/task/{threading.main_thread().native_id}/children") as file:
            return [int(word) for word in file.read().split()]

    began = time.monotonic()
    result = plures.run("fedavg", **SMALL, workers=2, callback=Stop())
    assert stopped and result.summary["digest"] == expected and time.monotonic() - began < 60


def test_a_full_disk_is_told_before_the_first_round(monkeypatch, tmp_path):
    def full(handle, at, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(client_store.os, "posix_fallocate", full)
    with pytest.raises(RunFailed, match="room"):
        plures.run("ditto", **SMALL, out=tmp_path / "run", memory_limit_mb=0)


def test_rows_on_disk_are_reserved_at_once(tmp_path):
    rows = client_store.table(torch.zeros(1000), 50, tmp_path)
    assert rows.shape == (50, 1000) and not list(tmp_path.iterdir())
