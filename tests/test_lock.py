"""requirements.lock names what the tested environment has, with hashes."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IS_TESTED = (platform.system(), platform.machine(), *sys.version_info[:2]) == ("Linux", "x86_64", 3, 11)


def locked() -> dict[str, tuple[str, list[str]]]:
    """Name -> version and hashes."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        name, version = re.fullmatch(r"([a-z0-9-]+)==([\w.]+)", line.split()[0]).groups()
        found[name] = version, re.findall(r" --hash=sha256:([0-9a-f]{64})(?= |$)", line)
    assert len(found) == len(lines)
    return found


def needed() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("make_lock", ROOT / "scripts" / "make_lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.needed()


def test_every_package_has_hashes():
    assert all(hashes for _, hashes in locked().values())


def test_the_lock_has_the_versions_of_the_constraints():
    pairs = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pairs and {name: locked()[name][0] for name, _ in pairs} == dict(pairs)


@pytest.mark.skipif(not IS_TESTED, reason="the lock is of Linux x86_64 and Python 3.11")
def test_the_lock_covers_what_is_installed_with_these_versions():
    pytest.importorskip("packaging")
    try:
        here = needed()
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: pip install 'plures[dev]'")
    assert here.keys() <= locked().keys(), "run scripts/make_lock.py"
    other = {name: v for name, v in here.items() if v.partition("+")[0] != locked()[name][0]}
    if other and "PLURES_LOCKED" not in os.environ:
        pytest.skip(f"this environment has other versions than requirements.lock: {other}")
    assert not other
