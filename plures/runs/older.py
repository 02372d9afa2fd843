"""What version 0.1.0 did where a later version has an option or a setting for it, so that its run folders go on."""

from typing import Any

# Options that came later -> what 0.1.0 did. At these values they are no part of a run's identity: it is that of 0.1.0.
OPTIONS: dict[str, Any] = {
    **{"engine": "traced", "precision": "float32", "lr_decay_every": 1, "schedule": "exponential", "nesterov": False},
    **{"clip": 0.0, "last_batch": "keep", "local_work": None, "min_rows": 0, "augment": "none"},
    **{"server_optimizer": "sgd", "server_lr": None},
}
# The same for settings of methods and add-ons; of 0.1.0 none has a name with two meanings here.
SETTINGS: dict[str, Any] = {"pm_lr": 0.0, "pm_epochs": 0}


def with_old_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The options in a run folder's config.toml; where 0.1.0 wrote it, with what 0.1.0 did."""
    if "engine" in values:
        return values
    return OPTIONS | values


def left_out(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an identity without those that say what 0.1.0 did anyway."""
    kept = {name: value for name, value in fields.items() if OPTIONS.get(name, ...) != value}
    settings = {name: value for name, value in kept["settings"].items() if SETTINGS.get(name, ...) != value}
    return kept | {"settings": settings}
