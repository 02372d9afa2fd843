"""A federation of real processes on 127.0.0.1: TLS, keys, four clients, and what may go wrong.

All tests share one federation, and so one worker process of pytest.
"""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'plures[deploy]'")

from plures import report
from plures.cli import main
from plures.runs import checkpoint
from tests.federate.federation import SIZES, assert_same_state, simulated, write_data
from tests.test_add_a_method import FILE

pytestmark = pytest.mark.xdist_group("federation")

METHODS = ["fedavg", "ditto", "fedala:cap=3", "fedrod", "pfedla", "scaffold", "my_methods:FedHalf:share=0.3"]
OPTIONS = {"rounds": 3, "lr": 0.1, "batch": 5, "seed": 3}
RESEND = ["--resend", "3"]
FLAGS = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))] + RESEND
POLICY = "least_batch = 1\nleast_rows = 1\nleast_steps = 1\nleast_test_rows = 1\n"  # these clients have few rows
PLURES = [sys.executable, "-c", "from plures.cli.main import main; main()"]
ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class Federation:
    """A folder with a federation, and the processes in it; all of them end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, []

    def start(self, name: str, *words: object, program: list[str] = PLURES) -> subprocess.Popen:
        """A process whose output is in `name.out`."""
        with open(self.folder / f"{name}.out", "wb") as output:
            process = subprocess.Popen(
                [*program, *map(str, words)], cwd=self.folder, env=ENVIRONMENT, stdout=output, stderr=output
            )
        self.processes.append(process)
        return process

    def call(self, *words: object, code: int = 0) -> str:
        """A command in this process, which saves the time to start one: what it prints."""
        output = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            found = main.call([str(word) for word in words])
        assert found == code, output.getvalue()
        return output.getvalue()

    def client(self, name: str) -> subprocess.Popen:
        words = ["federate", "client", "--name", name, "--data", f"data/{name}.npz", "--method", "my_methods:FedHalf"]
        return self.start(name, *words)

    def out(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def wait(self, name: str, words: str, process: subprocess.Popen | None = None) -> None:
        """Until a process has said something, or has ended without it."""
        until = time.monotonic() + 240
        while words not in self.out(name):
            has_ended = process is not None and process.poll() is not None
            assert time.monotonic() < until and not has_ended, f"{name} does not say {words!r}: {self.out(name)}"
            time.sleep(0.05)

    def private(self, name: str) -> Path:
        return self.folder / "federation" / "clients" / name / "private"

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def n_processes_in(folder: Path) -> int:
    """How many processes have the folder in their command."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return sum(str(folder) in line for line in found.splitlines())


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    found = Federation(tmp_path_factory.mktemp("federation"))
    write_data(found.folder / "data")
    (found.folder / "my_methods.py").write_text(FILE)
    names = [word for name in [*SIZES, "hospital-e"] for word in ("--client", name)]
    found.call("federate", "init", found.folder / "federation", *names, "--port", free_port())
    for name in [*SIZES, "hospital-e"]:
        (found.private(name).parent / "policy.toml").write_text(POLICY)
    try:
        found.server = found.start("server", "federate", "server")
        found.wait("server", "listening on https://", found.server)
        for name in SIZES:
            setattr(found, name.replace("-", "_"), found.client(name))
        for name in SIZES:
            found.wait(name, "connected to", getattr(found, name.replace("-", "_")))
        yield found
    finally:
        found.close()
    until = time.monotonic() + 15
    while n_processes_in(found.folder) and time.monotonic() < until:
        time.sleep(0.2)
    assert n_processes_in(found.folder) == 0, "processes were left behind"


@pytest.fixture(scope="module")
def played(federation):
    """Some rounds of seven methods, one of them a file of ours, with TLS and keys."""
    for method in METHODS:
        federation.call("federate", "start", method, *FLAGS, "--out", folder_of(method), "--clients", 4, "--quiet")
    return federation


def folder_of(method: str) -> str:
    return f"runs/{method.partition(':')[0]}"


def simulation(federation: Federation, method: str) -> Path:
    folder = federation.folder / "simulated" / folder_of(method)
    if not folder.exists():
        with contextlib.chdir(federation.folder):
            simulated(method, federation.folder / "data", folder, **OPTIONS)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_four_clients_over_tls_end_in_the_state_of_the_simulation(played, method):
    folder = played.folder / folder_of(method)
    assert_same_state(folder, simulation(played, method), played.private, 1e-6)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["clients"] == 4 and summary["refused_updates"] == 0 and summary["silent"] == []


def test_the_run_folder_has_what_every_run_folder_has_and_a_report_can_be_made(played, tmp_path):
    folder = played.folder / "runs" / "fedavg"
    names = {path.name for path in folder.iterdir()}
    assert {"config.toml", "rounds.csv", "clients.csv", "summary.json", "checkpoint", "log.txt"} <= names
    assert "fedavg" in report.write([folder], tmp_path / "report.html").read_text()
    assert len((folder / "rounds.csv").read_text().splitlines()) == 1 + OPTIONS["rounds"]


def test_both_sides_print_what_travels(played):
    for text in (played.out("hospital-a"), (played.folder / "runs" / "fedrod" / "log.txt").read_text()):
        assert "up    upload/head.weight" in text and "stays with the client" in text


def test_no_file_of_the_server_has_what_a_client_keeps(played):
    kept = checkpoint.read(played.folder / "runs" / "ditto" / "checkpoint")[0]
    assert set(kept.clients()[1]) == {"version"}


def test_status_knows_who_is_there(played):
    found = json.loads(played.call("federate", "status", "--json"))
    assert [found["clients"][name] for name in SIZES] == ["online"] * 4
    assert {run["state"] for run in found["runs"]} == {"ended"}


def test_a_run_that_was_killed_is_resumed_and_ends_in_the_same_state(federation):
    command = ["federate", "start", "scaffold", *FLAGS, "--out", "runs/killed", "--clients", 4]
    started = federation.start("killed", *command)
    until = time.monotonic() + 240
    while not (federation.folder / "runs/killed/checkpoint/000001").exists():
        assert time.monotonic() < until and started.poll() is None, federation.out("killed")
        time.sleep(0.05)
    started.kill()
    started.wait()
    federation.call("federate", "start", "--resume", "runs/killed", "--quiet", *RESEND)
    assert_same_state(
        federation.folder / "runs" / "killed", simulation(federation, "scaffold"), federation.private, 1e-6
    )


def test_a_client_killed_in_the_middle_of_a_round_comes_back_with_its_state(played):
    """It is stopped, so that it has its message and does not answer, then killed; the run goes on without it."""
    command = ["federate", "start", "ditto", *FLAGS, "--rounds", 999, "--out", "runs/crash", "--clients", 4]
    started = played.start("crash", *command, "--deadline", 8, "--quorum", 0.25)
    log = played.folder / "runs" / "crash" / "log.txt"
    _until(lambda: log.exists() and "round 1/999" in log.read_text(), started)
    played.hospital_b.send_signal(signal.SIGSTOP)
    _until(lambda: "hospital-b did not answer" in log.read_text(), started)
    played.hospital_b.kill()
    played.hospital_b.wait()
    played.hospital_b = played.client("hospital-b")
    _until(lambda: "without us; our state is that of" in played.out("hospital-b"), started)
    played.call("federate", "stop", "runs/crash")
    assert started.wait(60) == 130, played.out("crash")
    missed = checkpoint.read(played.folder / "runs" / "crash" / "checkpoint")[0].manifest["silent"]
    assert "hospital-b" in {one["client"] for one in missed}
    assert "initial state" not in played.out("hospital-b")


def test_a_server_that_was_killed_and_started_again_goes_on_with_the_run(played):
    command = ["federate", "start", "fedavg", *FLAGS, "--rounds", 999, "--out", "runs/again", "--clients", 4]
    started = played.start("again", *command, "--deadline", 200, "--wait", 100)
    log = played.folder / "runs" / "again" / "log.txt"
    _until(lambda: log.exists() and "round 1/999" in log.read_text(), started)
    played.server.kill()
    played.server.wait()
    played.server = played.start("server", "federate", "server")
    played.wait("hospital-c", "the connection ended", played.hospital_c)
    n_rounds = log.read_text().count("/999")
    _until(lambda: log.read_text().count("/999") > n_rounds + 1, started)
    played.call("federate", "stop", "runs/again")
    assert started.wait(60) == 130, played.out("again")
    assert "resume it with: plures federate start --resume runs/again" in played.out("again")
    assert "initial state" not in played.out("hospital-a")


def _until(is_so, process) -> None:
    until = time.monotonic() + 240
    while not is_so():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)


EVIL = """
import sys, time
from pathlib import Path
import torch
from plures.federate import wire
from plures.federate.client import Client

honest = Client.answer
BAD = [
    {"upload/head.bias": torch.full((10,), torch.nan)},
    {"upload/head.bias": torch.zeros(3)},
    {"upload/head.bias": torch.zeros(1 << 20)},
    {"client/model/head.bias": torch.zeros(10)},
]

def answer(self, message, unseal=None):
    found = honest(self, message, unseal)
    fields, tensors = wire.unpack(found, 1 << 30)
    if fields["kind"] != "round" or fields["loss"] is None:
        return found
    while fields["round"] == len(BAD) and not Path("the run is over").exists():
        time.sleep(0.1)  # its answer comes after the deadline
    if fields["round"] == len(BAD):
        return found
    from safetensors.torch import save
    import json
    metadata = {"fields": json.dumps(fields), "same": "{}"}
    return save({**tensors, **BAD[fields["round"]]}, metadata=metadata)

Client.answer = answer
from plures.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def evil(played):
    """A client that was not in training, and whose updates are none; else it does what it should."""
    write_data(played.folder / "data", {"hospital-e": 30})
    words = ["federate", "client", "--name", "hospital-e", "--data", "data/hospital-e.npz"]
    found = played.start("hospital-e", *words, program=[sys.executable, "-c", EVIL])
    played.wait("hospital-e", "connected to", found)
    yield found
    found.kill()


def test_a_new_client_joins_after_training(played, evil):
    words = ["federate", "adapt", "runs/fedrod", "--client", "hospital-e", "--epochs", 1, "--json"]
    found = json.loads(played.call(*words))
    assert len(found["curve"]) == 2 and found["n_test"] == 10
    assert len(list((played.private("hospital-e") / "models").iterdir())) == 1


def test_an_evil_client_is_refused_by_name_and_a_silent_one_is_left_behind(played, evil):
    played.wait("hospital-b", "connected to")
    options = ["--rounds", 5, "--out", "runs/evil", "--clients", 5, "--deadline", 8, "--quiet"]
    try:
        played.call("federate", "start", "fedavg", *FLAGS, *options)
    finally:
        (played.folder / "the run is over").touch()
    summary = json.loads((played.folder / "runs" / "evil" / "summary.json").read_text())
    assert {one["client"] for one in summary["refusals"]} == {"hospital-e"}
    whys = [one["why"] for one in summary["refusals"]]
    for why, words in zip(whys, ("not finite", "is 3 float32", "at most", "is not on the list"), strict=True):
        assert words in why
    assert summary["refused_updates"] == 4
    assert summary["silent"][0] == {"round": 5, "client": "hospital-e"}
    assert {one["client"] for one in summary["silent"]} == {"hospital-e"}  # it may still sleep when all are scored


# Strangers


def test_a_wrong_key_a_wrong_authority_and_plain_http_are_refused(played):
    home = played.folder / "federation"
    port = re.search(r"port = (\d+)", (home / "federation.toml").read_text())[1]
    played.call("federate", "init", played.folder / "other", "--client", "hospital-a", "--port", port)
    played.call("federate", "init", played.folder / "plain", "--client", "hospital-a", "--port", port, "--insecure")
    other, key = played.folder / "other" / "clients" / "hospital-a", played.folder / "key"
    key.mkdir()
    for file in ("client.toml", "node.key", "node.key.pub"):
        (key / file).write_bytes((other / file).read_bytes())
    (key / "ca.crt").write_bytes((home / "ca.crt").read_bytes())
    words = ["federate", "client", "--name", "hospital-a", "--data", "data/hospital-a.npz", "--home"]
    assert "it does not know our key" in played.call(*words, "key", code=4)
    assert "is not the one that" in played.call(*words, "other", code=2)
    assert "wants TLS and refuses plain HTTP" in played.call(*words, "plain", code=2)
    said = played.call("federate", "init", "far", "--insecure", "--address", "example.org", code=2)
    assert "plain HTTP is for 127.0.0.1 alone" in said


def test_a_client_that_is_removed_is_out_at_once(played, evil):
    assert "hospital-e can no longer connect" in played.call("federate", "remove", "hospital-e")
    assert "hospital-e" not in json.loads(played.call("federate", "status", "--json"))["clients"]
    played.call("federate", "start", "fedavg", *FLAGS, "--rounds", 1, "--out", "runs/without", "--quiet", "--wait", 60)
    about = json.loads((played.folder / "runs" / "without" / "federation.json").read_text())
    assert [one["name"][-1] for one in about["clients"]] == ["a", "b", "c", "d"]


def test_a_new_certificate_is_taken_up_while_the_server_runs_and_runs_go_on(played):
    home = played.folder / "federation"
    port = int(re.search(r"port = (\d+)", (home / "federation.toml").read_text())[1])

    def is_new():
        return (
            ssl.get_server_certificate(("127.0.0.1", port), ca_certs=home / "ca.crt").strip()
            == file.read_text().strip()
        )

    file = home / "server.crt"
    before = file.read_text()
    started = played.start(
        "certified", "federate", "start", "fedavg", *FLAGS, "--rounds", 999, "--out", "runs/certified", "--clients", 4
    )
    log = played.folder / "runs" / "certified" / "log.txt"
    _until(lambda: log.exists() and "round 1/999" in log.read_text(), started)
    played.call("federate", "rotate")
    assert file.read_text() != before
    _until(is_new, played.server)
    n_rounds = log.read_text().count("/999")
    _until(lambda: log.read_text().count("/999") > n_rounds + 2, started)
    clients = json.loads(played.call("federate", "status", "--json"))["clients"]
    assert [clients[name] for name in SIZES] == ["online"] * 4
    played.call("federate", "stop", "runs/certified")
    assert started.wait(60) == 130, played.out("certified")
    assert "did not answer" not in log.read_text()


def test_a_new_key_takes_the_place_of_the_old_one_at_once(played):
    # Its process must not find the new key, which is in its folder here, before the server is asked.
    own = [process for process in played.processes if "hospital-c" in process.args and process.poll() is None]
    for process in own:
        process.send_signal(signal.SIGSTOP)
    try:
        played.call("federate", "rotate", "hospital-c")
        found = json.loads(played.call("federate", "status", "--json"))
    finally:
        for process in own:
            process.send_signal(signal.SIGCONT)
    assert found["clients"]["hospital-c"] == "registered"  # the new key, which has never connected
    assert found["details"]["hospital-a"]["version"] == found["plures"] and found["details"]["hospital-a"]["last_seen"]


def test_both_sides_have_a_line_for_every_request(played):
    server = [json.loads(line) for line in (played.folder / "federation/server/audit.jsonl").read_text().splitlines()]
    client = [json.loads(line) for line in (played.private("hospital-a") / "audit.jsonl").read_text().splitlines()]
    mine = [line["asked"] for line in server if line["who"] == "hospital-a" and line["asked"].startswith("round")]
    theirs = [line["asked"].removeprefix("round, ") for line in client if line["asked"].startswith("round")]
    assert set(mine) == set(theirs) and len(mine) > 20


def test_the_server_stops_when_asked_and_says_so(played):
    assert "the server has stopped" in played.call("federate", "stop")
    assert played.server.wait(60) == 0


# The page for newcomers


def commands_of(page: Path) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def test_the_commands_of_the_page_for_newcomers_work_word_for_word(tmp_path):
    commands = commands_of(ROOT / "docs" / "deploy.md")
    assert 0 < len(commands) <= 10
    page, said = Federation(tmp_path), ""
    try:
        for command in commands:
            program, *words = shlex.split(command)
            if program == "pip":
                continue
            if program == "python":
                process = page.start("python", *words, program=[sys.executable])
                assert process.wait(240) == 0, page.out("python")
            elif words[:2] == ["federate", "server"]:
                page.start("server", *words)
                page.wait("server", "listening on https://")
            elif words[:2] == ["federate", "client"]:
                page.start(words[3], *words)
            else:
                port = ["--port", str(free_port())] if words[:2] == ["federate", "init"] else []
                said += page.call(*words, *port)
    finally:
        page.close()
    assert "fedrod" in said and "run folder: runs/fedrod-federation-0001" in said and "report: report.html" in said
