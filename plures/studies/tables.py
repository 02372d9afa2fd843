"""Tables of a comparison: a line for each method over its seeds, every pair of methods, and LaTeX."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plures.files import write_text
from plures.learn.metrics import ACCURACY, Metric
from plures.runs.results import generic_of, metric_of, write_csv
from plures.studies import stats
from plures.studies.compare import Runs, values_of

METRICS = {
    "personal": lambda s: s["personal"] and s["personal"]["mean"],
    "worst 5 %": lambda s: s["personal"] and s["personal"]["worst5"],
    "pooled": lambda s: s["personal"] and s["personal"]["pooled"],
    "generic": generic_of,
}


class Line(NamedTuple):
    """A method over its seeds."""

    method: str
    spreads: dict[str, stats.Spread]  # of each metric
    harmed: list[int]  # clients, for each seed where it is known
    n_bytes: float  # means over the seeds
    flops: float
    seconds: float
    p: float | None  # that it is no different from the first method, client by client
    p_holm: float | None = None  # the same, corrected for the number of methods
    never_trained: int = 0  # scored clients that never took part, at most in any seed
    metric: Metric = ACCURACY


def lines(runs: Runs) -> list[Line]:
    """One for each method."""
    out = []
    for method in runs.methods():
        own = [result.summary for result in runs.of(method)]
        spreads = {}
        for name, value in METRICS.items():
            found = [value(summary) for summary in own]
            spreads[name] = stats.spread([x for x in found if x is not None and not math.isnan(x)])
        out.append(
            Line(
                method,
                spreads,
                [summary["harmed"] for summary in own if summary["harmed"] is not None],
                float(np.mean([summary["bytes"]["down"] + summary["bytes"]["up"] for summary in own])),
                float(np.mean([summary["flops"] for summary in own])),
                float(np.mean([summary["seconds"]["total"] for summary in own])),
                None if method == runs.methods()[0] else p_value(runs, method, runs.methods()[0]),
                never_trained=max((summary["personal"] or {}).get("never_trained", 0) for summary in own),
                metric=metric_of(own[0]),
            )
        )
    corrected = iter(stats.holm([line.p for line in out if line.p is not None]))
    return [line if line.p is None else line._replace(p_holm=next(corrected)) for line in out]


def differences(runs: Runs, method: str, other: str) -> list[float]:
    """What each client gains by one method over another, in the mean over the seeds.

    Seeds are not counted as further clients: runs of one client with several seeds are no independent findings.
    """
    found: dict[int, list[float]] = {}
    for (name, seed), result in runs.items():
        if name == method and (other, seed) in runs:
            own, theirs, sign = values_of(result), values_of(runs[other, seed]), metric_of(result.summary).sign
            for client in own:
                if client in theirs:
                    found.setdefault(client, []).append(sign * (own[client] - theirs[client]))
    return [float(np.mean(each)) for each in found.values()]


def p_value(runs: Runs, method: str, other: str) -> float:
    return stats.paired_test(differences(runs, method, other))


BASELINES = ("local", "fedavg")  # what a personal method has to be better than: training alone, and one for all


def better_than_both(runs: Runs) -> list[str]:
    """Methods whose clients gain over Local and over FedAvg, each with p < 0.05 after Holm's correction for all."""
    others = [method for method in runs.methods() if method not in BASELINES]
    if not set(BASELINES) <= set(runs.methods()) or not others:
        return []
    gains = {(method, base): differences(runs, method, base) for method in others for base in BASELINES}
    corrected = dict(zip(gains, stats.holm([stats.paired_test(each) for each in gains.values()]), strict=True))
    return [
        method
        for method in others
        if all(corrected[method, base] < 0.05 and np.mean(gains[method, base]) > 0 for base in BASELINES)
    ]


def footnotes(found: list[Line]) -> list[str]:
    """What a reader of the table must know."""
    n_new = max((line.never_trained for line in found), default=0)
    drawn = f"{n_new} client{'s' if n_new > 1 else ''} never took part and {'are' if n_new > 1 else 'is'} scored as new"
    return [drawn] if n_new else []


def write_tables(runs: Runs, folder: Path) -> None:
    """table.csv, a line for each method; pairs.csv, every two methods compared client by client; table.tex."""
    found = lines(runs)
    table = []
    for line in found:
        row: dict = {"method": line.method, "seeds": max(s.n for s in line.spreads.values())}
        for name, spread in line.spreads.items():
            key = name.replace(" ", "").replace("%", "")
            row |= {key: spread.mean, f"{key}_std": spread.std, f"{key}_ci95": spread.half_width}
        row |= {"harmed": float(np.mean(line.harmed)) if line.harmed else None, "bytes": line.n_bytes}
        row |= {"flops": line.flops, "seconds": line.seconds, "p_against_first": line.p}
        row |= {"p_against_first_holm": line.p_holm, "never_trained": line.never_trained}
        table.append(row)
    write_csv(folder / "table.csv", table)
    pairs: list[dict[str, Any]] = []
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            gains = differences(runs, a.method, b.method)
            mean = float(np.mean(gains)) if gains else math.nan
            p = stats.paired_test(gains)
            pairs.append({"method": a.method, "other": b.method, "clients": len(gains), "mean_gain": mean, "p": p})
    for pair, p in zip(pairs, stats.holm([pair["p"] for pair in pairs]), strict=True):
        pair["p_holm"] = p
    if pairs:
        write_csv(folder / "pairs.csv", pairs)
    write_text(folder / "table.tex", latex(found))


def latex(found: list[Line]) -> str:
    """A tabular that needs no package; the best mean of each column is bold."""
    names = list(METRICS)
    best = {}
    for name in names:
        means = [line.spreads[name].mean for line in found if line.spreads[name].n]
        pick = max if found[0].metric.is_higher_better else min
        best[name] = pick(means) if means else math.nan
    head = " & ".join(["method", *[name.replace("%", r"\%") for name in names], "harmed", "MB"])
    out = [r"\begin{tabular}{l" + "r" * (len(names) + 2) + "}", r"\hline", head + r" \\", r"\hline"]
    for line in found:
        cells = [tex(line.method)]
        for name in names:
            text = text_of(line.spreads[name], line.metric, r" $\pm$ ")
            cells.append(rf"\textbf{{{text}}}" if line.spreads[name].mean == best[name] else text)
        cells.append(f"{np.mean(line.harmed):.1f}" if line.harmed else "--")
        cells.append(f"{line.n_bytes / 1e6:.1f}")
        out.append(" & ".join(cells) + r" \\")
    notes = [f"% {tex(note)}" for note in footnotes(found)]
    return "\n".join([*out, r"\hline", r"\end{tabular}", *notes]) + "\n"


def tex(text: str) -> str:
    """Text as LaTeX takes it."""
    for character in "&%$#_{}":
        text = text.replace(character, "\\" + character)
    return text


def text_of(spread: stats.Spread, metric: Metric, between: str = " ± ") -> str:
    """Mean and standard deviation, as the metric is shown."""
    if not spread.n:
        return "--"
    form = ".2f" if metric.is_share else ".4g"
    text = format(metric.shown(spread.mean), form)
    return text if spread.n == 1 else f"{text}{between}{format(metric.shown(spread.std), form)}"
