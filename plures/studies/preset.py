"""Presets: tables of the papers as data: what to run, the published numbers, and what the papers leave open.

A preset is a table in a TOML file of `studies/presets`. `full` is the paper's size as far as it is known, `small` the
same with less data and fewer rounds, `smoke` a minute on bundled data that only proves that it runs.
"""

import tomllib
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from plures.errors import unknown

Scale = Literal["smoke", "small", "full"]

# A few bundled rows, the smallest model, two rounds: whatever the preset says about these.
SMOKE: dict[str, Any] = {
    "data": "digits",
    "model": "mlp",
    "share": 0.3,
    "rounds": 2,
    "epochs": 1,
    "batch": 10,
    "lr": 0.05,
    "augment": "none",
}
SMOKE_CLIENTS = 8


class Preset(BaseModel):
    """A table of a paper."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = Field(description="paper, table, data and split, in a line")
    options: dict[str, Any] = Field(description="of a run at full size")
    small: dict[str, Any] = Field(description="options that are different at small size")
    smoke: dict[str, Any] = Field(default_factory=dict, description="options that are different for a smoke test")
    small_methods: dict[str, str] = Field(
        default_factory=dict, description="method -> how it is spelled at small size and for a smoke test, if otherwise"
    )
    seeds: list[int] = Field(description="at full size; the others take the first")
    columns: dict[str, str] = Field(description="the paper's name of a number -> where it is in summary.json")
    units: dict[str, float] = Field(
        default_factory=dict, description="column -> the unit that its numbers are told in, if it is not per cent"
    )
    own: list[str] = Field(description="the paper's own methods among those below")
    published: dict[str, dict[str, float | list[float]]] = Field(
        description="method -> column -> per cent, or per cent and standard deviation; nothing where it is not known"
    )
    unknown: list[str] = Field(description="what the paper does not say or we cannot do as it does, and what we take")

    def methods(self) -> list[str]:
        return list(self.published)

    def run_as(self, method: str, scale: Scale) -> str:
        """How a method of the table is spelled at a scale."""
        return method if scale == "full" else self.small_methods.get(method, method)

    def options_at(self, scale: Scale) -> dict[str, Any]:
        """The options of a run at a scale."""
        options = dict(self.options)
        if scale == "small":
            options |= self.small
        if scale == "smoke":
            options |= SMOKE | {"clients": min(options.get("clients", SMOKE_CLIENTS), SMOKE_CLIENTS)} | self.smoke
        return options


def load() -> dict[str, Preset]:
    """All presets by name. What a file says under `shared` is in each of its presets, unless that says otherwise."""
    found: dict[str, Preset] = {}
    for file in sorted(resources.files("plures.studies").joinpath("presets").iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".toml"):
            continue
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        shared = content.pop("shared", {})
        for name, values in content.items():
            merged = shared | values
            for key in ("options", "small", "smoke"):
                merged[key] = shared.get(key, {}) | values.get(key, {})
            merged["unknown"] = values.get("unknown", []) + shared.get("unknown", [])
            found[name] = Preset(**merged)
    return found


def find(name: str) -> Preset:
    known = load()
    if name not in known:
        raise unknown("preset", name, known)
    return known[name]
