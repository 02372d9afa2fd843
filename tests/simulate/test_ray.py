"""The Ray executor gives the same bits as the vectorised one, also when its workers are killed."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import plures
from plures.cli.main import call
from plures.engine import costs
from plures.errors import RunFailed, UsageError
from plures.runs.config import make_config
from plures.simulate import ray
from tests.methods.test_every_method import NAMES
from tests.small import played, run_of

ROOT = Path(__file__).parent.parent.parent
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
pytestmark = pytest.mark.xdist_group("ray")

WITH_ADDONS = [
    "fedprox+ala:cap=12",
    "fedrod:head=hyper+feddyn",
    "fedavg+brm+ft",
    "ditto+ala:cap=12",
]


@pytest.fixture(scope="module")
def cluster():
    """One Ray and two actors for all tests."""
    with ray.cluster(None, 2) as cluster:
        yield cluster
    assert not cluster.ray.is_initialized()


def process_of(worker, ray) -> int:
    return ray.get(worker.__ray_call__.remote(lambda self: os.getpid()))


@needs_ray
@pytest.mark.parametrize("name", [*NAMES, *WITH_ADDONS])
def test_ray_gives_the_bits_of_vectorised(name, cluster):
    stacked = played(run_of(name), 2)
    spread = played(run_of(name, executor="ray", workers=2), 2)
    assert spread.state.digest() == stacked.state.digest()
    assert [row.flops for row in spread.state.rows] == [row.flops for row in stacked.state.rows]


@needs_ray
@pytest.mark.parametrize("name", ["pfedhn", "plgu-ghn", "fedrod", "fedavg"])
def test_new_clients_of_a_run_on_ray_are_those_of_vectorised(name, cluster):
    options = {"clients": 4, "rounds": 1, "eval_every": 0, "new_clients": 1, "new_epochs": 1, "personal_epochs": 1}
    options |= {"pool_rows": 0, "share": 0.2}
    there, here = (plures.run(name, executor=executor, **options).summary for executor in ("ray", "vectorised"))
    for part in ("new_clients", "personal_epochs"):
        assert there[part] == here[part] and there[part]["n"] > 0


@needs_ray
def test_two_runs_at_a_time_share_the_actors_and_nothing_else(cluster):
    alone = [played(run_of(name), 2).state.digest() for name in ("fedavg", "fedper")]
    runs = [run_of(name, executor="ray", workers=n) for name, n in (("fedavg", 2), ("fedper", 1))]
    for run in (*runs, *runs):
        run.play_round()
    assert [played(run, 0).state.digest() for run in runs] == alone


@needs_ray
def test_batchnorm_dropout_and_scores_are_the_same(cluster):
    """Also the mean of personal models, whose sums are formed group by group."""
    found = []
    for executor in ("vectorised", "ray"):
        options = {"workers": 2, "participation": 0.5, "unchosen": "refresh"}
        run = run_of("fedper", "norm", executor=executor, **options)
        try:
            run.play_round()
            found.append(run.evaluate(is_last=True)._replace(seconds=0.0))
        finally:
            run.close()
    np.testing.assert_equal(found[0], found[1])
    assert found[0].generic is not None


@needs_ray
def test_client_function_that_fails_is_told_in_words(cluster, monkeypatch):
    run = run_of("fedavg", executor="ray", workers=2)
    monkeypatch.setattr(run.executor._tables, "states", lambda job: {"no": torch.zeros(1)})
    with pytest.raises(RunFailed, match=r"a client function failed \("):
        played(run, 1)


@needs_ray
def test_workers_for_which_there_is_no_place_are_told_in_words(cluster, monkeypatch):
    monkeypatch.setattr(ray, "PATIENCE", 1)
    with pytest.raises(RunFailed, match="no place for 1 of 1 workers in 1 seconds; it has 2 cores"):
        ray.Cluster(None, 1)  # the two that are there are taken


@needs_ray
@pytest.mark.skipif(not Path("/proc/net/tcp6").exists(), reason="open ports are read from /proc")
def test_ray_that_we_start_listens_on_this_machine_only(cluster):
    """Ray's processes are our children's children; the addresses are hexadecimal, those of version 6 by words."""
    listening = {}
    for line in [line for v in ("tcp", "tcp6") for line in Path(f"/proc/net/{v}").read_text().splitlines()[1:]]:
        fields = line.split()
        if fields[3] == "0A":
            listening[f"socket:[{fields[9]}]"] = fields[1].split(":")[0]
    ours = [listening[s] for p in descendants(os.getpid()) for s in sockets_of(p) if s in listening]
    assert len(ours) >= 4  # the store of the cluster's state, Ray's own daemon, two actors
    assert all(address[-8:] == "0100007F" for address in ours)


def descendants(process: int) -> list[int]:
    children = [int(p) for p in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [process] + [p for child in children for p in descendants(child)]


def sockets_of(process: int) -> list[str]:
    return [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()]


@needs_ray
def test_command_line_is_quiet_and_says_ray(cluster, tmp_path, capfd):
    options = ["--clients", "4", "--rounds", "2", "--workers", "2", "--executor", "ray", "--out", str(tmp_path / "run")]
    assert call(["run", "fedavg", "--json", "--quiet", *options]) == 0
    printed = capfd.readouterr()
    summary = json.loads(printed.out)
    assert summary["executor"] == "ray" and printed.err == ""
    without = plures.run("fedavg", clients=4, rounds=2).summary
    differ = {name for name in without if summary[name] != without[name]}
    assert differ <= {"executor", "seconds", "peak_rss_mb"}


@needs_ray
def test_worker_killed_in_the_middle_of_a_group_changes_no_bit(cluster, monkeypatch):
    monkeypatch.setattr(costs, "GROUP_BYTES", 1)  # a group for each client
    stacked = played(run_of("ditto"), 2)
    run = run_of("ditto", executor="ray", workers=2)
    run.play_round()
    before = list(cluster.workers)
    kill_first_to_work(run, cluster, monkeypatch)
    assert played(run, 1).state.digest() == stacked.state.digest()
    assert [a is b for a, b in zip(before, cluster.workers, strict=True)] == [True, False]


def kill_first_to_work(run, cluster, monkeypatch):
    """The actor that gets the next group is stopped before it gets it, and killed while it has it."""
    process = process_of(cluster.workers[-1], cluster.ray)
    states = run.executor._tables.states

    def stop_first(job):
        monkeypatch.setattr(run.executor._tables, "states", states)
        os.kill(process, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (process, signal.SIGKILL)).start()
        return states(job)

    monkeypatch.setattr(run.executor._tables, "states", stop_first)


@needs_ray
def test_group_whose_workers_are_lost_again_and_again_ends_the_run_in_words(cluster, monkeypatch):
    run = run_of("fedavg", executor="ray", workers=2)
    monkeypatch.setattr(ray, "LOSSES", 1)
    kill_first_to_work(run, cluster, monkeypatch)
    with pytest.raises(RunFailed, match=r"a worker process ended while it had clients \["):
        played(run, 1)


@needs_ray
def test_running_cluster_is_joined_by_its_address(cluster):
    """By another process, with a model of its own; one of our actors makes room. Tests after this need no actor."""
    cluster.ray.kill(cluster.workers[0])
    address = cluster.ray.get_runtime_context().gcs_address
    options = {"model": "tests.small:TinyMlp", "clients": 3, "rounds": 1}
    script = "import plures, sys, json; print(plures.run('fedavg', **json.loads(sys.argv[1])).summary['digest'])"
    there = options | {"executor": "ray", "address": address}
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(there)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == plures.run("fedavg", **options).summary["digest"]
    assert done.stderr == ""


@needs_ray
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are read from /proc")
def test_run_that_is_killed_while_ray_starts_leaves_no_process(tmp_path):
    """Ray's agents are children of its daemon; they do not notice its end before they have started."""
    command = [sys.executable, "-c", "from plures.cli.main import main; main()", "run", "fedavg", "--executor", "ray"]
    command += ["--clients", "3", "--rounds", "500", "--workers", "1", "--out", str(tmp_path / "run")]
    with open(tmp_path / "printed", "wb") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until(lambda: run.poll() is not None or has_agent(session_of(run.pid)))
        assert has_agent(session_of(run.pid)), (tmp_path / "printed").read_text()
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not session_of(run.pid), 20)
    left = session_of(run.pid)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == {}


def has_agent(processes: dict[int, str]) -> bool:
    """The daemon, which has the command of its agent among its own words, is none."""
    return any(word.endswith("dashboard/agent.py") for words in processes.values() for word in words.split()[:4])


def wait_until(is_so, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)


def session_of(leader: int) -> dict[int, str]:
    """The living processes of a session, with their commands."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has just ended
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are read from /proc")
def test_guardian_ends_what_our_ray_left_and_nothing_else(tmp_path):
    """Spared: an older Ray of this process, a Ray of another one, and who reads our log."""

    def sleeper(session: str, mode: str) -> subprocess.Popen:
        (tmp_path / session).mkdir(exist_ok=True)
        with open(tmp_path / session / "raylet.out", mode) as file:
            return subprocess.Popen(["sleep", "60"], stdout=file)

    started = {"older": sleeper(f"session_1_{os.getpid()}", "wb")}
    try:
        with ray.guarded():
            started["of another"] = sleeper(f"session_2_{os.getppid()}", "wb")
            started["ours"] = sleeper(f"session_3_{os.getpid()}", "wb")
            started["reader"] = sleeper(f"session_3_{os.getpid()}", "rb")
        assert {name for name, process in started.items() if process.poll() is not None} == {"ours"}
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_address_where_nobody_listens_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UsageError, match="there is no Ray cluster at"):
        ray._connect(None, address, 1)


def test_without_ray_we_are_told_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'plures\[ray\]'"):
        plures.run("fedavg", executor="ray", rounds=1)


def test_address_is_for_ray():
    with pytest.raises(UsageError, match="address is for the executor ray"):
        make_config({"address": "127.0.0.1:6379"})


def test_run_may_be_resumed_with_another_executor_of_the_same_bits():
    one, other, third = (make_config({"executor": e}).identity() for e in ("vectorised", "ray", "one_by_one"))
    assert one == other != third
