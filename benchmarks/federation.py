"""Seconds a round, and memory, of a federation of real processes on this machine.

    python benchmarks/federation.py [--clients 3,6,12,24] [--rounds 10]

Each number of clients is a federation of its own, with TLS and keys, a tiny model, and FedAvg. Prints for each: median
seconds of a round, MB of a client (its own process and the one that carries its messages; memory that processes share
is counted once), and the seconds of CPU that the server takes for each client and round.
Appends to benchmarks/results/federation.csv. What else runs on the machine is part of the numbers: the load is noted.
"""

import argparse
import csv
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import plures
from plures.data import sources

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "federation.csv"
PLURES = [sys.executable, "-c", "from plures.cli.main import main; main()"]
TICKS = os.sysconf("SC_CLK_TCK")


def children_of(process: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def memory_mb(process: int) -> float:
    """Of a process and its children; what is shared with others is divided among them."""
    total = 0.0
    for one in (process, *children_of(process)):
        text = Path(f"/proc/{one}/smaps_rollup").read_text()
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1000
    return total


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def write_rows(folder: Path, n: int) -> list[str]:
    data, names = sources.load("digits"), [f"client-{k:02d}" for k in range(n)]
    for k, name in enumerate(names):
        rows = (np.arange(60) + 60 * k) % len(data.y)
        np.savez(folder / f"{name}.npz", x=data.x[rows], y=data.y[rows], is_test=np.arange(60) % 3 == 2)
    return names


def wait_for(path: Path, words: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not path.exists() or words not in path.read_text(errors="replace"):
        if time.monotonic() > until:
            raise SystemExit(f"{path} does not say {words!r}: {path.read_text(errors='replace')[-500:]}")
        time.sleep(0.1)


def measure(n: int, rounds: int) -> dict[str, float]:
    folder, processes = Path(tempfile.mkdtemp()), []

    def start(name: str, *words: object) -> subprocess.Popen:
        with open(folder / f"{name}.out", "wb") as output:
            command = [*PLURES, "federate", *map(str, words)]
            processes.append(subprocess.Popen(command, cwd=folder, stdout=output, stderr=output))
        return processes[-1]

    try:
        names = write_rows(folder, n)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        given = [word for name in names for word in ("--client", name)]
        if start("init", "init", "federation", *given, "--port", port).wait() != 0:
            raise SystemExit((folder / "init.out").read_text())
        server = start("server", "server")
        wait_for(folder / "server.out", "listening on", 120)
        clients = [start(name, "client", "--name", name, "--data", f"{name}.npz") for name in names]
        for name in names:
            wait_for(folder / f"{name}.out", "connected to", 600)
        (link,) = children_of(server.pid)
        before = cpu_seconds(link)
        run = start("run", "start", "fedavg", "--clients", n, "--rounds", rounds, "--out", "run", "--eval-every", 0)
        while run.poll() is None:
            memory = statistics.median(memory_mb(client.pid) for client in clients)
            time.sleep(0.5)
        if run.returncode != 0:
            raise SystemExit((folder / "run.out").read_text())
        with open(folder / "run" / "rounds.csv") as file:
            seconds = [float(row["train_seconds"]) for row in csv.DictReader(file)][1:]  # the first one sets up
        taken = (cpu_seconds(link) - before) / (n * rounds)
        return {"seconds_a_round": statistics.median(seconds), "mb_a_client": memory, "server_cpu_seconds": taken}
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="3,6,12,24")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--label", default="", help="what is measured, for the file of results")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(plures.__file__).parent.parent)
    for n in map(int, re.split(r"[, ]+", arguments.clients)):
        load = os.getloadavg()[0]
        found = measure(n, arguments.rounds)
        row = {"label": arguments.label, "plures": plures.__version__, "clients": n, "rounds": arguments.rounds}
        row |= {name: f"{value:.3f}" for name, value in found.items()} | {"load_before": f"{load:.1f}"}
        is_new = not RESULTS.exists()
        with open(RESULTS, "a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
