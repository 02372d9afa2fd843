"""The house itself: few files at the top, rooms that say what they are, imports at the top, and words of the field."""

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import plures

ROOT = Path(__file__).parent.parent
PACKAGE = Path(plures.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


def source(path):
    return path.read_text(encoding="utf-8")


def name_of(path):
    return str(path.relative_to(PACKAGE))


def test_at_most_ten_files_lie_at_the_top():
    assert len([path for path in PACKAGE.iterdir() if path.is_file()]) <= 10


@pytest.mark.parametrize("room", ROOMS[1:], ids=name_of)
def test_a_room_says_what_lives_there_and_what_does_not(room):
    text = ast.get_docstring(ast.parse(source(room / "__init__.py")))
    sentences = re.split(r"[.:](?:\s|$)", text.strip())
    assert len([sentence for sentence in sentences if sentence.strip()]) >= 2
    assert len(text) < 600


def test_every_file_has_a_text_at_its_top():
    assert [name_of(path) for path in FILES if not ast.get_docstring(ast.parse(source(path)))] == []


def imports_inside_functions(path):
    """(line, text of the line) of each."""
    lines, found = source(path).splitlines(), []
    for outer in ast.walk(ast.parse(source(path))):
        if isinstance(outer, ast.FunctionDef):
            for node in ast.walk(outer):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    found.append((node.lineno, lines[node.lineno - 1]))
    return found


def test_imports_inside_functions_have_a_reason_beside_them():
    without = [
        f"{name_of(path)}:{number}"
        for path in FILES
        for number, line in imports_inside_functions(path)
        if "#" not in line and "#" not in source(path).splitlines()[number - 2]
    ]
    assert without == []


def test_private_names_of_torch_are_in_one_file():
    kinds = (r"torch\._[a-zA-Z]", r"torch\.utils\._", r"modules\.\w+ import _", r"aten\._", r"from torch\.\w+\._")
    private = re.compile("|".join(kinds))
    found = [name_of(path) for path in FILES if private.search(source(path))]
    assert found == ["engine/private.py"]


def test_gradients_are_called_gradients():
    """The one place that may say otherwise is the name that 0.1.0 gave a field in its checkpoints."""
    lines = [
        (name_of(path), line.strip())
        for path in FILES
        for line in source(path).splitlines()
        if re.search(r"\bslopes?\b", line, re.I)
    ]
    assert lines == [("runs/checkpoint.py", '"gradient": "slope",')]


# The public functions, and what they take

IMPLEMENTED = """to_json from_json close play usage manifest results models started played ended evaluate run take
finish""".split()
CORE = [path for path in FILES if name_of(path).split("/")[0] in ("simulate", "runs", "learn")]


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_public_functions_have_docstrings(path):
    """Those that implement a function of a protocol or a base class are explained there."""
    tree = ast.parse(source(path))
    owners = [tree, *[node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                assert node.name in IMPLEMENTED or ast.get_docstring(node), f"{name_of(path)}: {node.name}"


def test_no_keyword_arguments_of_any_name():
    allowed = {"cli/options.py"}  # where the options of a command are made from the fields of a config
    found = {
        name_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(source(path)))
        if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None
    }
    allowed |= {"federate/watchdog.py"}  # which stands between Flower and functions of its own
    assert found - allowed - {"engine/private.py", "report/matplotlib_kit.py", "report/plotly_kit.py"} == set()


# The pages for people who carry on


def test_places_of_the_architecture_page_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for path, name in re.findall(r"`(?:plures/)?([\w/]+\.py): ([\w.]+)`", text):
        assert (PACKAGE / path).exists(), path
        assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", source(PACKAGE / path)), f"{path}: {name}"
    for path in re.findall(r"`([\w/.-]+\.(?:py|md|toml))`", text):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_package_index_is_the_readme_without_links_to_files():
    made = script("make_package_page").package_page((ROOT / "README.md").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "package-page.md").read_text(encoding="utf-8")
    assert page == made, "run: python scripts/make_package_page.py"
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]+)\)", page))


def test_version_is_the_same_everywhere():
    assert f"version: {plures.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{plures.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"] and project["authors"] == [{"name": "Plures contributors"}]
    assert "urls" not in project
