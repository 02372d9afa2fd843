"""Configs: commands with random options, of which some make sense, some nearly do, and some do not at all.

A command must do its work, with finite numbers, or say in words why it does not: soon, and without a traceback.
"""

import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin

from plures.methods import METHODS
from plures.methods.spec import make_method, setting_fields
from plures.models.names import MODELS
from plures.runs.config import Config
from scripts.fault_kinds import processes
from scripts.fault_kinds.processes import Outcome

NUMBER = 1000
SECONDS = 60.0  # of processor time
ADDONS = ("ala", "prox", "sam", "ft", "c", "scaffold", "feddyn", "brm", "keep")
RUBBISH = ("", " ", "nan", "inf", "-inf", "-1", "0", "1e400", "1e-400", "true", "null", "[]", "{}", "ünïcode", "日本",
           "a" * 5000, "../..", "/etc/passwd", "%s%n", "'; drop table", "\x1b[2J", "--help", "0x10",
           "1_0", "²")  # fmt: skip
# Words that may be right for options that take words, and words that are not; both mean something to them.
GOOD: dict[str, tuple[str, ...]] = {
    "data": ("digits", "digits", "digits", "table.csv"),
    "data_dir": (".",),
    "client_column": ("town",),
    "target": ("sick", "age"),
    "drop": ("age", "town"),
    "time_column": ("age",),
    "text_column": ("town",),
    "data_schema": ("nowhere.toml",),
    "model": tuple(MODELS),
    "freeze": ("head", "body", "*.bias"),
    "train": ("head", "body", "*.weight"),
    "adapter": ("lora:rank=4", "lora:rank=2,layers=*", "scale", "bias", "head"),
    "partition": ("iid", "dirichlet:0.5", "dirichlet:1e300", "dirichlet:1e-300", "dirichlet-class:0.3",
                  "dirichlet-client:0.2", "shards:2", "quantity:0.5", "quantity:0.001", "pathological:2", "labels:4",
                  "main:2", "relabel:0.5", "longtail:20", "longtail:10,0.6"),
    "split": ("split.json",),
    "augment": ("crop", "flip", "crop,flip"),
    "local_work": ("uniform:1-3", "uniform:0-2"),
    "engine": ("traced", "eager", "traced:winograd=off"),
    "address": ("auto",),
    "metric": ("accuracy", "auc", "ap", "f1", "balanced", "calibration"),
}  # fmt: skip
BAD: dict[str, tuple[str, ...]] = {
    "data": ("digit", "mnist", "nowhere.csv", ".", "rows.npz", "split.json"),
    "data_dir": ("nowhere", "/dev/null"),
    "target": ("nothing", "sick,age", "town,"),
    "drop": ("nothing", "age,town", ","),
    "data_schema": ("table.csv", "split.json"),
    "model": ("mlp:0", "mlp:1000000000", "os:system", "nothing:Net", "mlp+mlp", "mlp:"),
    "freeze": ("*", "nothing", "head,body", "["),
    "train": ("nothing", ","),
    "adapter": ("lora:rank=0", "lora:x=1", "lora:", "lora:rank=1000000"),
    "partition": ("dirichlet:0", "shards:1000000", "pathological:99", "labels:0", "main:-1", "relabel:2", "longtail:0",
                  "longtail:10,0", "natural", "dirichlet", "dirichlet:", "iid:3", "x:1", "dirichlet:nan", "shards:1.5"),
    "split": ("nowhere.json", "table.csv", "."),
    "augment": ("spin", "flip,flip"),
    "local_work": ("uniform:3-1", "uniform:0-0", "uniform:1", "normal:1-2"),
    "engine": ("traced:nothing=off", "eager:winograd=off", "traced:"),
    "metric": ("rmse", "mae", "r2", "luck"),
}  # fmt: skip
# What keeps a run short; an option outside of these is tried by a dry run, which takes a single step.
SMALL: dict[str, tuple[Any, ...]] = {
    "rounds": (0, 1, 2, 3),
    "epochs": (0, 1, 2),
    "steps": (1, 2, 3),
    "clients": (1, 2, 5, 12, 300, 1797, 1798, 10**6),
    "batch": (1, 10, 50, 10**9),
    "new_epochs": (0, 1, 2),
    "personal_epochs": (0, 1, 2),
    "new_clients": (0, 1, 3, 10**6),
    "workers": (1, 2),
    "image_size": (1, 8, 32),
    "window": (1, 3, 10**6),
    "pool_rows": (0, 1, 100, 10**9),
    "local_work": ("uniform:1-2", "uniform:0-2", "uniform:3-1"),
    "model": ("linear", "mlp", "cnn4", "tabular", "fasttext", "charlstm", "resnet1d", "hncnn", "resnet8", "mlp:16"),
    "executor": ("auto", "vectorised", "one_by_one"),
}  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 3, 7, 10, 100, 10**6, 10**9, 10**30, 0.5, 0.1, 0.99, 1e-9, 1e-30, 1.5, 1e30, 3.4e38, -0.5)


def write_files(folder: Path) -> None:
    """Files that options may name: a table and a split, both a bit odd."""
    lines = ["town,age,sick", *(f"{'abc'[i % 3]},{i % 17},{'yes' if i % 5 < 2 else 'no'}" for i in range(60)), "a,,no"]
    (folder / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    split = {"train": [[0, 1, 2], [3, 4]], "test": [[5], [6, 99999]]}
    (folder / "split.json").write_text(json.dumps(split), encoding="utf-8")


def value_of(option: str, random: Random, is_real: bool, is_bad: bool) -> str:
    """A value of an option: one that may be right, or one that is not."""
    field = Config.model_fields[option]
    kinds = {field.annotation, *get_args(field.annotation)}
    if is_bad:
        return random.choice((*BAD.get(option, ()), *RUBBISH, *map(str, NUMBERS)))
    if is_real and option in SMALL:
        return str(random.choice(SMALL[option]))
    if option in GOOD:
        return random.choice(GOOD[option])
    for kind in kinds:
        if get_origin(kind) is Literal:
            return random.choice([value for value in get_args(kind) if value != "ray"])
    if bool in kinds:
        return random.choice(("true", "false"))
    numbers = [n for n in NUMBERS if isinstance(n, int) or float in kinds]
    for bound in field.metadata:
        numbers = [n for n in numbers if _is_within(n, bound)]
    return str(random.choice(numbers))


def _is_within(n: float, bound: Any) -> bool:
    """Whether a number keeps a bound of a field."""
    tests = {"ge": n.__ge__, "gt": n.__gt__, "le": n.__le__, "lt": n.__lt__}
    return all(tests[name](type(n)(limit)) for name in tests if (limit := getattr(bound, name, None)) is not None)


def method_of(random: Random, is_bad: bool) -> str:
    """A method, perhaps with a setting and add-ons."""
    name = random.choice(list(METHODS))
    if is_bad and random.random() < 0.5:
        return random.choice((*RUBBISH, "fedevil", "fedavg+", "+ala", "fedavg:", "fedavg+evil", "ditto:lam"))
    if is_bad or random.random() < 0.2:
        known = list(setting_fields(make_method(name, {}, Config().solver())))
        setting = random.choice([*known, "lr", "epochs", *(["nothing"] if is_bad else [])])
        values = (*map(str, NUMBERS), *RUBBISH, "true", "head", "ce", "mean") if is_bad else ("1", "2", "0.5")
        name += f":{setting}={random.choice(values)}"
    if random.random() < 0.25:
        name += f"+{random.choice(ADDONS)}"
    return name


OF_TABLES = ("target", "client_column", "time_column", "text_column", "drop", "window", "data_schema", "task")


def words_of(random: Random) -> tuple[list[str], bool]:
    """A command, and whether it is run for real. About half of the commands have a value that is wrong."""
    is_real = random.random() < 0.5
    options = [name for name in Config.model_fields if name not in ("method", "settings", "seed")]
    weights = [0.2 if name in (*OF_TABLES, "data", "data_dir", "split", "address") else 1.0 for name in options]
    chosen = dict.fromkeys(random.choices(options, weights, k=random.choice((1, 2, 3, 4, 6))))
    fixed = {"rounds": "2", "clients": "5", "batch": "50", "workers": "1", "epochs": "1", "share": "0.4"}
    if "steps" in chosen:
        fixed.pop("epochs")
        chosen.pop("epochs", None)
    bad = random.choice(("", "", "", "", "method", *chosen, *chosen)) if random.random() < 0.7 else ""
    given = fixed | {name: value_of(name, random, is_real, name == bad) for name in chosen}
    if any(name in given for name in OF_TABLES) and random.random() < 0.9:
        given |= {"data": "table.csv", "target": given.get("target", "sick")}
        given.pop("model", None)
    words = ["run", method_of(random, bad == "method")]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return words + ([] if is_real else ["--dry-run"]), is_real


def trial(number: int, random: Random, work: Path) -> Outcome:
    """A command with random options."""
    folder = work / "options"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_files(folder)
    words, is_real = words_of(random)
    out = folder / "run"
    ended = processes.run([*words, "--out", str(out), "--quiet"], folder, seconds=SECONDS)
    what = " ".join(word if len(word) < 60 else word[:60] + "..." for word in words[1:])
    if failed := ended.failure(what):
        return failed
    if ended.code:
        return Outcome("told", what, processes.shorten(ended.sentence))
    if is_real and words[1] != "--help":
        try:
            summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Outcome("silent", what, "the run has ended without a summary")
        if bad := not_finite(summary):
            return Outcome("silent", what, f"not a number: {bad}")
    return Outcome("survived", what)


def not_finite(value: Any, name: str = "summary") -> str:
    """The first number in it that is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return name
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next((found for key, part in items if (found := not_finite(part, f"{name}.{key}"))), "")
