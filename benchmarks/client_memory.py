"""What the memory of a federated client goes to: a process that imports one part after another.

    python benchmarks/client_memory.py

After each part, the memory of the process: RSS, and of it what is the process's own (the rest are files, which all
processes of a machine share). Every number is the median of five processes. Writes
benchmarks/results/client_memory.csv. What a client takes beyond the last line are its rows, model and connection.
"""

import json
import statistics
import subprocess
import sys

import record

PARTS = {
    "Python": "sys",
    "torch": "torch",
    "a client of Plures": "plures.federate.client",
    "its connection: what it imports of Flower, TLS and keys": "plures.federate.node",
}
LOOK = """
import importlib, json, sys
found = []
for name in sys.argv[1:]:
    importlib.import_module(name)
    lines = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    found.append([int(lines["Rss:"]) / 1000, int(lines["Anonymous:"]) / 1000])
print(json.dumps(found))
"""


def main() -> None:
    conditions = record.conditions()
    command = [sys.executable, "-c", LOOK, *PARTS.values()]
    seen = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(5)]
    rows = []
    for k, part in enumerate(PARTS):
        rss, own = (statistics.median(one[k][i] for one in seen) for i in range(2))
        rows.append({"after": part, "rss_mb": f"{rss:.1f}", "own_mb": f"{own:.1f}"})
        print(rows[-1])
    record.write("client_memory", "client_memory.py", conditions, rows)


if __name__ == "__main__":
    main()
