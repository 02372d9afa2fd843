"""Runs all methods, tuned alike, and writes docs/leaderboard.md and docs/tuned.md from what was recorded.

    python docs/make_leaderboard.py run [DATA ...] [--method METHOD ...] [--data-dir DIR]    data sets and splits
    python docs/make_leaderboard.py check [DATA ...] [--method METHOD ...] [--data-dir DIR]  tuned against default
    python docs/make_leaderboard.py write                                                    the pages

Records are in docs/results/leaderboard and docs/results/tuned, one file for each data set and split; what was
stopped goes on.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

from plures.errors import unknown
from plures.files import in_bytes
from plures.methods import METHODS
from plures.report.printed import draw_ranks
from plures.studies import stats
from plures.studies.campaign import Plan, Stage
from plures.studies.ranks import in_words, make_ranks, write_ranks
from plures.studies.reproduce import value_at

HERE = Path(__file__).parent
RECORDS = HERE / "results" / "leaderboard"
PLAN = Plan(trials=8, tuned_on=[10], scored_on=[0, 1], searched=("lr",))
SHARED = {"clients": 25, "new_clients": 5, "rounds": 20, "new_epochs": 5, "pool_rows": 0}
# About two thousand rows of each, and more of FEMNIST, which has 62 classes.
DATA: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits"},
    "mnist": {"data": "mnist", "share": 0.03, "model": "mlp"},
    "fashion-mnist": {"data": "fashion-mnist", "share": 0.03, "model": "mlp"},
    "cifar10": {"data": "cifar10", "share": 0.03, "model": "mlp"},
    "femnist": {"data": "femnist", "share": 0.2, "model": "mlp"},
}
SPLITS = ("dirichlet:0.1", "labels:2", "iid")
COLUMNS = {
    "personal": "personal.mean",
    "worst 5 %": "personal.worst5",
    "generic": "generic.accuracy",
    "new, at once": "new_clients.before",
    "new, after 5 epochs": "new_clients.after",
}


def stages(names: list[str], data_dir: str | None = None, workers: int = 2) -> dict[tuple[str, str], Stage]:
    """By data set and split."""
    out = {}
    for name in names:
        for split in SPLITS:
            options = SHARED | DATA[name] | {"partition": split, "workers": workers}
            options |= {"data_dir": data_dir} if data_dir and name != "digits" else {}
            place = f"{name}-{split.replace(':', '')}"
            out[name, split] = Stage(place, options, PLAN, RECORDS, lambda line: print(line, flush=True))
    return out


def run(names: list[str], methods: list[str], data_dir: str | None, workers: int) -> None:
    for stage in stages(names, data_dir, workers).values():
        for method in methods:
            spec = stage.tune(method, "personal")
            for seed in PLAN.scored_on:
                stage.score(spec, seed)


def numbers(stage: Stage, method: str) -> dict[str, float] | None:
    """Means over the scored seeds; None if anything is missing. A run that failed counts as 0."""
    spec = stage.known_spec(method, "personal")
    runs = [None if spec is None else stage.known_run(spec, seed) for seed in PLAN.scored_on]
    known = [one for one in runs if one is not None]
    whole = [one for one in known if "failed" not in one]
    if len(known) < len(PLAN.scored_on):
        return None
    if not whole:
        return {"personal": 0.0, "bytes": 0.0, "FLOPs": 0.0}
    out = {}
    for head, path in COLUMNS.items():
        values = [value for one in whole if (value := value_at(one, path)) is not None]
        if len(values) == len(whole):
            out[head] = sum(values) / len(known)
    out["bytes"] = fmean(one["bytes"]["down"] + one["bytes"]["up"] for one in whole)
    return out | {"FLOPs": fmean(one["flops"] for one in whole)}


def table(stage: Stage) -> list[str]:
    """The methods of a data set and split, the best personal accuracy first; the best of each column is bold."""
    rows = {method: found for method in METHODS if (found := numbers(stage, method)) is not None}
    heads = [*COLUMNS, "bytes", "FLOPs"]
    lines = ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    best = {head: max((row[head] for row in rows.values() if head in row), default=None) for head in COLUMNS}
    for method, row in sorted(rows.items(), key=lambda pair: -pair[1]["personal"]):
        cells = []
        for head in COLUMNS:
            text = f"{100 * row[head]:.2f}" if head in row else "-"
            cells.append(f"**{text}**" if head in row and row[head] == best[head] else text)
        cells += [in_bytes(row["bytes"]), f"{row['FLOPs']:.2g}"]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return lines if rows else ["Not run yet."]


def page() -> str:
    found = stages(list(DATA))
    n = sum(numbers(stage, method) is not None for stage in found.values() for method in METHODS)
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in SHARED.items())
    lines = [
        "# Leaderboard",
        "",
        f"All {len(METHODS)} methods on five data sets and three splits, at one small size: `{options}`, the model "
        "mlp, all digits, 3 % of MNIST, Fashion-MNIST and CIFAR-10 (about two thousand rows each), and 20 % of FEMNIST "
        "(3,756 of the 18,796 images that these runs had, of 62 classes; `labels:2` leaves out four fifths of them, "
        "for it gives all clients as many rows). Each method is tuned with "
        f"{PLAN.trials} trials on validation rows of seed {PLAN.tuned_on[0]} (learning rate and its own settings), "
        f"then scored on test rows of seeds {', '.join(map(str, PLAN.scored_on))}. At this size differences of a "
        "point or two mean little.",
        "",
        "Every number was written by `python docs/make_leaderboard.py write` from runs that "
        "`python docs/make_leaderboard.py run --data-dir DIR` recorded in `docs/results/leaderboard`. "
        f"{n} of {len(found) * len(METHODS)} are there.",
        "",
        "Accuracies in per cent, means over the seeds: of clients' own models, of the 5 % of clients that are served "
        "worst, of the one model for all, and of clients that were held out of training, at once and after five epochs "
        "of their own. A run that failed, as one whose loss grew without bound, counts as 0. Bytes and FLOPs are those "
        "of the whole training.",
        "",
        "## Over all",
        "",
        *over_all(found),
        "",
    ]
    for (name, split), stage in found.items():
        lines += [f"## {name}, {split}", "", *table(stage), ""]
    return "\n".join(lines).rstrip() + "\n"


def over_all(found: dict[tuple[str, str], Stage]) -> list[str]:
    """Mean ranks by personal accuracy, over the data sets and splits where all methods have been run."""
    scores = {
        f"{name}, {split}": {m: row["personal"] for m in METHODS if (row := numbers(stage, m)) is not None}
        for (name, split), stage in found.items()
    }
    scores = {block: row for block, row in scores.items() if len(row) == len(METHODS)}
    ranks = make_ranks(scores)
    if ranks is None:
        return ["Not enough has been run for ranks."]
    write_ranks(ranks, RECORDS)
    draw_ranks(ranks).savefig(HERE / "leaderboard.png", dpi=110, bbox_inches="tight")
    lines = ["| method | mean rank |", "|---|---|"]
    lines += [f"| `{method}` | {rank:.2f} |" for method, rank in zip(ranks.methods, ranks.mean, strict=True)]
    said = "; ".join(in_words(ranks))
    return [
        f"Mean ranks by personal accuracy over {', '.join(scores)}.",
        "",
        *lines,
        "",
        f"{said[0].upper()}{said[1:]}.",
        "",
        "![Mean ranks of all methods with the critical difference](leaderboard.png)",
    ]


# Tuned against default

CHECKS = HERE / "results" / "tuned"
CHECK = Plan(trials=20, tuned_on=[0, 1], scored_on=[2, 3, 4], searched=("lr", "epochs"))
MORE = list(range(5, 15))  # seeds for methods that are below their default in the mean of those
CHECKED: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits", "pool_rows": 0},
    "fashion-mnist": {"data": "fashion-mnist", "share": 0.1, "model": "mlp", "pool_rows": 0},
}


def stage_of(name: str, data_dir: str | None = None, workers: int = 2) -> Stage:
    options = CHECKED[name] | {"workers": workers} | ({"data_dir": data_dir} if data_dir and name != "digits" else {})
    return Stage(name, options, CHECK, CHECKS, lambda line: print(line, flush=True))


def check(names: list[str], methods: list[str], data_dir: str | None, workers: int) -> None:
    for name in names:
        stage = stage_of(name, data_dir, workers)
        for method in methods:
            spec = stage.tune(method, "personal")
            for seeds in (CHECK.scored_on, MORE):
                for seed in seeds:
                    stage.score(method, seed)
                    stage.score(spec, seed)
                gain = gain_of(stage, method, spec, seeds)
                if gain is None or gain.mean >= 0:
                    break


def gain_of(stage: Stage, method: str, spec: str, seeds: list[int]) -> stats.Spread | None:
    """Of what was found over the default, in points; None if any seed is missing."""
    first, second = scores(stage, method, seeds), scores(stage, spec, seeds)
    if first is None or second is None:
        return None
    return stats.spread([b - a for a, b in zip(first, second, strict=True)])


def scores(stage: Stage, spec: str, seeds: list[int]) -> list[float] | None:
    """Personal accuracies of these seeds, per cent; None if any is missing. A run that failed counts as 0."""
    found = [stage.known_run(spec, seed) for seed in seeds]
    if None in found:
        return None
    return [100 * one["personal"]["mean"] if one and "failed" not in one else 0.0 for one in found]


HEADER = ["| method | default | tuned | difference | tuned to | |", "|---|---|---|---|---|---|"]


def check_line(stage: Stage, method: str, spec: str, seeds: list[int]) -> tuple[str, str] | None:
    """The verdict on a method, and its line in the table; None if any seed is missing."""
    gain = gain_of(stage, method, spec, seeds)
    if gain is None:
        return None
    low, high = gain.mean - gain.half_width, gain.mean + gain.half_width
    verdict = "better" if low > 0 else "worse" if high < 0 else "as good"
    means = " | ".join(f"{fmean(scores(stage, each, seeds) or []):.2f}" for each in (method, spec))
    return verdict, f"| `{method}` | {means} | {gain.mean:+.2f} [{low:+.2f}, {high:+.2f}] | `{spec}` | {verdict} |"


def check_page() -> str:
    lines = [
        "# Tuned against default",
        "",
        f"Every method is tuned with {CHECK.trials} trials (`plures tune`: learning rate, epochs, its own settings) on "
        f"validation rows of seeds {', '.join(map(str, CHECK.tuned_on))}, then run on test rows of seeds "
        f"{', '.join(map(str, CHECK.scored_on))} with what was found and with its defaults. 20 rounds, 20 clients, "
        "Dirichlet(0.1). Personal accuracy in per cent, mean over the seeds; the difference with its 95 % interval "
        "(Student's t). *Worse* is a method whose whole interval is below zero.",
        "",
        "Every number was written by `python docs/make_leaderboard.py write` from runs that "
        "`python docs/make_leaderboard.py check --data-dir DIR` recorded in `docs/results/tuned`.",
        "",
    ]
    for name in CHECKED:
        stage = stage_of(name)
        lines += [
            f"## {name}",
            "",
            *HEADER,
        ]
        counts = {"better": 0, "as good": 0, "worse": 0}
        below, again = [], []
        for method in METHODS:
            spec = stage.known_spec(method, "personal")
            line = None if spec is None else check_line(stage, method, spec, CHECK.scored_on)
            if spec is None or line is None:
                continue
            verdict, text = line
            lines.append(text)
            counts[verdict] += 1
            gain = gain_of(stage, method, spec, CHECK.scored_on)
            if gain is not None and gain.mean < 0:
                below.append(f"`{method}`")
                more = check_line(stage, method, spec, MORE)
                again += [] if more is None else [more[1]]
        n = sum(counts.values())
        told = ", ".join(f"{count} {word}" for word, count in counts.items())
        lines += [
            "",
            f"{n} of {len(METHODS)} methods have been run: {told}. Below their default in the mean: "
            f"{', '.join(below) or 'none'}.",
            "",
        ]
        if again:
            lines += [f"Those below, on {len(MORE)} other seeds, {MORE[0]} to {MORE[-1]}:", "", *HEADER, *again, ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "check", "write"])
    parser.add_argument("data", nargs="*", metavar="DATA")
    parser.add_argument("--method", action="append")
    parser.add_argument("--data-dir")
    parser.add_argument("--workers", type=int, default=2, help="of each run; they change no number")
    given = parser.parse_args()
    known = list(CHECKED if given.what == "check" else DATA)
    for name in given.data:
        if name not in known:
            raise unknown("data set", name, known)
    if given.what != "write":
        play = run if given.what == "run" else check
        play(given.data or known, given.method or list(METHODS), given.data_dir, given.workers)
    (HERE / "leaderboard.md").write_text(page(), "utf-8")
    (HERE / "tuned.md").write_text(check_page(), "utf-8")


if __name__ == "__main__":
    main()
