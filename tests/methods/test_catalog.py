"""The catalog that `plures show` reads says what the methods say themselves."""

import importlib.util
from pathlib import Path

import pytest

from plures.cli.listing import about_method
from plures.methods import METHODS
from plures.runs.config import make_config
from plures.runs.describe import known_description
from plures.runs.describing import describe
from plures.runs.scene import make_scene

ROOT = Path(__file__).parent.parent.parent


def test_the_catalog_is_that_of_the_code():
    spec = importlib.util.spec_from_file_location("make_catalog", ROOT / "scripts" / "make_catalog.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.FILE.read_text(encoding="utf-8")
    assert text == module.text_of(module.catalog()), "run: python scripts/make_catalog.py"


@pytest.mark.parametrize("spec", [*list(METHODS.lines)[:5], "ditto+ala", "fedrod+feddyn"])
def test_what_is_shown_from_the_catalog_is_what_is_computed(spec):
    known = known_description(spec)
    scene = make_scene(make_config({"method": spec, "clients": 20}))
    assert about_method(spec, known, "here") == about_method(spec, describe(scene), "here")


def test_other_spellings_are_not_in_the_catalog():
    assert known_description("ditto:lam=0.5") is None and known_description("my_methods:FedHalf") is None
