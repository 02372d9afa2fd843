"""Writes requirements.lock: the versions of the environment that this project is tested with, with SHA-256 hashes.

    python scripts/make_lock.py [--wheel torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl]

It names what `plures[dev]` needs, as it is installed in the environment that runs the script, and for each version the
hashes of all its files on PyPI. The hash of a file that is not from PyPI, as torch's build for the CPU alone, is added
by --wheel. `tests/test_lock.py` checks the file.
"""

import argparse
import hashlib
import importlib.metadata
import re
import urllib.request
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

LOCK = Path(__file__).parent.parent / "requirements.lock"
INDEX = "https://pypi.org/simple"
HEAD = """\
# The environment that Plures is tested with: Linux x86_64, Python 3.11. Made by scripts/make_lock.py.
#
#     pip install --require-hashes --extra-index-url https://download.pytorch.org/whl/cpu -r requirements.lock
#     pip install --no-deps plures
#
# pip then takes no file whose hash is not here. Of torch there are the hashes of PyPI's files, and that of the build
# for the CPU alone, which the extra index has. Without the extra index pip takes PyPI's build, which brings the
# libraries for GPUs that it names itself: they are not in this list, so leave out --require-hashes there.
"""


def needed(project: str = "plures", extra: str = "dev") -> dict[str, str]:
    """What the project needs with an extra, as it is installed here: name -> version."""
    found: dict[str, str] = {}
    waiting, seen = [(project, frozenset({extra}))], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        name, extras = one
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in (*extras, "")):
                continue
            other = canonicalize_name(requirement.name)
            if other != project:
                found[other] = importlib.metadata.version(other)
            waiting.append((other, frozenset(requirement.extras)))
    return dict(sorted(found.items()))


def published(name: str, version: str) -> set[str]:
    """The hashes of all files of a version on PyPI."""
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as answer:
        page = answer.read().decode()
    wanted, found = Version(version).public, set()
    for file, digest in re.findall(r"/([^/\"#]+)#sha256=([0-9a-f]{64})", page):
        try:
            parsed = parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
        except (InvalidWheelFilename, InvalidSdistFilename):
            continue
        if parsed.public == wanted:
            found.add(digest)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, action="append", default=[])
    own: dict[str, set[str]] = {}
    for path in parser.parse_args().wheel:
        name = parse_wheel_filename(path.name)[0]
        own.setdefault(name, set()).add(hashlib.sha256(path.read_bytes()).hexdigest())
    lines = [HEAD]
    for name, version in needed().items():
        hashes = published(name, version) | own.get(name, set())
        if not hashes:
            raise SystemExit(f"PyPI has no file of {name} {version}; name the one that was installed with --wheel")
        lines.append(
            " \\\n".join([f"{name}=={Version(version).public}", *sorted(f"    --hash=sha256:{h}" for h in hashes)])
        )
    LOCK.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LOCK.name}: {len(lines) - 1} packages")


if __name__ == "__main__":
    main()
