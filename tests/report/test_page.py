"""The report as a reader meets it: in a browser, offline, with mouse and keyboard, wide and narrow, light and dark."""

import contextlib
import re
from pathlib import Path

import pytest

from plures import report
from plures.runs.callbacks import Callback
from plures.runs.config import make_config
from plures.studies.compare import Comparison, compare_methods

sync_api = pytest.importorskip("playwright.sync_api", reason="the report is looked at with playwright")
pytest.importorskip("plotly", reason="the figures are drawn with plotly")
CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = """--no-sandbox --headless=new --disable-dev-shm-usage --disable-gpu --disable-background-networking
--disable-component-update --disable-sync --no-first-run""".split()
pytestmark = [
    pytest.mark.xdist_group("report"),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no Chromium to look at the report with"),
]
OWN = "methods_of_the_page"  # a module with a method of the user's own
METHODS = ["local", "fedavg", "fedala:cap=3", "fedrod", "pfedla", "plgu-lf:personal=1", f"{OWN}:FedHalf"]
WINDOWS = [(1280, "light"), (390, "dark")]
FIGURES = """rounds harmed spread split new-clients blend-2 blend-clients-2 path-2 heads-3 alpha-4 alpha-own-4 profile-5
surface-5 kept-5 half-6 zeta""".split()
OWN_TEXT = f'''
import math
import plotly.graph_objects as go
from plures import Method
from plures.report.insides.base import Picture


class FedHalf(Method):
    insides = "{OWN}:pictures"


def pictures(opened):
    rows = opened.simulation.state.sizes.tolist()
    draw = lambda: go.Figure(go.Bar(y=[math.nan, *rows]))  # in plotly's own style, and with a hole
    return [Picture("half", "Half of it", "A bar for each client.", "As many bars as there are clients.", draw)]
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A page with every figure: all methods that have a picture, one of the user's own, new clients, two zetas."""
    folder = tmp_path_factory.mktemp("report")
    (folder / f"{OWN}.py").write_text(OWN_TEXT)
    small = {"clients": 6, "rounds": 3, "new_clients": 1, "new_epochs": 1}
    with contextlib.chdir(folder):
        for methods, zeta in ((METHODS, 0.5), (["fedavg"], 0.9)):
            wanted = Comparison(methods, make_config({**small, "partition": f"relabel:{zeta}"}), [0])
            compare_methods(wanted, folder / str(zeta), lambda line: None, lambda *of: Callback())
        return report.write([folder / "0.5", folder / "0.9"], folder / "report.html")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield chromium
        chromium.close()


class Opened:
    """A page, and what went wrong in it or over the network."""

    def __init__(self, browser, path: Path, width: int, scheme: str) -> None:
        self.wrong: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.context.set_default_timeout(120_000)  # for machines that are busy with other tests
        self.page = self.context.new_page()
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type != "log" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda asked: self.wrong.append(asked.url) if asked.url != path.as_uri() else None)
        self.page.goto(path.as_uri())


@pytest.fixture(scope="module")
def opened(browser, path):
    """Windows by width and theme, opened once: a test leaves the page as it found it."""
    found = {(width, scheme): Opened(browser, path, width, scheme) for width, scheme in WINDOWS}
    yield found
    for one in found.values():
        one.context.close()


@pytest.fixture
def page(opened, request):
    """The wide window unless another is asked for; nothing may go wrong in it."""
    one = opened[getattr(request, "param", WINDOWS[0])]
    yield one.page
    assert one.wrong == []


def colour_of(page, property: str, where: str = "body") -> str:
    return page.evaluate(f"getComputedStyle(document.querySelector('{where}')).{property}")


def n_lines(page, figure: str) -> int:
    return page.locator(f"#{figure} .scatterlayer .trace .js-line").count()


def test_focus_is_seen_and_begins_with_the_way_to_the_results(page):
    """The first test: nothing has been pressed yet."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the results"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "theme"
    assert colour_of(page, "outlineStyle", "#theme") == "solid"


@pytest.mark.parametrize("page", WINDOWS, indirect=True)
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_window(page):
    assert page.eval_on_selector_all("figure", "all => all.map((one) => one.id)") == FIGURES
    for figure in FIGURES:
        drawn = page.locator(f"#{figure} .plot .main-svg").first
        box = drawn.bounding_box()
        assert box is not None and box["width"] > 200 and box["height"] > 150, figure
        marks = f"#{figure} :is(.scatterlayer .trace, .heatmaplayer image, .contourlayer .contour, .barlayer .point)"
        assert page.locator(marks).count() > 0, figure
        assert len(page.locator(f"#{figure} .plot").get_attribute("aria-label")) > 20, figure
    inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert inner[0] <= inner[1]
    names = page.eval_on_selector_all("tbody th", "all => all.map((one) => one.offsetWidth)")
    assert min(names) > 90, "names of methods are not cut into single letters"


@pytest.mark.parametrize("page", WINDOWS, indirect=True)
def test_the_theme_follows_the_system_and_the_switch(page):
    seen = []
    for _ in range(2):
        grid = colour_of(page, "stroke", "#rounds .gridlayer path")
        seen.append((colour_of(page, "backgroundColor"), grid, page.locator("#theme").inner_text()))
        page.locator("#theme").click()
    assert all(a != b for a, b in zip(*seen, strict=True))
    assert seen[0] == (colour_of(page, "backgroundColor"), *seen[0][1:])
    assert (seen[0][2] == "Dark") == page.evaluate("matchMedia('(prefers-color-scheme: light)').matches")


def test_hover_shows_a_value(page):
    page.locator("#rounds").scroll_into_view_if_needed()
    box = page.locator("#rounds .scatterlayer .trace .points path").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#rounds .hovertext")
    assert re.search(r"\d+\.\d\d %", page.locator("#rounds .hovertext").first.text_content())


def test_no_tool_of_a_figure_sends_anything_anywhere(page):
    tools = page.eval_on_selector_all("#rounds .modebar-btn", "all => all.map((one) => one.dataset.title)")
    assert tools == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert policy.startswith("default-src 'none'") and "https:" not in policy and "connect-src" not in policy


def test_the_legend_hides_and_shows_a_method_in_all_figures(page):
    before = n_lines(page, "rounds"), n_lines(page, "new-clients")
    chip = page.locator(".legend button", has_text="fedrod")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert n_lines(page, "rounds") == before[0] - 1 and n_lines(page, "new-clients") < before[1]
    chip.press("Enter")
    assert chip.get_attribute("aria-pressed") == "true" and n_lines(page, "rounds") == before[0]


def test_choices_are_made_with_the_keyboard(page):
    title = page.locator("#rounds .xtitle")
    assert title.text_content() == "rounds"
    page.locator("#rounds input[type=radio]").first.focus()
    page.keyboard.press("ArrowRight")
    assert title.text_content() == "bytes sent, both ways"
    page.locator("#rounds select").focus()
    first = page.locator("#rounds .js-line").first.get_attribute("d")
    page.keyboard.press("ArrowDown")
    assert page.locator("#rounds select").input_value() == "personal_worst5"
    assert page.locator("#rounds .js-line").first.get_attribute("d") != first
    slider = page.locator("#alpha-4 input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#alpha-4 output").inner_text() == "2" and slider.get_attribute("aria-valuetext") == "2"
    page.locator(".legend button").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.group").startswith("fedavg")


def test_tables_are_sorted_by_a_heading(page):
    heading = page.locator("#results .sort", has_text="personal")
    shown = "#results tbody tr td:nth-child(2)"
    for order_ in ("descending", "ascending"):
        heading.click()
        values = [float(text) for text in page.locator(shown).all_inner_texts()]
        assert values == sorted(values, reverse=order_ == "descending") and len(values) == len(METHODS) + 1
        assert page.locator("#results th[aria-sort]").get_attribute("aria-sort") == order_


@pytest.mark.parametrize("page", [(390, "dark")], indirect=True)
def test_print_is_light_also_from_a_dark_page(page):
    for _ in range(2):  # dark as the system is, and dark by the switch
        dark = colour_of(page, "stroke", "#rounds .gridlayer path")
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert colour_of(page, "stroke", "#rounds .gridlayer path") != dark
        assert colour_of(page, "backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator(".choices").first.is_visible()
        page.emulate_media(media="screen")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert colour_of(page, "stroke", "#rounds .gridlayer path") == dark
        for _ in range(2):
            page.locator("#theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
