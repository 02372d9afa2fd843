"""What the commands do: a thin layer over the other rooms."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from safetensors.torch import save

from plures import report as report_room
from plures._version import __version__
from plures.cli import doctor as doctor_room
from plures.cli import view
from plures.cli.listing import about_method
from plures.cli.options import n_cores, whole_numbers
from plures.errors import RunFailed, UsageError, unknown
from plures.federate.server import Caps, RoundLimits
from plures.files import write_text
from plures.models.names import folder_of
from plures.registry import doubting
from plures.runs import simulation, timing
from plures.runs.adapt import from_counts, from_rows
from plures.runs.callbacks import Callback, Say
from plures.runs.config import Config, config_toml, make_config
from plures.runs.describing import describe
from plures.runs.folders import folder_name, new_folder, telling_how_to_resume
from plures.runs.loggers import makers, with_loggers
from plures.runs.loop import Result
from plures.runs.peft import write_adapter
from plures.runs.predict import as_file, client_number, format_of
from plures.runs.scene import make_scene, schema_of
from plures.runs.simulation import open_simulation
from plures.runs.verify import run_folders
from plures.runs.verify import verify as verify_run
from plures.studies import preset as presets
from plures.studies import ranks, tables
from plures.studies import reproduce as reproduction
from plures.studies.compare import (
    COMPARISON,
    Comparison,
    Equal,
    Runs,
    check_comparison,
    compare_methods,
    is_comparison,
    on_each,
    read_comparison,
    write_comparison,
)
from plures.studies.tune import read_tuning, refuse_same_seeds
from plures.studies.tuned import tuned_specs
from plures.tree import Params


def make_console(to_stderr: bool) -> Console:
    """A console; where there is no terminal, one with room for the tables."""
    console = Console(stderr=to_stderr)
    return console if console.is_terminal else Console(stderr=to_stderr, width=130)


def tell(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_result(result: Result, console: Console, as_json: bool) -> None:
    """The end of a run: its summary as JSON, or a table."""
    if as_json:
        print(json.dumps(result.summary, indent=2))
        return
    console.print(view.result_table({result.summary["method"]: result}))
    if line := view.new_clients_line(result.summary):
        tell(console, line)
    if result.folder is not None:
        tell(console, f"run folder: {result.folder}")


def run(
    values: dict[str, Any], out: Path | None, log: list[str] | None, as_json: bool, quiet: bool, dry_run: bool
) -> None:
    console = make_console(to_stderr=as_json)
    loggers = makers(log)
    scene = make_scene(make_config(values))
    if dry_run:
        tell(console, config_toml(scene.config))
        for line in (*scene.notes, timing.in_words(timing.try_out(scene), scene.config)):
            tell(console, line)
        return
    folder = new_folder(scene.config, out)
    progress = view.ProgressReport(console, scene.config.method, folder / "log.txt", quiet)
    callback = with_loggers(progress, loggers, folder.name)
    with telling_how_to_resume(folder):
        print_result(simulation.start(scene, folder, progress.say, callback), console, as_json)


def compare(
    methods: list[str],
    values: dict[str, Any],
    tuned: Path | None,
    seeds: str | None,
    equal: str,
    latex: bool,
    out: Path | None,
    log: list[str] | None,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
) -> None:
    console = make_console(to_stderr=as_json)
    loggers = makers(log)
    if tuned is not None:
        values = read_tuning(tuned).options() | values
        methods = tuned_specs(tuned, methods)
    if not methods:
        raise UsageError("name two or more methods to compare")
    config = make_config(values)
    wanted = [config.seed] if seeds is None else whole_numbers("--seeds", seeds)
    if tuned is not None:
        refuse_same_seeds(read_tuning(tuned), wanted)
    if equal not in get_args(Equal):
        raise unknown("value of --equal", equal, get_args(Equal))
    comparison = Comparison(methods, config, wanted, cast(Equal, equal))
    if dry_run:
        print_dry_comparison(comparison, console)
        return
    folder = _comparison_folder(config, out)
    with telling_how_to_resume(folder, COMPARISON):
        write_comparison(folder, comparison)
        play_comparison(comparison, folder, loggers, latex, as_json, quiet)


def print_dry_comparison(comparison: Comparison, console: Console) -> None:
    """Check every method by a real step, and tell how long it will take."""
    total, each = 0.0, on_each(comparison)
    for name, one in each.items():
        for method, scene in check_comparison(one).items():
            found = timing.try_out(scene)
            total += found.seconds(scene.config) * len(comparison.seeds)
            of = f"{method} on {name}" if len(each) > 1 else method
            tell(console, f"{of}: {timing.in_words(found, scene.config)}")
    n = len(comparison.methods)
    tell(console, f"{n} methods, seeds {comparison.seeds}: all can be run, in about {timing.duration(total)}")


def play_comparison(
    comparison: Comparison, folder: Path, loggers: list[Any], latex: bool, as_json: bool, quiet: bool
) -> None:
    """Run or resume a comparison, perhaps on several data sets, and write its tables and report."""
    console = make_console(to_stderr=as_json)
    each = on_each(comparison)
    if len(each) == 1:
        found = {"": play_on(comparison, folder, loggers, latex, as_json, quiet)}
    else:
        found = {}
        for one in each.values():
            check_comparison(one)  # all of them before the first is run
        for name, one in each.items():
            tell(console, f"on {name}:")
            place = folder / folder_name(name)
            place.mkdir(parents=True, exist_ok=True)
            found[name] = play_on(one, place, loggers, False, as_json, quiet)
        print_ranks(found, folder, console, latex, as_json)
    if as_json:
        named = {name: {run: result.summary for run, result in runs.named().items()} for name, runs in found.items()}
        print(json.dumps(named if len(each) > 1 else named[""], indent=2))
    folders = [result.folder for runs in found.values() for result in runs.values() if result.folder is not None]
    tell(console, f"report: {report_room.write(folders, folder / 'report.html')}")


def print_ranks(found: dict[str, Runs], folder: Path, console: Console, latex: bool, as_json: bool) -> None:
    """Methods over several data sets: a table of ranks, and what it says."""
    scores = {
        name: {line.method: line.spreads["personal"].mean for line in tables.lines(runs)}
        for name, runs in found.items()
    }
    over = ranks.make_ranks(scores, {name: tables.lines(runs)[0].metric for name, runs in found.items()})
    if over is None:
        return
    ranks.write_ranks(over, folder)
    if not as_json:
        console.print(view.ranks_table(over))
        for sentence in ranks.in_words(over):
            tell(console, sentence)
        if latex:
            tell(console, (folder / "ranks.tex").read_text("utf-8"))
    tell(console, f"ranks: {folder / 'ranks.csv'}, {folder / 'ranks.tex'}")


def play_on(comparison: Comparison, folder: Path, loggers: list[Any], latex: bool, as_json: bool, quiet: bool) -> Runs:
    """Run or resume a comparison on one data set, and write its tables."""
    console = make_console(to_stderr=as_json)
    with view.GrowingTable(console, quiet) as table:
        runs = compare_methods(
            comparison,
            folder,
            table.say,
            lambda method, seed, place: with_loggers(
                table.callback(method, seed, place), loggers, f"{folder_name(method)}-seed{seed}"
            ),
            table.done,
        )
    tables.write_tables(runs, folder)
    if not as_json:
        console.print(view.comparison_table(tables.lines(runs)))
        if sentence := view.verdict(runs.methods(), tables.better_than_both(runs)):
            tell(console, sentence)
        if latex:
            tell(console, (folder / "table.tex").read_text("utf-8"))
    for path in (folder / "table.csv", folder / "table.tex"):
        tell(console, f"table: {path}")
    return runs


def _comparison_folder(config: Config, out: Path | None) -> Path:
    """A new folder, or the one that was named: a comparison that stopped is resumed."""
    if out is not None and out.is_dir():
        if (out / "config.toml").exists():
            raise UsageError(f"{out} holds a single run; choose another --out")
        return out
    return new_folder(config.model_copy(update={"method": "compare"}), out)


def resume(folder: Path, rounds: int | None, workers: int | None, trust: bool, as_json: bool, quiet: bool) -> None:
    console = make_console(to_stderr=as_json)
    if is_comparison(folder):
        if rounds is not None:
            raise UsageError(f"{folder} holds a comparison; --rounds is for a single run")
        with doubting(folder, trust), telling_how_to_resume(folder, COMPARISON):
            play_comparison(read_comparison(folder, workers or n_cores()), folder, [], False, as_json, quiet)
        return
    progress = view.ProgressReport(console, folder.name, folder / "log.txt" if folder.is_dir() else None, quiet)
    with telling_how_to_resume(folder):
        found = simulation.resume(folder, progress.say, progress, workers or n_cores(), rounds=rounds, trust=trust)
        print_result(found, console, as_json)


def verify(folder: Path, workers: int | None, trust: bool, as_json: bool, quiet: bool) -> int:
    """Returns the exit code: 0 if all runs are what they claim, 4 if one is not, 2 if one could not be verified."""
    console = make_console(to_stderr=as_json)
    found = []
    for one in run_folders(folder):
        progress = view.ProgressReport(console, one.name, None, quiet)
        found.append(verify_run(one, trust, workers or n_cores(), progress.say, progress))
        if not as_json:
            tell(console, found[-1].words)
    if as_json:
        print(json.dumps({"runs": [verdict.to_json() for verdict in found]}, indent=2))
    if any(verdict.is_same is False for verdict in found):
        return RunFailed.exit_code
    return 0 if all(verdict.is_same for verdict in found) else UsageError.exit_code


def reproduce(
    name: str,
    scale: str,
    only: list[str],
    data_dir: str | None,
    workers: int | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
) -> None:
    if scale not in get_args(presets.Scale):
        raise unknown("scale", scale, get_args(presets.Scale))
    preset = presets.find(name)
    for method in only:
        if method not in preset.published:
            raise unknown(f"method of {name}", method, preset.published)
    size = cast(presets.Scale, scale)
    wanted = reproduction.comparison_of(preset, size, data_dir, workers or n_cores(), only)
    console = make_console(to_stderr=as_json)
    if dry_run:
        print_dry_comparison(wanted, console)
        return
    folder = out or Path("runs") / f"{name}-{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    with view.GrowingTable(console, quiet) as table:
        runs = compare_methods(wanted, folder, table.say, table.callback, table.done)
    cells = reproduction.cells(preset, reproduction.numbers(preset, runs, size))
    reproduction.write_csv(cells, folder)
    if as_json:
        print(json.dumps([cell._asdict() | {"ours": cell.ours._asdict()} for cell in cells], indent=2))
        return
    console.print(view.reproduction_table(preset.title, cells, size))
    for line in view.reproduction_words(preset, cells, size):
        tell(console, line)
    tell(console, f"folder: {folder}")


def show(spec: str, values: dict[str, Any]) -> None:
    scene = make_scene(make_config(values))
    config = scene.config
    where = f"With model {config.model} on {config.data} and {config.clients} clients"
    if trained := scene.task.trained_in_words:
        where += f" ({trained})"
    tell(make_console(to_stderr=False), about_method(spec, describe(scene), where))


def schema(values: dict[str, Any], out: Path | None) -> None:
    console = make_console(to_stderr=True)
    text, notes = schema_of(make_config(values))
    for note in notes:
        tell(console, note)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)
        tell(console, f"{out}: edit it if you like, and use it with --data-schema {out}")


def doctor(values: dict[str, Any]) -> None:
    console = make_console(to_stderr=False)
    for line in doctor_room.diagnosis(make_scene(make_config(values))):
        tell(console, line)


def _refuse_other_formats(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise UsageError(f"models are written as safetensors; name the file {path.stem}.safetensors, got {path.name}")


def _write_model(path: Path, model: Params, about: dict[str, str]) -> None:
    _write(path, save({k: v.contiguous() for k, v in model.items()}, metadata={"plures": __version__, **about}))


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def export(folder: Path, client: str, out: Path, form: str | None, trust: bool) -> None:
    console = make_console(to_stderr=False)
    if form == "peft":
        _export_adapter(folder, client, out, trust, console)
        return
    wanted = format_of(out, form)
    with doubting(folder, trust), open_simulation(folder, lambda line: tell(console, line)) as opened:
        scene, round = opened.state.scene, opened.state.round
        model = opened.whole_model(client_number(scene, client))
    if wanted == "safetensors":
        about = {"method": scene.config.method, "model": str(scene.config.model), "client": str(client)}
        _write_model(out, model, about)
    else:
        _write(out, as_file(scene, model, wanted))
    if scene.schema:
        _write(out.with_suffix(".schema.toml"), scene.schema.encode())
    n_weights = sum(x.numel() for x in model.values())
    beside = f"; how rows are read is in {out.with_suffix('.schema.toml')}" if scene.schema else ""
    tell(console, f"{out}: {len(model)} tensors, {n_weights:,} numbers, after round {round}{beside}")


def _export_adapter(folder: Path, client: str, out: Path, trust: bool, console: Console) -> None:
    if out.suffix == ".safetensors":
        raise UsageError(f"peft reads a folder; name one with -o FOLDER, got {out}")
    with doubting(folder, trust), open_simulation(folder, lambda line: tell(console, line)) as opened:
        scene, model = opened.state.scene, opened.personal_model(client_number(opened.state.scene, client))
    n_tensors = write_adapter(out, scene.task, model, folder_of(str(scene.config.model)))
    tell(console, f"{out}: {n_tensors} tensors of an adapter, after round {opened.state.round}")


def adapt(
    folder: Path,
    client_data: Path | None,
    class_counts: str | None,
    epochs: int,
    out: Path,
    trust: bool,
    as_json: bool,
) -> None:
    console = make_console(to_stderr=as_json)
    _refuse_other_formats(out)
    if (client_data is None) == (class_counts is None):
        raise UsageError("give the new client's rows with --client-data FILE, or their numbers with --class-counts")
    with doubting(folder, trust), open_simulation(folder, lambda line: tell(console, line)) as opened:
        if client_data is not None:
            found = from_rows(opened.state, client_data, epochs)
        else:
            found = from_counts(opened.state, whole_numbers("--class-counts", str(class_counts)))
        scene = opened.state.scene
        config, metric = scene.config, scene.metric
    _write_model(out, scene.task.whole(found.model), {"method": config.method, "model": str(config.model)})
    if as_json:
        print(json.dumps(found.summary | {"model": str(out)}, indent=2))
        return
    for number, accuracy in enumerate(found.summary.get("curve", [])):
        tell(console, f"after {number} epochs: {metric.word} {metric.text(accuracy)} on its test rows")
    tell(console, f"{out}: {len(found.model)} tensors")


def report(folders: list[Path], out: Path, figures: Path | None, trust: bool) -> None:
    console = make_console(to_stderr=False)
    with doubting(", ".join(map(str, folders)), trust):
        tell(console, f"report: {report_room.write(folders, out, figures)}")
    if figures is not None:
        tell(console, f"figures: {figures}")


def start_federated(
    operate: Any,
    values: dict[str, Any] | None,
    home: Path,
    resume: Path | None,
    wait: float,
    limits: RoundLimits,
    caps: Caps,
    out: Path | None,
    trust: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """`operate` is the module of that name, which needs an extra and is imported by its caller."""
    console = make_console(to_stderr=as_json)

    def progress_of(name: str, log: Path) -> tuple[Callback, Say]:
        progress = view.ProgressReport(console, name, log, quiet)
        return progress, progress.say

    def say(line: str) -> None:
        if not quiet:
            tell(console, line)

    config = make_config(values) if values is not None else None
    with doubting(resume, trust) if resume is not None else nullcontext():
        result = operate.start(config, home, resume, wait, limits, caps, out, say, progress_of)
    print_result(result, console, as_json)
