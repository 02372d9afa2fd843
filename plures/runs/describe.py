"""Description of a method: its settings, what travels and what stays, as plain data that can be printed or kept."""

import json
from importlib import resources
from typing import Any, NamedTuple

CATALOG = "catalog.json"  # descriptions of the methods of this package, so that `plures show` starts without torch


class Setting(NamedTuple):
    """A setting of a method."""

    name: str
    default: Any
    choices: list[str]
    help: str


class Tensors(NamedTuple):
    """Tensors that travel or stay."""

    n_bytes: int
    shapes: dict[str, list[int]]


class Description(NamedTuple):
    """What `plures show` says of a method, besides the text at the top of its file."""

    settings: list[Setting]
    is_each: bool  # whether each client is sent a message of its own
    down: Tensors
    up: Tensors
    kept: Tensors  # by a client, never sent
    server_bytes: int
    needs_classes: str  # why it predicts classes alone; empty if it can predict anything

    def to_json(self) -> list[Any]:
        return list(self)

    @staticmethod
    def from_json(values: list[Any]) -> "Description":
        settings, is_each, down, up, kept, server_bytes, needs_classes = values
        own = [Setting(*one) for one in settings]
        return Description(own, is_each, Tensors(*down), Tensors(*up), Tensors(*kept), server_bytes, needs_classes)


def known_description(spec: str) -> Description | None:
    """What the catalog says of a method as it is spelled; None if it is not there."""
    file = resources.files("plures.methods").joinpath(CATALOG)
    found = json.loads(file.read_text(encoding="utf-8")).get(spec) if file.is_file() else None
    return None if found is None else Description.from_json(found)
