"""Writes the tables and figures of docs/performance.md from what the benchmarks left in benchmarks/results.

python docs/make_performance.py
"""

import csv
import re
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"


def read(name: str) -> tuple[list[str], list[dict[str, str]]]:
    """The comment lines of a results file (command and machine), and its rows."""
    lines = (RESULTS / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    notes = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    return notes, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def table(head: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *["| " + " | ".join(row) + " |" for row in body]]


def said(notes: list[str]) -> list[str]:
    return [f"`{notes[0]}`" + "".join(f"; {note}" for note in notes[1:]) + ".", ""]


def speed() -> list[str]:
    notes, rows = read("speed")
    rows = [row for row in rows if not row["case"].endswith("written")]
    body = [
        [row["case"], row["method"], row["side"], row["steps"], row["median_ms"], row["ours_is_faster_by"] + "x"]
        for row in rows
    ]
    return said(notes) + table(["case", "method", "who", "steps per round", "median ms", "plures is faster by"], body)


def written() -> list[str]:
    _, rows = read("speed")
    rows = [row for row in rows if row["case"].endswith("written")]
    share = [[row["method"], row["side"], row["median_ms"], f"{float(row['ours_is_faster_by']):.2%}"] for row in rows]
    return table(["method", "what", "median ms per round", "share"], share)


def roofline() -> list[str]:
    notes, rows = read("roofline")
    keys = ["case", "gflop_a_round", "ms_a_round", "gflops", "matmul_gflops"]
    body = [[row[key] for key in keys] + [f"{float(row['share']):.0%}"] for row in rows]
    return said(notes) + table(["case", "GFLOP per round", "ms per round", "GFLOP/s", "matrix products", "share"], body)


def kernels() -> list[str]:
    notes, rows = read("kernels")
    body = [[row["case"], f"`{row['kernel']}`", f"{float(row['share']):.0%}"] for row in rows]
    return said(notes) + table(["case", "kernel", "share of the time"], body)


def scale() -> list[str]:
    notes, rows = read("scale")
    keys = ["method", "population", "cohort", "hidden", "steps", "start_s", "median_ms", "state_mb", "anonymous_mb"]
    head = [key.replace("_", " ") for key in keys]
    return said(notes) + table(head, [[row[key] for key in keys] for row in rows])


def passes() -> list[str]:
    """Pass by case: how many times as long a round takes without the pass."""
    if not (RESULTS / "passes.csv").exists():
        return ["Not measured yet: `python benchmarks/passes.py` measures it."]
    notes, rows = read("passes")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    gains = {(row["engine"], row["case"]): f"{float(row['gain']):.2f}" for row in rows}
    engines = [engine for engine in dict.fromkeys(row["engine"] for row in rows) if engine != "traced"]
    body = [[pass_of(engine), *[gains[engine, case] for case in cases]] for engine in engines]
    return said(notes) + table(["without", *cases], body)


def models() -> list[str]:
    """Model by model: both sides, what was chosen, and the kernels that most of our time goes to."""
    if not (RESULTS / "models.csv").exists():
        return ["Not measured yet: `python benchmarks/models.py` measures it."]
    notes, rows = read("models")
    body = []
    for row in rows:
        stack = f", {row['stack']} at a time" if row["stack"] else ""
        numbers = [row["clients"], row["steps"], row["loop_ms"], row["ours_ms"], row["faster_by"] + "x"]
        body.append([row["model"], *numbers, row["executor"].replace("_", " ") + stack, row["goes_to"]])
    factors = [float(row["faster_by"]) for row in rows]
    found = f"Median {statistics.median(factors):.2f}x, lowest {min(factors):.2f}x."
    heads = ["model", "clients", "steps per round", "loop, ms", "plures, ms", "faster by", "clients run", "mostly in"]
    return said(notes) + table(heads, body) + ["", found]


def federation() -> list[str]:
    """Federations of growing size: seconds, memory and processor time."""
    if not (RESULTS / "federation.csv").exists():
        return ["Not measured yet: `python benchmarks/federation.py --against CHECKOUT` measures it."]
    notes, rows = read("federation")
    heads = {
        "label": "",
        "clients": "clients",
        "seconds_a_round": "seconds per round",
        "rss_mb_a_client": "MB per client, RSS",
        "pss_mb_a_client": "MB per client, PSS",
        "server_cpu_s": "processor seconds, server",
        "client_cpu_s": "client",
        "start_cpu_s": "start",
    }
    digits = {"label": None, "clients": None, "rss_mb_a_client": 0, "pss_mb_a_client": 0}
    body = [[_rounded(row[key], digits.get(key, 2)) for key in heads] for row in rows]
    return said(notes) + table(list(heads.values()), body)


def client_memory() -> list[str]:
    """What the memory of a federated client goes to."""
    notes, rows = read("client_memory")
    body = [[row["after"], _rounded(row["rss_mb"], 0), _rounded(row["own_mb"], 0)] for row in rows]
    return said(notes) + table(["a process that has imported", "MB, RSS", "of these its own"], body)


def _rounded(text: str, digits: int | None) -> str:
    return text if digits is None else f"{float(text):.{digits}f}"


def pass_of(engine: str) -> str:
    """What is off in an engine: `traced:winograd=off` is without winograd, and `eager` without all passes."""
    return "all of them (eager)" if engine == "eager" else f"`{engine.partition(':')[2].removesuffix('=off')}`"


def draw() -> None:
    """The round of a growing population, and the shares of the machine's arithmetic."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    _, rows = read("scale")
    for method, marker in (("ditto", "o"), ("fedala", "s")):
        own = [row for row in rows if row["method"] == method and row["cohort"] == "100" and row["steps"] == "10"]
        own = [row for row in own if row["hidden"] == "64"]
        left.plot(
            [int(row["population"]) for row in own],
            [float(row["median_ms"]) for row in own],
            marker=marker,
            label=method,
        )
    left.set(xscale="log", xlabel="clients, 100 of them in a round", ylabel="ms per round", ylim=(0, None))
    left.legend(frameon=False)
    _, rows = read("roofline")
    right.barh([row["case"] for row in rows][::-1], [100 * float(row["share"]) for row in rows][::-1], color="#4477aa")
    right.set(xlabel="% of the rate of matrix products")
    figure.savefig(HERE / "performance.png", dpi=110)


PARTS = (speed, models, written, roofline, kernels, scale, passes, federation, client_memory)  # of the page


def main() -> None:
    path = HERE / "performance.md"
    text = path.read_text(encoding="utf-8")
    for part in PARTS:
        name = part.__name__
        new = f"<!-- {name} -->\n" + "\n".join(part()) + f"\n<!-- end of {name} -->"
        text, n = re.subn(f"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, new=new: new, text, flags=re.DOTALL)
        assert n == 1, name
    path.write_text(text, encoding="utf-8")
    draw()


if __name__ == "__main__":
    main()
