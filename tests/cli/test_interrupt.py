"""Ctrl-C at any moment, thirty times in a row, sent to the whole group of processes as a terminal does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plures.cli import main
from plures.runs import checkpoint, signals

ROOT = Path(__file__).parent.parent.parent
# The program, which presses Ctrl-C itself when it begins to import the module that is named first.
PROGRAM = """
import os, signal, sys, threading, time

class Presser:
    def find_spec(self, name, path, target=None):
        if name == moment and not pressed:
            pressed.append(name)
            threading.Thread(target=press, daemon=True).start()

def press():
    for _ in range(30):
        os.killpg(0, signal.SIGINT)
        time.sleep(0.002)

moment, pressed = sys.argv.pop(1), []
from plures.cli.start import main
sys.meta_path.insert(0, Presser())
main()
"""
DIGITS = ["--data", "digits", "--clients", "6", "--rounds", "5000", "--workers", "2", "--eval-every", "1"]


def start(folder: Path, *words: str, moment: str = "") -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with open(folder / "out", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, moment, *words],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests may run in the background
        )


def press(process: subprocess.Popen[bytes]) -> None:
    for _ in range(30):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.002)


def wait_for(is_so, process: subprocess.Popen[bytes], folder: Path) -> None:
    until = time.monotonic() + 240
    while not is_so():
        assert process.poll() is None and time.monotonic() < until, (folder / "out").read_text()
        time.sleep(0.02)


def ended_well(process: subprocess.Popen[bytes], folder: Path) -> str:
    """What it said: one sentence, the exit code 130, no traceback; and no process is left."""
    assert process.wait(120) == 130, (folder / "out").read_text()
    said = (folder / "out").read_text()
    assert "Traceback" not in said and "Error" not in said, said
    sentences = [line for line in said.splitlines() if line.startswith("plures: ")]
    assert len(sentences) == 1 and "interrupted" in sentences[0], said
    until = time.monotonic() + 20
    while others := in_session(process.pid):
        assert time.monotonic() < until, f"processes are left: {others}"
        time.sleep(0.05)
    return sentences[0]


def in_session(number: int) -> list[int]:
    found = subprocess.run(["ps", "-eo", "sid,pid,stat"], capture_output=True, text=True).stdout.splitlines()[1:]
    rows = [line.split() for line in found]
    return [int(pid) for session, pid, state in rows if int(session) == number and not state.startswith("Z")]


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("typer", ["run", "fedavg"]),
        ("torch", ["run", "fedavg", *DIGITS]),
        ("plures.studies.tune", ["tune", "ditto", *DIGITS]),
        ("plures.federate.wire", ["federate", "start", "fedavg"]),
    ],
)
def test_while_it_starts(moment, words, tmp_path):
    if words[0] == "federate":
        pytest.importorskip("flwr", reason="Flower is not installed: pip install 'plures[deploy]'")
    process = start(tmp_path, *words, moment=moment)
    assert ended_well(process, tmp_path) == "plures: interrupted"
    assert not (tmp_path / "runs").exists()


def test_in_a_round_there_is_a_checkpoint_and_the_command_to_resume(tmp_path):
    process = start(tmp_path, "run", "ditto", *DIGITS, "--out", "run")
    rows = tmp_path / "run" / "rounds.csv"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 2, process, tmp_path)
    press(process)
    said = ended_well(process, tmp_path)
    found = checkpoint.read(tmp_path / "run" / "checkpoint")[0]
    assert found is not None and found.manifest["round"] >= 2
    assert said == f"plures: interrupted after round {found.manifest['round']}; resume it with: plures resume run"


def test_before_the_first_round_of_a_run_it_can_be_resumed_too(tmp_path):
    process = start(tmp_path, "run", "ditto", *DIGITS, "--out", "run")
    wait_for((tmp_path / "run" / "split.json").exists, process, tmp_path)
    press(process)
    assert ended_well(process, tmp_path).endswith("resume it with: plures resume run")


@pytest.mark.slow
def test_a_comparison_is_resumed_as_a_whole(tmp_path):
    process = start(tmp_path, "compare", "local", "fedavg", *DIGITS, "--out", "both")
    rows = tmp_path / "both" / "local" / "rounds.csv"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 2, process, tmp_path)
    press(process)
    assert ended_well(process, tmp_path) == "plures: interrupted; resume it with: plures resume both"


@pytest.mark.slow
def test_a_tuning_ends_with_its_helpers_and_is_resumed_as_a_whole(tmp_path):
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'plures[tune]'")
    process = start(tmp_path, "tune", "ditto", *DIGITS, "--out", "tuned")
    wait_for(lambda: len(list((tmp_path / "tuned" / "claims").glob("*"))) > 1, process, tmp_path)
    press(process)
    assert ended_well(process, tmp_path) == "plures: interrupted; resume it with: plures resume tuned"


# How signals are handled


def test_what_comes_in_the_last_round_ends_the_command_after_it():
    own = signals.Interrupts()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        signals.set_handler(own)
        with pytest.raises(KeyboardInterrupt), signals.StopRequest(lambda line: None) as request:
            signal.raise_signal(signal.SIGINT)
            assert request.is_asked
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)  # nothing disturbs how a command ends
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_a_signal_long_after_the_first_ends_a_program_that_does_not_end(monkeypatch):
    codes = []
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    own = signals.Interrupts()
    with pytest.raises(KeyboardInterrupt):
        own(signal.SIGINT, None)
    own(signal.SIGINT, None)
    assert codes == []
    own.began -= 2 * signals.GRACE_SECONDS
    own(signal.SIGINT, None)
    assert codes == [130]


def test_a_command_that_is_interrupted_says_so(monkeypatch, capsys):
    def interrupt(*words):
        raise KeyboardInterrupt

    monkeypatch.setattr(main.listing, "print_list", interrupt)
    assert main.call(["list", "methods"]) == 130
    assert capsys.readouterr().err == "plures: interrupted\n"
