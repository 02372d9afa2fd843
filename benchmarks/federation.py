"""Seconds per round, memory and processor time of a federation of real processes on this machine.

    python benchmarks/federation.py [--clients 3,6,12,24,50] [--rounds 6] [--against CHECKOUT [--before 3,6,12,24]]

Each number of clients is a federation of its own, with TLS and keys, a tiny model, and FedAvg. For each: the median
seconds of a round; the memory of a client with its children, as RSS, which counts what processes share in each of
them, and as PSS, which divides it among them; and the seconds of the processor per client and round, of the server, of
the clients, and of `start`. With --against, another version of Plures is measured first, and labelled "before"; with
--before only with these numbers of clients, if it needs too much memory for more. It writes
benchmarks/results/federation.csv; on two cores with nothing else to do it takes about ten minutes.
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
import record

from plures.data import sources

ROOT = Path(__file__).parent.parent
PLURES = [sys.executable, "-c", "from plures.cli.main import main; main()"]
TICKS = os.sysconf("SC_CLK_TCK")


def family_of(process: int) -> list[int]:
    """A process and its children."""
    found = [process]
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def memory_mb(process: int, kind: str) -> float:
    """Of a process and its children: Rss or Pss."""
    total = 0.0
    for one in family_of(process):
        text = Path(f"/proc/{one}/smaps_rollup").read_text()
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{kind}:")) / 1000
    return total


def cpu_seconds(process: int) -> float:
    """Of a process and its children, so far."""
    total = 0
    for one in family_of(process):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


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


def rounds_in(folder: Path) -> list[dict[str, str]]:
    path = folder / "rounds.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def measure(checkout: Path, n: int, rounds: int) -> dict[str, float]:
    folder, processes = Path(tempfile.mkdtemp()), []
    environment = os.environ | {"PYTHONPATH": str(checkout)}

    def start(name: str, *words: object) -> subprocess.Popen:
        with open(folder / f"{name}.out", "wb") as output:
            command = [*PLURES, "federate", *map(str, words)]
            processes.append(subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment))
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
        wait_for(folder / "server.out", "listening on", 300)
        clients = [start(name, "client", "--name", name, "--data", f"{name}.npz") for name in names]
        for name in names:
            wait_for(folder / f"{name}.out", "connected to", 1800)
        words = ["--clients", n, "--rounds", rounds + 1, "--out", "run", "--eval-every", 0, "--wait", 600]
        run = start("run", "start", "fedavg", *words)
        # The first round sets up: all is counted from its end.
        while run.poll() is None and not rounds_in(folder / "run"):
            time.sleep(0.05)
        begin = [cpu_seconds(server.pid), sum(cpu_seconds(one.pid) for one in clients), cpu_seconds(run.pid)]
        end, memory = begin, {}
        while run.poll() is None and len(rounds_in(folder / "run")) <= rounds:
            end = [cpu_seconds(server.pid), sum(cpu_seconds(one.pid) for one in clients), cpu_seconds(run.pid)]
            n_done = len(rounds_in(folder / "run")) - 1
            if not memory and n_done:
                for kind in ("Rss", "Pss"):
                    memory[kind] = statistics.median(memory_mb(one.pid, kind) for one in clients)
            time.sleep(0.2)
        if run.wait() != 0:
            raise SystemExit((folder / "run.out").read_text())
        seconds = [float(row["train_seconds"]) for row in rounds_in(folder / "run")][1:]
        cpu = [(after - before) / (n * max(1, n_done)) for before, after in zip(begin, end, strict=True)]
        return {
            "seconds_a_round": statistics.median(seconds),
            "rss_mb_a_client": memory["Rss"],
            "pss_mb_a_client": memory["Pss"],
            "server_cpu_s": cpu[0],
            "client_cpu_s": cpu[1],
            "start_cpu_s": cpu[2],
        }
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="3,6,12,24,50")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--against", type=Path, help="another version of Plures, which is measured first")
    parser.add_argument("--before", help="numbers of clients that the other version is measured with; if left out, all")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its processes end with it
    conditions, rows = record.conditions(), []
    sides = {"before": arguments.against.resolve()} if arguments.against else {}
    for label, checkout in (sides | {"after": ROOT}).items():
        numbers = arguments.before or arguments.clients if label == "before" else arguments.clients
        for n in map(int, re.split(r"[, ]+", numbers)):
            found = measure(checkout, n, arguments.rounds)
            rows.append({"label": label, "clients": n} | {name: f"{value:.3f}" for name, value in found.items()})
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
            against = " --against CHECKOUT" if arguments.against else ""
            against += f" --before {arguments.before}" if arguments.before else ""
            command = f"federation.py --clients {arguments.clients} --rounds {arguments.rounds}{against}"
            record.write("federation", command, conditions, rows)  # what is there stays, if it is stopped


if __name__ == "__main__":
    main()
