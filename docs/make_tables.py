"""Every method on four real tables with natural clients, beside models of scikit-learn: docs/tables.md.

    python docs/make_tables.py run [TABLE ...] --data-dir DIR [--method M ...]     resumes where it was stopped
    python docs/make_tables.py write

DIR holds the folder tables. Records are in docs/results/table-NAME.json.
"""

import argparse
import csv
import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import plotly
from PIL import Image
from sklearn.linear_model import LogisticRegression, Ridge

import plures
from plures.errors import RunFailed, UsageError
from plures.learn.metrics import METRICS, Metric
from plures.methods import METHODS
from plures.runs.config import make_config
from plures.runs.results import scores_of
from plures.runs.scene import Scene, make_scene
from plures.simulate.evaluate import values_of

HERE = Path(__file__).parent
RECORDS = HERE / "results"
SEEDS = (0, 1, 2)
FEW = ["local", "fedavg", "ditto", "fedper"]  # methods of the examples that are no tables
POOLED, ALONE = "scikit-learn, all rows together", "scikit-learn, each client alone"


class Table(NamedTuple):
    title: str
    options: dict[str, Any]
    lay_out: Callable[[Path, Path], Path] | None = None  # from the data folder into another; else it is a table there


def femnist_images(data: Path, out: Path) -> Path:
    """Images of ten writers in folders WRITER/CLASS/number.png."""
    arrays = np.load(data / "femnist.npz")
    client = arrays["client" if "client" in arrays else "writer"]
    for row in np.flatnonzero((client < 10) & (arrays["y"] < 10)):
        path = out / f"writer {client[row]}" / str(arrays["y"][row]) / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(arrays["x"][row]).save(path)
    return out


def news_texts(data: Path, out: Path) -> Path:
    """The test part of AG News in folders READER/CLASS/number.txt; every reader likes one class most."""
    names = ("world", "sports", "business", "science")
    rng = np.random.default_rng(0)
    with open(data / "ag_news_csv" / "test.csv", encoding="utf-8", newline="") as file:
        for row, (label, title, words) in enumerate(csv.reader(file)):
            reader = int(label) - 1 if rng.random() < 0.7 else int(rng.integers(4))
            path = out / f"reader {4 * int(rng.integers(2)) + reader}" / names[int(label) - 1] / f"{row}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{title} {words}", "utf-8")
    return out


def life_expectancy(data: Path, out: Path) -> Path:
    """Gapminder's life expectancy of 142 countries, every five years; it comes with plotly."""
    source = Path(plotly.__file__).parent / "package_data" / "datasets" / "gapminder.csv.gz"
    path = out / "gapminder.csv"
    path.write_bytes(gzip.decompress(source.read_bytes()))
    return path


COMMON: dict[str, Any] = {"rounds": 40, "eval_every": 0}
TABLES: dict[str, Table] = {
    "contraception": Table(
        "Use of contraception, 60 districts",
        {"client_column": "district", "target": "use", "drop": "woman", "metric": "auc"},
    ),
    "guprenat": Table(
        "Modern prenatal care, 161 communities",
        {"client_column": "cluster", "target": "prenat", "drop": "kid,mom", "metric": "auc"},
    ),
    "hsb82": Table("Achievement in mathematics, 160 schools", {"client_column": "school", "target": "mAch"}),
    "star": Table(
        "Scores in mathematics, 80 schools",
        {"client_column": "sch", "target": "math", "drop": "id,read,tch"},
    ),
    "femnist-images": Table(
        "Images in folders: handwritten digits of ten writers", {"model": "hncnn", "metrics": "all"}, femnist_images
    ),
    "news-texts": Table("Texts in folders: news of eight readers", {"metrics": "all", "lr": 0.5}, news_texts),
    "gapminder": Table(
        "Windows of a time series: life expectancy of 142 countries",
        {
            **{"client_column": "country", "target": "lifeExp", "time_column": "year", "window": 4},
            **{"drop": "continent,iso_alpha,iso_num", "model": "resnet1d:16,2", "lr": 0.02},
        },
        life_expectancy,
    ),
}


def record_of(name: str) -> dict[str, Any]:
    path = RECORDS / f"table-{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def options_of(name: str, data_dir: str) -> dict[str, Any]:
    table = TABLES[name]
    if table.lay_out is None:
        return COMMON | table.options | {"data": f"{data_dir}/tables/{name}.csv"}
    out = Path(tempfile.mkdtemp())
    return COMMON | table.options | {"data": str(table.lay_out(Path(data_dir), out))}


def run(name: str, data_dir: str, methods: list[str]) -> None:
    record, options = record_of(name), options_of(name, data_dir)
    for seed in SEEDS:
        done = record.setdefault(str(seed), {})
        is_table = TABLES[name].lay_out is None
        for method in [POOLED, ALONE, *methods] if is_table else [one for one in methods if one in FEW]:
            if method in done:
                continue
            try:
                done[method] = numbers_of(method, options | {"seed": seed})
            except UsageError as error:
                done[method] = {"refused": str(error)}
            except RunFailed as error:
                done[method] = {"failed": str(error)}
            (RECORDS / f"table-{name}.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            print(f"{name} seed {seed} {method}: {done[method]}", flush=True)


def numbers_of(method: str, options: dict[str, Any]) -> dict[str, Any]:
    if method in (POOLED, ALONE):
        return of_sklearn(make_scene(make_config(options | {"method": "local"})), method == POOLED)
    renamed = {("client" if key == "client_column" else key): value for key, value in options.items()}
    summary = plures.run(method, **renamed, workers=2).summary
    kept = {key: summary["personal"][key] for key in ("mean", "pooled", "worst5", "interval")}
    return kept | {"seconds": summary["seconds"]["total"]}


def of_sklearn(scene: Scene, is_pooled: bool) -> dict[str, Any]:
    """A linear model of all rows together, or one of each client, on the rows that our models see."""
    population, metric = scene.population, scene.metric
    x, y = population.x.numpy(), population.y.numpy()
    whole = fit(scene, x[np.concatenate(population.train)], y[np.concatenate(population.train)]) if is_pooled else None
    outputs, true = [], []
    for train, test in zip(population.train, population.test, strict=True):
        if len(test):
            outputs.append((whole or fit(scene, x[train], y[train]))(x[test]))
            true.append(y[test])
    found = scores_of(values_of(metric, outputs, true, population.target), metric)
    return {key: found[key] for key in ("mean", "pooled", "worst5")}


def fit(scene: Scene, x: np.ndarray, y: np.ndarray) -> Any:
    """A function from rows to outputs as our models give them."""
    if scene.population.target.is_real:
        ridge = Ridge().fit(x, y)
        return lambda rows: ridge.predict(rows)[:, None]
    known = np.unique(y)
    if len(known) == 1:  # a client with one class can only say it again
        return lambda rows: np.eye(scene.population.n_classes)[np.full(len(rows), known[0])]
    logistic = LogisticRegression(max_iter=1000).fit(x, y)
    return lambda rows: logistic.predict_log_proba(rows)


def cell(found: list[float], metric: Metric) -> str:
    form = ".2f" if metric.is_share else ".4g"
    spread = f" ± {format(metric.shown(stdev(found)), form)}" if len(found) > 1 else ""
    return format(metric.shown(fmean(found)), form) + spread


def page_of(name: str) -> list[str]:
    record = record_of(name)
    if not record:
        return []
    options = COMMON | TABLES[name].options
    is_table = TABLES[name].lay_out is None
    metric = METRICS[options.get("metric", "rmse" if "target" in options else "accuracy")]
    where = f"tables/{name}.csv" if is_table else name
    words = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())
    lines = [f"## {TABLES[name].title}", "", "```", f"plures run METHOD --data {where} {words}", "```", ""]
    better = "higher is better" if metric.is_higher_better else "lower is better"
    lines += [f"{metric.title} ({better}), mean and standard deviation over {len(record)} seeds.", ""]
    lines += ["| method | mean of clients | all rows | worst 5 % |", "|---|---|---|---|"]
    rows = {}
    for method in dict.fromkeys(method for of_seed in record.values() for method in of_seed):
        own = [of_seed[method] for of_seed in record.values() if method in of_seed]
        if all("pooled" in one for one in own):
            rows[method] = own
    order = sorted(rows, key=lambda method: -metric.sign * fmean(one["pooled"] for one in rows[method]))
    for method in order:
        cells = [cell([one[key] for one in rows[method]], metric) for key in ("mean", "pooled", "worst5")]
        lines.append(f"| {method if method in (POOLED, ALONE) else f'`{method}`'} | {' | '.join(cells)} |")
    if not is_table:
        return [*lines, ""]
    refused = [method for method in record["0"] if "refused" in record["0"][method]]
    best = max((POOLED, ALONE), key=lambda one: metric.sign * fmean(each["pooled"] for each in rows[one]))
    line = metric.sign * fmean(each["pooled"] for each in rows[best])
    ours = [method for method in rows if method not in (POOLED, ALONE)]
    below = [method for method in ours if metric.sign * fmean(each["pooled"] for each in rows[method]) < line]
    lines += ["", f"The better of the two linear models is that of {best.removeprefix('scikit-learn, ')}."]
    lines[-1] += f" {len(ours) - len(below)} of {len(ours)} methods are at least as good over all rows."
    if below:
        lines[-1] += f" These are not: {', '.join(f'`{method}`' for method in below)}."
    failed = [
        method for method in record["0"] if any("failed" in of_seed.get(method, {}) for of_seed in record.values())
    ]
    if failed:
        lines[-1] += f" These diverge at their defaults: {', '.join(f'`{method}`' for method in failed)}."
    if refused:
        lines[-1] += f" Not for this task: {', '.join(f'`{method}`' for method in refused)}."
    return [*lines, ""]


def write() -> None:
    lines = [
        "# Real tables, beside scikit-learn",
        "",
        "Four public tables whose rows belong to districts, communities or schools. Every number was written by",
        "`python docs/make_tables.py write` from runs that `python docs/make_tables.py run --data-dir DIR` recorded.",
        "The models of scikit-learn are logistic or ridge regression on the same encoded rows, one of all training",
        "rows together, which no federation could have, and one of each client's own. After them, one example each of",
        "images and texts in folders, and of a time series; `docs/make_tables.py` has the functions that lay them out.",
        "",
    ]
    for name in TABLES:
        lines += page_of(name)
    (HERE / "tables.md").write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "write"])
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], default=[])
    parser.add_argument("--data-dir")
    parser.add_argument("--method", action="append")
    arguments = parser.parse_args()
    if arguments.what == "run":
        for name in arguments.tables or TABLES:
            run(name, arguments.data_dir, arguments.method or list(METHODS))
    write()


if __name__ == "__main__":
    main()
