"""Several methods on the same split, schedule and start."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import checkpoint
from .config import Config
from .errors import UsageError
from .run import Result, Say, Watcher, folder_name, load_data, set_scene, start


def compare(
    methods: list[str],
    config: Config,
    out: Path | None,
    say: Say,
    watcher_of: Callable[[str, Path | None], Watcher],
    done: Callable[[str, Result], None] = lambda method, result: None,
) -> dict[str, Result]:
    """A run for each method; those who lose to Local are counted when it is among the methods."""
    if len(set(methods)) < len(methods):
        raise UsageError(f"a method is named twice: {' '.join(methods)}")
    settings = config.settings
    scenes = {}
    data = load_data(config)
    for method in methods:  # all of them first: a slip in the last one must not cost an hour
        scenes[method] = set_scene(config.model_copy(update={"method": method, "settings": settings}), data=data)
    results: dict[str, Result] = {}
    for method, scene in scenes.items():
        folder = None
        if out is not None:
            folder = out / folder_name(method)
            folder.mkdir(parents=True, exist_ok=True)
        result = start(scene, folder, say, watcher_of(method, folder))
        results[method] = result
        for name in results:
            results[name] = _with_harmed(results[name], results.get("local"))
        done(method, results[method])
    return results


def _with_harmed(result: Result, local: Result | None) -> Result:
    """Count the clients that do worse than alone."""
    if local is None or result.summary["harmed"] is not None:
        return result
    own, alone = (_accuracies(r) for r in (result, local))
    harmed = int((own < alone - 1e-12).sum())
    summary = result.summary | {"harmed": harmed}
    if result.folder is not None:
        checkpoint.write_text(result.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return result._replace(summary=summary)


def _accuracies(result: Result) -> np.ndarray:
    return np.array([row["personal_accuracy"] for row in result.clients if row["personal_accuracy"] is not None])
