"""What version 0.1.0 did where a later version has an option or a setting for it, so that its run folders go on."""

from typing import Any

from plures._version import __version__
from plures.errors import UsageError

# Options that came later -> what 0.1.0 did. At these values they are no part of a run's identity: it is that of 0.1.0.
OPTIONS: dict[str, Any] = {
    **{"engine": "traced", "precision": "float32", "lr_decay_every": 1, "schedule": "exponential", "nesterov": False},
    **{"clip": 0.0, "last_batch": "keep", "local_work": None, "min_rows": 0, "augment": "none"},
    **{"server_optimizer": "sgd", "server_lr": None, "client_column": None, "target": None, "drop": None},
    **{"time_column": None, "text_column": None, "window": None, "data_schema": None, "image_size": None, "task": None},
    **{"metric": None, "metrics": None, "goal": None},
    **{"freeze": None, "train": None, "stack": None, "adapter": None, "device": "cpu", "features": "once"},
}
# The same for settings: method or add-on -> its settings that came later.
SETTINGS: dict[str, dict[str, Any]] = {
    "ala": {"from_round": 0, "freeze": False},
    "fedala": {"from_round": 0, "freeze": False},
    "afml": {"warm_up": 0},
    "ditto": {"pm_lr": 0.0, "pm_epochs": 0},
    "apfl": {"pm_lr": 0.0},
    "fedrep": {"pm_epochs": 0},
    "fedphp": {"inherit": "mmd"},
    "pfedme": {"outer_lr": 0.0},
    "perfedavg": {"repeat": False},
    "pfedhn": {"cohort": "mean"},
    "plgu-ghn": {"cohort": "mean"},
    "fedpermeta": {"weights": "uniform"},
}
# Methods whose steps or state are others since: their folders cannot go on.
CHANGED = ("fedamp", "fedfomo", "apple", "fedmeta", "mtl", "pfedla", "heurpfedla", "plgu-lf")


def base_of(method: str) -> str:
    """The name of a method without settings and add-ons."""
    return method.partition("+")[0].partition(":")[0]


def settings_since(method: str) -> dict[str, Any]:
    """What 0.1.0 did where the method or one of its add-ons has a setting now."""
    found: dict[str, Any] = {}
    for part in method.split("+"):
        found |= SETTINGS.get(part.partition(":")[0], {})
    return found


def with_old_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The options in a run folder's config.toml; where 0.1.0 wrote it, with what 0.1.0 did."""
    if isinstance(values.get("target"), float):  # what is a goal now was called so
        values = {name: value for name, value in values.items() if name != "target"} | {"goal": values["target"]}
    if "engine" in values:
        return values
    settings = settings_since(values.get("method", "")) | values.get("settings", {})
    return OPTIONS | values | {"settings": settings}


def left_out(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an identity without those that say what 0.1.0 did anyway."""
    kept = {name: value for name, value in fields.items() if OPTIONS.get(name, ...) != value}
    since = settings_since(fields["method"])
    settings = {name: value for name, value in fields["settings"].items() if since.get(name, ...) != value}
    return kept | {"settings": settings}


def refuse_newer(version: str) -> None:
    """Raise if a folder was made by a version that is not out yet for this one."""
    if _parts(version) > _parts(__version__):
        raise UsageError(
            f"this run was made by version {version}, and this is {__version__}; resume it with that version"
        )


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:3] if part.isdigit()]


def refuse_changed(method: str, version: str) -> None:
    """Raise if a method that a folder was made with does something else now."""
    if version.startswith("0.1.") and base_of(method) in CHANGED:
        raise UsageError(
            f"this run was made by version {version}, since which {base_of(method)} computes something else (see "
            "CHANGELOG.md); resume it with that version, or start it anew"
        )
