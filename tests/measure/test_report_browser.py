"""The page of all records in a real browser: nothing overlaps, and axe-core finds nothing."""

import importlib.util
import json
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.evidence import make_verdicts
from octavo.measure.report.html import with_images, write_report
from octavo.measure.report.kernels import Roof
from octavo.measure.report.pages import report_sections
from octavo.measure.report.plots import Figure
from octavo.measure.report.sections import Section
from octavo_testkit.serving.browser import browsing, find_browser

ROOT = Path(__file__).parents[2]
BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]
WIDTHS = (1280, 390)

# Texts of one plot whose boxes cover each other by more than a rounding, or leave the plot.
OVERLAPS = """(() => {
  const found = [];
  for (const plot of document.querySelectorAll('.plot')) {
    const room = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll('svg text')].filter(
      (node) => node.textContent.trim() && getComputedStyle(node).opacity !== '0'
    );
    const boxes = texts.map((node) => [node.textContent, node.getBoundingClientRect()])
      .filter(([, box]) => box.width > 0);
    boxes.forEach(([text, a], i) => {
      if (a.left < room.left - 2 || a.right > room.right + 2) found.push(`outside: ${text}`);
      for (const [other, b] of boxes.slice(i + 1)) {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 2 && high > 3) found.push(`${text} | ${other}`);
      }
    });
  }
  return found;
})()"""
# Every plot is there, and as large as its place after the page has another width.
DRAWN = """[...document.querySelectorAll('.plot')].every((node) => {
  const svg = node.querySelector('svg.main-svg');
  const box = svg?.getBoundingClientRect();
  return box && Math.abs(box.width - node.clientWidth) < 2 && box.height > 0.9 * node.clientHeight;
})"""

# Pictures are decoded, and none makes the page wider.
SHEETS = """[...document.querySelectorAll('.sheet')].map((node) => {
  const image = node.querySelector('img');
  return image.naturalWidth > 0 && image.alt.length > 20 && node.clientWidth < innerWidth;
})"""


def needles():
    """A heat map, which the repository's records may not have."""
    machine = Machine.current()
    return [
        Measurement(
            op="needle",
            impl="transformers",
            case={"model": "m", "haystack": "h", "recipe": recipe, "length": length}
            | {"depth": depth, "repetitions": 2},
            values={"found_percent": 100.0 - 50 * depth, "num_found": 2.0 - depth},
            machine=machine,
            command="octavo eval needle",
        )
        for recipe in ("bf16", "fp8")
        for length in (8192, 131072)
        for depth in (0.0, 0.5, 1.0)
    ]


def answers():
    """pass@1 and texts, likewise."""
    machine = Machine.current()
    about = {"model": "m", "data": "gpqa", "repetitions": 4}
    scores = {"score_percent": 40.0, "score_standard_error_percent": 2.0, "num_questions": 198.0}
    recovered = {"recovery_percent": 99.0, "recovery_standard_error_percent": 1.0}
    found = [
        ("choice", {**about, "recipe": "bfloat16"}, scores),
        ("choice", {**about, "recipe": "fp8 head+rotate+center"}, scores | recovered),
        ("texts", {"model": "m", "recipe": "fp8", "prompt": "What?", "text": "Words. " * 40}, {}),
    ]
    return [
        Measurement(
            op=op, impl="octavo", case=case, values=values, machine=machine, command="octavo eval"
        )
        for op, case, values in found
    ]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    files = sorted((ROOT / "results").glob("*.jsonl"))
    records = [row for file in files for row in with_images(store.read(file), file)]
    records += [*needles(), *answers()]
    roofs = [Roof("NVIDIA H200", 4540, 694, 1309, "measured on one H200")]
    path = tmp_path_factory.mktemp("report") / "report.html"
    sections = report_sections(records, roofs=roofs)
    write_report(sections, path, verdicts=make_verdicts(records))
    return path


# Folded sections have no plots to look at, and axe reads all of a page but what is folded.
UNFOLD = "document.querySelectorAll('details').forEach((one) => (one.open = true)); 0"


def find_axe():
    """The text of axe-core, from a Python package that carries it; None if none is installed."""
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        return None
    return next((f.read_text() for f in sorted(Path(spec.origin).parent.rglob("axe*.js"))), None)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_drawn_and_nothing_overlaps(page_file, tmp_path, width, is_dark):
    with browsing(BROWSER) as page:
        page.open(page_file.as_uri())
        page.look(width=width, height=900, is_dark=is_dark)
        page.run(UNFOLD)
        page.wait_for(DRAWN, timeout_s=60)
        assert page.run("document.documentElement.scrollWidth") <= width
        page.save_screenshot(tmp_path / "page.png")
        assert page.run(OVERLAPS) == []
        assert set(page.run(SHEETS)) == {True}
        assert page.problems == []


def test_overlaps_are_found(tmp_path):
    texts = [{"text": text, "x": 1, "y": 1, "showarrow": False} for text in ("here", "there")]
    plot = Figure(caption="c", data=({"x": [1], "y": [1]},), layout={"annotations": texts})
    write_report([Section(title="x", figures=(plot,))], tmp_path / "bad.html")
    with browsing(BROWSER) as page:
        page.open((tmp_path / "bad.html").as_uri())
        page.wait_for(DRAWN, timeout_s=60)
        assert page.run(OVERLAPS) == ["here | there"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_verdict_is_read_without_scrolling(page_file, width):
    first = "document.querySelector('.verdict').getBoundingClientRect().bottom"
    with browsing(BROWSER) as page:
        page.open(page_file.as_uri())
        page.look(width=width, height=800)
        assert 0 < page.run(first) <= 800
        if width == 1280:
            assert page.run("document.documentElement.scrollHeight") < 12 * 800
        # Contents stay where they are, and lead into sections that are folded.
        page.run("document.querySelector('nav ul ul li:last-child a').click(); 0")
        page.wait_for("scrollY > 0 && document.querySelector('details.section[open]') !== null")
        assert 0 <= page.run("document.querySelector('nav').getBoundingClientRect().top") < 100


def test_paper_is_light_and_shows_the_verdict(page_file):
    with browsing(BROWSER) as page:
        page.open(page_file.as_uri())
        page.look(width=1280, height=900, is_dark=True)
        dark = page.run("getComputedStyle(document.body).color")
        page.call("Emulation.setEmulatedMedia", media="print", features=[])
        assert page.run("getComputedStyle(document.body).color") != dark
        assert page.run("getComputedStyle(document.querySelector('nav')).display") == "none"
        assert page.run("document.querySelector('.verdict').offsetHeight") > 100


@pytest.mark.parametrize(
    ("width", "is_dark"), [(1280, False), (390, False), (1280, True)], ids=["1280", "390", "dark"]
)
def test_axe_core_finds_nothing(page_file, width, is_dark):
    axe = find_axe()
    if axe is None:
        pytest.skip("no axe-core: pip install --no-deps axe-playwright-python")
    with browsing(BROWSER) as page:
        page.open(page_file.as_uri())
        page.look(width=width, height=900, is_dark=is_dark)
        page.run(UNFOLD)
        page.wait_for(DRAWN, timeout_s=60)
        page.run(f"{axe}; 0")
        page.run("axe.run().then((found) => { window.found = found.violations; }); 0")
        page.wait_for("window.found !== undefined", timeout_s=300)
        found = json.loads(page.run("JSON.stringify(window.found)"))
        assert [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found] == []


def test_the_keyboard_reaches_links_sections_and_tables(page_file):
    with browsing(BROWSER) as page:
        page.open(page_file.as_uri())
        page.look(width=1280, height=900)
        page.run(UNFOLD)
        page.wait_for(DRAWN, timeout_s=60)
        seen = set()
        for _ in range(200):
            page.press("Tab")
            seen.add(page.run("document.activeElement.tagName"))
        assert {"A", "DIV", "SUMMARY"} <= seen
