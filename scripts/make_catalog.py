"""Writes plures/methods/catalog.json: what `plures show` says of every method, alone and with one add-on.

    python scripts/make_catalog.py

`plures show` reads it, so that it starts without torch. A test compares it with the code.
"""

import json
from pathlib import Path
from typing import Any

from plures.errors import UsageError
from plures.methods import ADDONS, METHODS
from plures.runs.config import make_config
from plures.runs.describing import describe
from plures.runs.scene import Objects, load_data, make_scene

FILE = Path(__file__).parent.parent / "plures" / "methods" / "catalog.json"


def catalog() -> dict[str, list[Any]]:
    """A description for each method of this package, alone and with each add-on that it takes."""
    config = make_config({"data": "digits", "clients": 20})
    objects = Objects(data=load_data(config))
    out: dict[str, list[Any]] = {}
    for method in METHODS.lines:
        for spec in (method, *[f"{method}+{addon}" for addon in ADDONS.lines]):
            try:
                scene = make_scene(config.model_copy(update={"method": spec}), objects=objects)
            except UsageError:
                continue  # the method refuses this add-on
            out[spec] = json.loads(json.dumps(describe(scene).to_json()))
    return out


def text_of(found: dict[str, list[Any]]) -> str:
    """The file: a line for each method, so that changes can be read."""
    lines = [f"{json.dumps(spec)}: {json.dumps(one, separators=(',', ':'))}" for spec, one in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    found = catalog()
    FILE.write_text(text_of(found), encoding="utf-8")
    print(f"{len(found)} descriptions written to {FILE.name}")
