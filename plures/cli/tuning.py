"""What `plures tune` and `plures claims` do."""

import json
from pathlib import Path
from typing import Any, cast, get_args

from rich import box
from rich.table import Table

from plures.cli.commands import make_console, tell
from plures.cli.options import n_cores, whole_numbers
from plures.errors import UsageError, unknown
from plures.registry import doubting
from plures.report.tuning import flops_of, n_failed, seconds_of, unspent, write_tuning_page
from plures.runs.config import make_config
from plures.runs.folders import new_folder, telling_how_to_resume
from plures.runs.timing import duration
from plures.studies.claims import Court, Finding, choose, load_claims, row
from plures.studies.space import COMMON, read_space
from plures.studies.tune import (
    Budget,
    Objective,
    Tuning,
    check_tuning,
    given_as_object,
    import_optuna,
    is_tuning,
    read_tuning,
    tune_methods,
    write_tuning,
)
from plures.studies.tuned import Tuned, read_tuned, row_of, write_tuned


def tune(
    methods: list[str],
    values: dict[str, Any],
    seeds: str | None,
    trials: int,
    budget: str,
    objective: str,
    search: str | None,
    space: Path | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
) -> None:
    import_optuna()
    for word, option, known in (
        (budget, "--budget", get_args(Budget)),
        (objective, "--objective", get_args(Objective)),
    ):
        if word not in known:
            raise unknown(f"value of {option}", word, known)
    config = make_config(values)
    wanted = Tuning(
        methods,
        config,
        [config.seed] if seeds is None else whole_numbers("--seeds", seeds),
        trials,
        cast(Budget, budget),
        cast(Objective, objective),
        COMMON if search is None else tuple(word for word in search.split(",") if word),
        read_space(space),
    )
    spaces = check_tuning(wanted)
    console = make_console(to_stderr=as_json)
    if dry_run:
        for method, one in spaces.items():
            tell(console, f"{method}: {', '.join(f'{name} {_range(d)}' for name, d in one.searched.items())}")
        tell(console, f"{trials} trials each, compared after {', '.join(map(str, wanted.rungs))} rounds")
        return
    if out is not None and is_tuning(out):
        folder = out
    else:
        folder = new_folder(config.model_copy(update={"method": "tune"}), out)
    with telling_how_to_resume(folder, "tuning.toml"):
        write_tuning(folder, wanted)
        play_tuning(wanted, folder, as_json, quiet)


def _range(one: Any) -> str:
    search, default = one
    if search.values:
        return f"{', '.join(map(str, search.values))} (now {default})"
    return f"{search.low:g} to {search.high:g}{' by factors' if search.is_log else ''} (now {default})"


def play_tuning(wanted: Tuning, folder: Path, as_json: bool, quiet: bool) -> None:
    """Run or resume a tuning, and write its tables and report."""
    console = make_console(to_stderr=as_json)
    tune_methods(wanted, folder, lambda line: None if quiet else tell(console, line))
    _, found = read_tuned(folder)
    write_tuned(folder, found)
    page = write_tuning_page(wanted, found, folder / "report.html")
    if as_json:
        print(json.dumps([row_of(one) | {"importance": one.importance} for one in found], indent=2))
    else:
        console.print(_table(wanted, found))
        for one in found:
            shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in one.importance.items())
            mattered = f"; what mattered: {shares}" if shares else ""
            tell(console, f"used: {one.spec}{' (the default)' if one.is_kept else ''}{mattered}")
    tell(console, f"trials: {folder / 'trials.csv'}")
    tell(console, f"report: {page}")
    free = max(wanted.seeds) + 1
    tell(console, f"compare them with: plures compare --tuned {folder} --seeds {free},{free + 1},{free + 2}")


def _table(wanted: Tuning, found: list[Tuned]) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    heads = ["method", "default", "best", "gain", "trials", "to the end", "failed", "FLOPs", "seconds", "unspent"]
    for head in heads:
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for one in found:
        table.add_row(
            one.method,
            one.text(one.default.scores[one.rounds]),
            one.text(one.best.scores[one.rounds]),
            f"{one.points(one.gain)} ± {one.points(one.error)[1:]}",
            str(len(one.trials)),
            str(len(one.whole)),
            str(n_failed(one)),
            f"{flops_of(one):.1e}",
            f"{seconds_of(one):.1f}",
            unspent(one, wanted.budget),
        )
    table.caption = (
        f"{found[0].metric.word} on validation rows; gain: how much better it is; ±: standard error of the clients' "
        "differences; the best is used if it is above "
        f"the default by more than that; unspent: of the budget, {wanted.budget}"
    )
    return table


def resume_tuning(folder: Path, workers: int | None, trust: bool, as_json: bool, quiet: bool) -> None:
    """Go on with a tuning that was stopped."""
    wanted = read_tuning(folder)
    if given_as_object(wanted.config):
        raise UsageError(f"{folder} was given data or a model as an object, from Python: call plures.tune again")
    alone = wanted.config.device != "cpu"  # a device is used by one process
    config = wanted.config.model_copy(update={"workers": 1 if alone else workers or n_cores()})
    with doubting(folder, trust), telling_how_to_resume(folder, "tuning.toml"):
        play_tuning(wanted._replace(config=config), folder, as_json, quiet)


def claims(
    words: list[str],
    data_dir: str | None,
    workers: int | None,
    out: Path,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
) -> None:
    import_optuna()
    console = make_console(to_stderr=as_json)
    n = workers or n_cores()
    shared: dict[str, Any] = {"workers": n} | ({"data_dir": data_dir} if data_dir else {})
    book = load_claims()
    court = Court(book, out, shared, lambda line: None if quiet else tell(console, line))
    chosen = choose(book, words)
    if dry_run:
        _tell_missing(court, list(chosen.values()), n)
        return
    found: dict[str, Finding] = {}
    tried: dict[str, list[Finding]] = {}
    for name, claim in chosen.items():
        found[name] = court.test(claim)
        if found[name].verdict != "holds":
            tried[name] = court.explain(claim)
    if as_json:
        whole = {}
        for name, claim in chosen.items():
            changed = zip(claim.explain, tried.get(name, []), strict=False)
            whole[name] = _plain(found[name]) | {"with_one_change": {how.change: _plain(one) for how, one in changed}}
        print(json.dumps(whole, indent=2))
        return
    table = Table(box=box.SIMPLE, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("claim", "ours, %", "difference [95 %]", "verdict"):
        table.add_column(head, no_wrap=head != "claim")
    for name, claim in chosen.items():
        table.add_row(*row(name, claim, found[name]))
        for how, one in zip(claim.explain, tried.get(name, []), strict=False):  # it stops with one that holds
            table.add_row(f"  with {how.change}", *row(name, claim, one)[1:])
    console.print(table)
    tell(console, f"records: {out}")


def _plain(found: Finding) -> dict[str, Any]:
    return found._asdict() | {"difference": found.difference._asdict()}


def _tell_missing(court: Court, claims: list[Any], workers: int) -> None:
    """What is to be run still, and for how long."""
    console, total = make_console(to_stderr=False), 0.0
    for (scene, method, objective), n in court.missing(claims).items():
        seconds = n * court.stages[scene].seconds(method)
        total += seconds
        tell(console, f"{scene}: {method} by {objective}: about {n:.0f} whole runs, {duration(seconds)} on one core")
    tell(console, f"in all about {duration(total)} on one core, {duration(total / workers)} on {workers}")
