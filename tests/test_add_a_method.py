"""The page docs/add-a-method.md, followed word for word in a copy of the package."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plures

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-method.md").read_text(), re.DOTALL)


def test_method_of_the_docs_is_one_short_file_and_one_line(page):
    file, line = page
    assert len(file.splitlines()) < 60
    assert len(line.splitlines()) == 1


def test_method_added_as_the_docs_say_runs(page, tmp_path):
    file, line = page
    package = tmp_path / "plures"
    shutil.copytree(Path(plures.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "methods" / "fedhalf.py").write_text(file)
    table = package / "methods" / "__init__.py"
    text = table.read_text()
    text = text.replace("from .local import Local\n", "from .fedhalf import FedHalf\nfrom .local import Local\n")
    table.write_text(text.replace('    "local": Local,\n', f'    "local": Local,\n{line}'))
    command = [sys.executable, "-c", "import sys; from plures.cli.main import call; sys.exit(call(sys.argv[1:]))"]
    options = ["run", "fedhalf", "--set", "share=0.25", "--clients", "4", "--rounds", "2", "--json", "--workers", "2"]
    done = subprocess.run(command + options, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["settings"] == {"share": 0.25} and summary["personal"]["model"] == "slow copy"
