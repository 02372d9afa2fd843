"""The policy of a client: which requests it answers. The client reads it from its own disk; no server can change it.

A request outside of it is refused: the client's own log has a sentence, and the server is told a code of one word.
"""

import fnmatch
import math
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from plures.data.batches import batches_per_epoch
from plures.errors import UsageError
from plures.federate.wire import Refused
from plures.files import read_toml
from plures.methods.base import Method
from plures.methods.naming import parse
from plures.methods.spec import all_settings
from plures.runs.config import Config

FILE = "policy.toml"
# Settings that leave a share of the training rows out of what is uploaded: that share.
LEFT_OUT = {"support": lambda x: x, "aside": lambda x: x, "model_rows": lambda x: 1 - x}
LIMITS = {
    "lr": [1e-4, 100.0],  # with less, an update is the bare gradient, or what the client keeps
    "rounds": [0.0, 10_000.0],
    "epochs": [1.0, 1000.0],
    "test_share": [0.1, 0.5],
}


class Policy(BaseModel):
    """The rules of a client, safe by default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    methods: list[str] = Field(
        default=["*"],
        description='methods and add-ons that may be asked for, as in ["fedavg", "ditto", "ft"]; * is any',
    )
    limits: dict[str, list[float]] = Field(
        default=LIMITS, description="least and most value of an option of a run, or of a setting of a method"
    )
    most_classes: int = Field(default=10_000, ge=1, description="classes of a model, if our rows have fewer")
    least_batch: int = Field(default=8, ge=1, description="rows in a batch")
    least_rows: int = Field(default=20, ge=1, description="rows that an update is made of")
    least_steps: int = Field(default=2, ge=1, description="steps of an update")
    least_test_rows: int = Field(default=20, ge=1, description="with fewer test rows, no score is told")
    score_step: int = Field(
        default=5, ge=1, description="the number of test rows that are right is rounded to multiples of it"
    )
    score_floor: bool = Field(
        default=True, description="tell of no model that it is worse than one that always names our most frequent class"
    )
    test_loss: bool = Field(default=False, description="tell the loss on test rows")
    loss_step: float = Field(
        default=0.01, ge=0, description="the training loss is rounded to multiples of it; 0: not at all"
    )
    scorings_per_round: int = Field(default=3, ge=0, description="how often models of one round may be scored")
    adapt_epochs: int = Field(default=20, ge=0, description="most epochs of an adaptation, each of which is scored")
    starts_per_hour: int = Field(default=30, ge=0, description="experiments that may begin in an hour")
    rounds_between_starts: int = Field(
        default=0, ge=0, description="rounds that must be trained in an experiment before another one may begin"
    )
    requests_per_minute: int = Field(default=600, ge=1, description="requests that are answered in a minute")
    operators: list[str] = Field(
        default=["operator.pub"],
        description="files beside this one with the public keys of those who may ask; if none of them exists, "
        "whoever the server lets in may ask",
    )
    words: list[str] = Field(
        default=[], description='columns of our table whose words may be told, as in ["town", "outcome"]; * is any'
    )
    least_rows_of_word: int = Field(default=5, ge=1, description="a word of fewer training rows is not told")
    value_digits: int = Field(default=2, ge=1, description="digits of a metric of our test rows that are told")
    keep_experiments: int = Field(default=50, ge=1, description="our own state of so many experiments is kept")
    keep_days: float = Field(default=365.0, gt=0, description="our own state of an experiment is kept for so long")

    def changes(self) -> str:
        """What differs from the defaults, in words; empty if nothing does."""
        normal = Policy()
        return ", ".join(
            f"{name} = {getattr(self, name)}"
            for name in type(self).model_fields
            if getattr(self, name) != getattr(normal, name)
        )

    # Before a run

    def check_rows(self, n: int) -> None:
        """Refuse to take part with fewer rows than an update must be made of."""
        if n < self.least_rows:
            raise Refused(f"we have {n} training rows, and least_rows = {self.least_rows} in {FILE}", "rows")

    def check_config(self, config: Config, method: Method, n: int, smallest: int) -> None:
        """Refuse a run that would tell too much of n rows. `smallest` is the least batch that the model can train."""
        for one in parse(config.method):
            if not any(fnmatch.fnmatchcase(one.name, pattern) for pattern in self.methods):
                raise Refused(f"the server asks for {one.name}, which is not in methods of {FILE}", "method")
        values = all_settings(method) | config.model_dump(exclude={"settings", "epochs" if config.steps else ""})
        for name, (least, most) in self.limits.items():
            value = values.get(name)
            if isinstance(value, int | float) and not least <= value <= most:
                raise Refused(f"the server asks for {name} = {value}; {FILE} allows {least:g} to {most:g}", "setting")
        if config.batch < self.least_batch:
            raise Refused(
                f"the server asks for batches of {config.batch} rows, and least_batch = {self.least_batch} in {FILE}",
                "batch",
            )
        left_out = [share(float(values[name])) for name, share in LEFT_OUT.items() if name in values]
        n_used = int(n * (1 - max(left_out, default=0.0)) + 1e-6)
        per_epoch = int(batches_per_epoch(np.array([n_used]), config.batch, smallest, config.last_batch)[0])
        amount = (config.work_range() or (config.steps or config.epochs,))[0]
        steps = amount if config.steps else amount * per_epoch
        rows = min(n_used, steps * config.batch)
        if rows < self.least_rows:
            raise Refused(f"an update would be made of {rows} rows; least_rows = {self.least_rows} in {FILE}", "rows")
        if steps < self.least_steps:
            raise Refused(f"an update would take {steps} steps; least_steps = {self.least_steps} in {FILE}", "steps")

    # What is told

    def hits_to_tell(self, hits: float, n: int, most_frequent: float) -> float:
        """The number of right test rows that is told; `most_frequent` is how many are right by always naming a class.

        A model that names one class for all rows would give the number of rows of that class, and models for all
        classes would give all numbers. With the floor, all of these models give the same.
        """
        told = max(hits, most_frequent) if self.score_floor else hits
        return (
            float(min(n, self.score_step * math.floor(told / self.score_step + 0.5))) if self.score_step > 1 else told
        )

    def value_to_tell(self, value: float) -> float | None:
        """The metric that is told; None where it says nothing."""
        return float(f"{value:.{self.value_digits}g}") if math.isfinite(value) else None

    def loss_to_tell(self, loss: float) -> float:
        """The training loss that is told."""
        return self.loss_step * round(loss / self.loss_step) if self.loss_step and math.isfinite(loss) else loss


def read_policy(folder: Path) -> Policy:
    """The policy in the folder of a client; a file with the defaults is written if there is none."""
    path = folder / FILE
    if not path.exists():
        path.write_text(default_text(), encoding="utf-8")
    values = read_toml(path)
    try:
        policy = Policy.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "a line"
        if first["type"] == "extra_forbidden":
            raise UsageError(f"{path}: there is no rule {name!r}; rules are {', '.join(Policy.model_fields)}") from None
        raise UsageError(f"{path}: {name}: {first['msg'].lower()}, got {first['input']!r}") from None
    for name, bounds in policy.limits.items():
        if len(bounds) != 2:
            raise UsageError(f"{path}: limits.{name} must be a least and a most value, got {bounds}")
    return policy


def default_text() -> str:
    """A policy.toml in which every rule stands with its default, behind a #."""
    lines = [
        "# Which requests of a server this client answers. Each line is the default; remove its # to change a rule.",
        "# It is read when the client starts. What each rule is for: docs/deploy.md",
    ]
    for name, field in Policy.model_fields.items():
        if name != "limits":
            lines += ["", f"# {field.description}", f"# {name} = {_toml(field.default)}"]
    lines += ["", f"# {Policy.model_fields['limits'].description}", "# [limits]"]
    lines += [f"# {name} = {_toml(bounds)}" for name, bounds in LIMITS.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')
