"""The documentation says what the code does: pages, tables, links and commands."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from plures.cli.main import app
from plures.learn.solver import Solver
from plures.methods import ADDONS, METHODS
from plures.methods.spec import make_method
from plures.runs.config import make_config

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "methods"
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HEADINGS = [
    "The update",
    "What stays and what travels",
    "Settings",
    "Where its defaults come from",
    "State and bytes",
    "Differs from the paper",
    "Try it",
]
READ_CLOSELY = ["plgu-lf", "plgu-grep", "plgu-ghn", "pfedla", "heurpfedla", "fedrod", "afml", "fedala"]
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|home|root|tmp|mnt|Users|private|var)/|\b[A-Z]:\\")


@pytest.fixture(scope="module")
def script(docs_script):
    return docs_script("make_method_pages")


def read(name: str) -> str:
    return (PAGES / f"{name}.md").read_text("utf-8")


def between(page: str, words: str) -> str:
    return re.search(rf"<!-- {re.escape(words)} -->\n(.*?)\n?<!-- end -->", page, re.DOTALL)[1]


def anchors(page: str) -> set[str]:
    """What a link to a heading is called."""
    found = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page_with_its_name_its_figure_and_all_headings(name, script):
    page = read(name)
    assert page.startswith(f"# {script.title_of(name)}\n")
    assert f"]({name}.svg)" in page and (PAGES / f"{name}.svg").exists()
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    expected = HEADINGS[:-1] + ["Readings"] * (name in READ_CLOSELY) + HEADINGS[-1:]
    assert headings == expected


@pytest.mark.parametrize("name", METHODS)
def test_settings_on_a_page_are_those_of_the_code(name, script):
    assert between(read(name), "settings") == script.settings_table(METHODS[name]()), "run docs/make_method_pages.py"


@pytest.mark.parametrize("name", METHODS)
def test_the_table_of_state_is_filled(name):
    rows = between(read(name), "state").splitlines()
    assert [row.split("|")[1].split(",")[0].strip() for row in rows[4:]] == [
        "server keeps",
        "client keeps",
        "down",
        "up",
    ]


def test_the_index_has_every_method_once_in_the_order_of_the_code(script):
    rows = between(read("README"), "index").splitlines()[2:]
    names = [re.match(r"\| \[`(.+?)`\]\((.+?)\.md\)", row).groups() for row in rows]
    assert names == [(name, name) for name in METHODS]
    assert list(script.PERSONAL) == list(METHODS)
    for name, row in zip(METHODS, rows, strict=True):
        assert script.idea_of(name) in row


@pytest.mark.parametrize("addon", ADDONS)
def test_every_addon_has_its_heading_and_its_settings(addon, script):
    page = read("addons")
    assert f"\n## {addon}\n" in page
    assert between(page, f"settings {addon}") == script.addon_settings(addon), "run docs/make_method_pages.py"


def test_who_can_take_which_addon_is_what_the_code_says(script):
    page = read("addons")
    for words, now in [("hosts", script.hosts_table(tried=False)), ("pairs", script.pairs_table(tried=False))]:
        written = between(page, words).partition("\n\n")[0]
        assert written.replace("fails", "yes") == now, "run docs/make_method_pages.py"
    assert between(page, "refusals") == script.refusals_table(), "run docs/make_method_pages.py"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_local_links_and_images_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), link


@pytest.mark.parametrize("path", [*TEXTS, *sorted(PAGES.glob("*.svg"))], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_path_of_the_machine_it_was_made_on(path):
    assert not MACHINE_PATH.search(path.read_text("utf-8"))


@pytest.mark.parametrize("name", [*METHODS, "addons"])
def test_the_command_to_try_is_one_that_there_is(name):
    command = re.search(r"## Try it\n\n```\n(.+?)\n```", read(name), re.DOTALL)[1]
    program, verb, *words = shlex.split(command)
    assert program == "plures" and verb in ("run", "compare") and "\n" not in command
    n_methods = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    specs, options = words[:n_methods], words[n_methods:]
    assert len(specs) == 1 or verb == "compare"
    keys, values = options[::2], options[1::2]
    make_config({key[2:].replace("-", "_"): value for key, value in zip(keys, values, strict=True)})
    for spec in specs:
        make_method(spec, {}, Solver())
    assert name == "addons" or any(re.split(r"[:+]", spec)[0] == name for spec in specs)


def commands(page: str) -> set[str]:
    """What a page says to type: lines of code blocks, and code within sentences."""
    blocks = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    return {line.strip() for line in lines if re.match(r"\s*plures [a-z]", line)}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_on_a_page_are_those_that_there_are(path):
    for line in commands(path.read_text("utf-8")):
        command, words = get_command(app), line.split()[1:]
        while hasattr(command, "commands") and words:
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        known = {word for parameter in command.params for word in parameter.opts}
        assert set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(words))) <= known, line


def test_the_page_of_performance_says_what_was_measured(docs_script):
    script = docs_script("make_performance")
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    for part in script.PARTS:
        written = re.search(rf"<!-- {part.__name__} -->\n(.*?)\n<!-- end of", page, re.DOTALL)[1]
        assert written == "\n".join(part()), "run docs/make_performance.py"
