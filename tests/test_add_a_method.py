"""The page docs/add-a-method.md, followed word for word: from outside the package first, and then inside it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plures

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "add-a-method.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
FILE, INSIDES, PICTURES, LINE = [block for kind, block in BLOCKS if kind == "python"]
COMMANDS = next(block for kind, block in BLOCKS if kind == "")
ENTRY_POINTS = next(block for kind, block in BLOCKS if kind == "toml")
CALL = "import sys; from plures.cli.main import call; sys.exit(call(sys.argv[1:]))"


def run(folder, *words, **more):
    """A command in a process of its own, in a folder."""
    command = [sys.executable, "-c", CALL, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_method_of_the_docs_is_one_short_file_and_one_line():
    assert len(FILE.splitlines()) < 60
    assert len(LINE.splitlines()) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the file of the page, its picture added as the page says."""
    place = tmp_path_factory.mktemp("own")
    setting = next(line for line in FILE.splitlines() if "plures.setting(" in line)
    with_picture = FILE.replace(setting, f"{INSIDES.rstrip()}\n{setting}") + "\n\n" + PICTURES
    (place / "my_methods.py").write_text(with_picture)
    return place


def test_commands_of_the_page_work_outside_the_package(folder):
    outputs = {}
    for line in COMMANDS.splitlines():
        words = line.removeprefix("plures ").split()
        if words[0] in ("run", "compare"):
            words += ["--clients", "4", "--quiet"]
        outputs[line] = run(folder, *words)
    summary = json.loads((folder / "half" / "summary.json").read_text())
    assert summary["method"] == "my_methods:FedHalf:share=0.3" and summary["settings"] == {"share": 0.3}
    assert summary["personal"]["model"] == "slow copy" and summary["engine"]["eager"] == 0
    shown = outputs["plures show my_methods:FedHalf"]
    assert "share = 0.5: how far the personal model moves" in shown and "never sent: 19.2 kB" in shown
    compared = json.loads((folder / "both" / "my_methods-FedHalf" / "summary.json").read_text())
    assert compared["settings"] == {"share": 0.3}
    page = (folder / "half.html").read_text()
    assert "Slow copies" in page and "the farther, the more personal" in page


def test_a_stopped_run_of_an_own_method_is_resumed(folder, monkeypatch):
    monkeypatch.chdir(folder)
    options = {"rounds": 4, "clients": 4, "checkpoint_every": 1}
    whole = plures.run("my_methods:FedHalf", **options)

    class Stop(plures.Callback):
        def played(self, state, row):
            if row.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(plures.errors.Interrupted):
        plures.run("my_methods:FedHalf", out=folder / "stopped", callback=Stop(), **options)
    run(folder, "resume", "stopped", "--quiet", "--trust")
    found = json.loads((folder / "stopped" / "summary.json").read_text())
    assert found["digest"] == whole.summary["digest"]


def test_methods_addons_and_data_of_other_packages_have_plain_names(folder, tmp_path):
    """A package that is installed, as far as Python's import system can tell: files and their metadata."""
    shutil.copy(folder / "my_methods.py", tmp_path)
    (tmp_path / "my_addons.py").write_text(
        '"""HalfProx: prox with half of the strength."""\n'
        "from plures.methods.addons.prox import Prox\n\n\n"
        "class HalfProx(Prox):\n"
        '    """Half of the pull towards the received model."""\n'
    )
    (tmp_path / "my_data.py").write_text(
        "import numpy as np\n\n\n"
        "def wards():\n"
        '    """Two wards of a hospital that was made up."""\n'
        "    rng = np.random.default_rng(0)\n"
        "    return rng.normal(size=(40, 3)).astype('float32'), rng.integers(0, 2, 40), np.arange(40) % 2\n"
    )
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", ENTRY_POINTS).replace('"', "")
    (metadata / "entry_points.txt").write_text(lines)
    work = tmp_path / "work"
    work.mkdir()
    environment = {"env": {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}}
    listed = run(work, "list", "methods", **environment)
    assert re.search(r"^fedhalf +FedAvg, beside which", listed, re.M)
    assert re.search(r"^\+halfprox +Half of the pull", listed, re.M)
    assert re.search(r"^wards +Two wards", run(work, "list", "data", **environment), re.M)
    words = ["run", "fedhalf", "--data", "wards", "--rounds", "2", "--json", "--quiet"]
    assert json.loads(run(work, *words, **environment))["clients"] == 2
    words = ["run", "fedavg+halfprox:mu=0.5", "--rounds", "1", "--clients", "3", "--json", "--quiet"]
    assert json.loads(run(work, *words, **environment))["settings"]["mu"] == 0.5


def test_method_added_to_the_package_as_the_docs_say_runs(tmp_path):
    package = tmp_path / "plures"
    shutil.copytree(Path(plures.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "methods" / "fedhalf.py").write_text(FILE)
    table = package / "methods" / "__init__.py"
    first = '        "fedavg": "plures.methods.fedavg:FedAvg",\n'
    table.write_text(table.read_text().replace(first, first + LINE))
    options = ["run", "fedhalf", "--set", "share=0.25", "--clients", "4", "--rounds", "2", "--json", "--workers", "2"]
    summary = json.loads(run(tmp_path, *options))
    assert summary["settings"] == {"share": 0.25} and summary["personal"]["model"] == "slow copy"
