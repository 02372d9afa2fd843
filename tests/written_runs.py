"""Run folders written by hand, so that what a report computes from them can be checked by hand too."""

import csv
import json
from pathlib import Path


def write_run(
    folder: Path,
    method: str = "fedavg",
    seed: int = 0,
    accuracies: tuple[float | None, ...] = (0.5, 1.0),
    curve: tuple[float | None, ...] = (0.2, 0.4),
    sizes: tuple[int, ...] | None = None,
    n_bytes: int = 100,
    seconds: float = 2.0,
    partition: str = "dirichlet:0.1",
    split: str = "a",
    **more,
) -> Path:
    """A finished run with these accuracies of clients at the end, and this mean over the rounds."""
    folder.mkdir(parents=True)
    known = [a for a in accuracies if a is not None]
    mean = sum(known) / len(known)
    settings = more.pop("settings", {})
    config = {"method": method, "data": "digits", "model": "mlp", "partition": partition, "clients": len(accuracies)}
    config |= {"rounds": len(curve), "seed": seed, "participation": 1.0, "epochs": 1, "batch": 10, "lr": 0.05}
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    lines += ["[settings]", *[f"{key} = {json.dumps(value)}" for key, value in settings.items()]]
    (folder / "config.toml").write_text("\n".join(lines) + "\n")
    (folder / "split.json").write_text(json.dumps({"train": [[1, 2], [3]], "test": [[4], [5]], "name": split}))
    summary = {
        **config,
        "settings": settings,
        "personal": {"mean": mean, "pooled": mean, "std": 0.1, "worst5": min(known), "top5": max(known)},
        "generic": {"accuracy": 0.3},
        "harmed": None,
        "bytes": {"down": n_bytes, "up": n_bytes},
        "flops": 7,
        "seconds": {"train": seconds, "evaluate": 1.0, "total": 4.0},
        "peak_rss_mb": 10.0,
        "refused_updates": 0,
        **more,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    rounds = [
        {
            "round": k + 1,
            "bytes_down": n_bytes,
            "bytes_up": 2 * n_bytes,
            "train_seconds": seconds,
            "personal_mean": "" if value is None else value,
            "personal_worst5": "",
            "generic_accuracy": "",
        }
        for k, value in enumerate(curve)
    ]
    sizes = sizes or tuple(10 + k for k in range(len(accuracies)))
    clients = [
        {"client": k, "name": "", "n_train": sizes[k], "n_test": 100, "personal_accuracy": "" if a is None else a}
        for k, a in enumerate(accuracies)
    ]
    for name, rows in (("rounds.csv", rounds), ("clients.csv", clients)):
        with open(folder / name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder
