"""The report: labels, tables, plots, and a page that is complete, escaped and loads nothing."""

import json
import math
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from octavo.errors import ConfigError, UnsupportedError
from octavo.measure.records import Machine, Measurement
from octavo.measure.report import plots, tables
from octavo.measure.report.html import describe, render, write_report
from octavo.measure.report.plots import Figure
from octavo.measure.report.sections import Section
from octavo.measure.report.tables import Table, format_column, label

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror='x'>&\"`{{7*7}}"
MACHINE = Machine(
    cpu="A CPU",
    python="3.12.1",
    platform="Linux",
    gpu="NVIDIA H200",
    capability=(9, 0),
    versions={"torch": "2.11.0"},
)


def row(impl="triton", *, case=None, op="attention", **values) -> Measurement:
    return Measurement(
        op=op, impl=impl, case=case or {}, values=values, machine=MACHINE, command="octavo bench"
    )


SQNR = [
    row(case={"tensor": tensor, "granularity": granularity}, sqnr_db=sqnr)
    for tensor, granularity, sqnr in [
        ("key", "tensor", 12.5),
        ("key", "head", 31.25),
        ("value", "tensor", math.inf),
        ("value", "head", math.nan),
    ]
]
TIMES = [
    row(impl, case={"length": length}, median_ms=length * factor)
    for impl, factor in [("fa3", 0.5), ("gluon", 0.25)]
    for length in (8192, 512)
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("median_ms", "median (ms)"),
        ("sqnr_db", "SQNR (dB)"),
        ("relative_rms", "relative RMS"),
        ("page_bytes", "page (bytes)"),
        ("bytes", "bytes"),
        ("read_gb_per_s", "read (GB/s)"),
        ("output_tokens_per_s", "output (tokens/s)"),
        ("head_dim", "head dim"),
        ("ttft_ms", "TTFT (ms)"),
        ("recovery_percent", "recovery (%)"),
    ],
)
def test_label_says_the_unit(name, text):
    assert label(name) == text


@pytest.mark.parametrize(
    ("cells", "texts"),
    [
        ([1, 2.0, 131072], ["1", "2", "131,072"]),
        ([0.75, 12, 1234.56], ["0.7500", "12.00", "1,235"]),
        ([0.000123456, 1.5e-7, 0.0, 2.5e9], ["0.0001235", "1.500e−07", "0", "2.500e+09"]),
        ([-1.5, math.inf, -math.inf, math.nan], ["−1.500", "∞", "−∞", "NaN"]),
        (["a", None, True, False], ["a", "–", "yes", "no"]),
        ([10**15, 1], ["1.000e+15", "1"]),
        ([], []),
    ],
    ids=str,
)
def test_columns_as_text(cells, texts):
    assert format_column(cells) == texts


def test_table_of_all_names():
    table = tables.from_records([*TIMES[:1], *SQNR[:1]], caption="All")
    assert table.header == (
        "op",
        "impl",
        "length",
        "tensor",
        "granularity",
        "median (ms)",
        "SQNR (dB)",
    )
    assert table.rows == (
        ("attention", "fa3", 8192, None, None, 4096.0, None),
        ("attention", "triton", None, "key", "tensor", None, 12.5),
    )
    assert table.numeric == (False, False, True, False, False, True, True)


def test_table_of_chosen_columns():
    table = tables.from_records(TIMES, caption="Times", columns=["impl", "median_ms"])
    assert table.texts()[0] == ("fa3", "4,096")


def test_table_without_rows():
    table = tables.from_records([], caption="None")
    assert (table.texts(), table.numeric) == ([], (False, False))


def test_table_rows_must_fit_the_header():
    with pytest.raises(ConfigError, match="every row of 'x' must have 2 cells"):
        Table(caption="x", header=("a", "b"), rows=((1,),))


def test_pivot():
    table = tables.pivot(SQNR, caption="", row="tensor", column="granularity", value="sqnr_db")
    assert table.header == ("tensor", "tensor", "head")
    assert table.texts() == [("key", "12.50", "31.25"), ("value", "∞", "NaN")]


def test_pivot_leaves_gaps_and_refuses_two_values_for_a_cell():
    table = tables.pivot(SQNR[:3], caption="", row="tensor", column="granularity", value="sqnr_db")
    assert table.rows[1] == ("value", math.inf, None)
    with pytest.raises(ConfigError, match="two records for tensor='key', granularity='tensor'"):
        tables.pivot(SQNR * 2, caption="", row="tensor", column="granularity", value="sqnr_db")


def test_bars_have_one_trace_per_series_and_no_bar_for_what_is_not_finite():
    figure = plots.bars(SQNR, caption="c", x="tensor", y="sqnr_db", series="granularity")
    assert [(t["name"], t["x"], t["y"]) for t in figure.data] == [
        ("tensor", ["key", "value"], [12.5, None]),
        ("head", ["key", "value"], [31.25, None]),
    ]
    assert figure.layout["yaxis"]["title"]["text"] == "SQNR (dB)"
    assert figure.layout["showlegend"]


def test_lines_are_ordered_and_marked_where_measured():
    figure = plots.lines(TIMES, caption="c", x="length", y="median_ms", is_log=True)
    assert [t["x"] for t in figure.data] == [[512, 8192]] * 2
    assert figure.data[0]["y"] == [256.0, 4096.0]
    assert figure.layout["xaxis"]["type"] == "log"
    assert figure.layout["xaxis"]["ticktext"] == ["512", "8,192"]
    assert figure.layout["yaxis"]["type"] == "log"


def test_one_series_needs_no_legend():
    figure = plots.lines(TIMES[:2], caption="c", x="length", y="median_ms")
    assert not figure.layout["showlegend"]
    assert figure.layout["xaxis"]["type"] == "linear" and "ticktext" not in figure.layout["xaxis"]


def test_lines_need_numbers():
    with pytest.raises(ConfigError, match="x axis of lines needs numbers, got 'key' for tensor"):
        plots.lines(SQNR, caption="c", x="tensor", y="sqnr_db")


@pytest.mark.parametrize(("x", "y"), [("nothing", "sqnr_db"), ("tensor", "granularity")])
def test_plots_need_records_with_both_axes(x, y):
    with pytest.raises(ConfigError, match=f"no record has both {x} and a number {y}"):
        plots.bars(SQNR, caption="c", x=x, y=y)


@pytest.mark.parametrize(
    "figure",
    [
        plots.bars(SQNR, caption="c", x="tensor", y="sqnr_db", series="granularity"),
        plots.lines(TIMES, caption="c", x="length", y="median_ms", is_log=True),
    ],
    ids=["bars", "lines"],
)
def test_plotly_accepts_the_figures(figure):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    graph_objects.Figure(data=figure.data, layout=figure.layout)  # raises on unknown properties


def test_a_machine_in_one_line():
    text = "NVIDIA H200 (compute capability 9.0) · A CPU · Linux · Python 3.12.1 · torch 2.11.0"
    assert describe(MACHINE) == text
    assert describe(replace(MACHINE, gpu=None, capability=None)).startswith("A CPU · Linux")


class Page(HTMLParser):
    """What a browser would find: balanced tags, text, scripts, and all that loads or links."""

    VOID = {"meta", "link", "img", "br", "hr", "input"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.stack: list[str] = []
        self.links: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles = ""
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        inside = self.stack[-1] if self.stack else ""
        if inside == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data
        elif inside == "style":
            self.styles += data
        else:
            self.text += data

    @property
    def figures(self) -> list[dict]:
        kind = "application/json"
        return [json.loads(text) for attrs, text in self.scripts if attrs.get("type") == kind]


@pytest.fixture(scope="module")
def page() -> Page:
    sections = [
        Section(
            title="Accuracy",
            text="One paragraph.\n\n\n\nAnother one.",
            figures=(plots.bars(SQNR, caption="What it shows.", x="tensor", y="sqnr_db"),),
            tables=(tables.from_records(SQNR, caption="The numbers"),),
        ),
        Section(
            title="Speed", figures=(plots.lines(TIMES, caption="", x="length", y="median_ms"),)
        ),
        Section(title="No data"),
    ]
    return Page(
        render(
            sections,
            title="A title",
            summary="In short.",
            machines=[MACHINE, MACHINE],
            commands=["octavo bench", "octavo bench"],
        )
    )


def test_page_is_well_formed(page):
    assert page.stack == []
    assert page.tags.count("details") == 3
    assert page.tags.count("table") == 1


@pytest.mark.parametrize(
    "text",
    [
        "A title",
        "In short.",
        "One paragraph.",
        "What it shows.",
        "The numbers",
        "12.50",
        "∞",
        "NaN",
    ],
)
def test_page_contains(page, text):
    assert text in page.text


def test_page_names_machine_and_command_once(page):
    assert page.text.count(describe(MACHINE)) == 1
    assert page.text.count("octavo bench") == 1


def test_page_has_the_data_of_its_figures(page):
    assert [figure["data"][0]["y"][0] for figure in page.figures] == [12.5, 256.0]


def test_page_links_only_to_itself_and_lets_nothing_load(page):
    assert page.links == ["#group-1", "#section-1", "#section-2", "#section-3"]
    assert "url(" not in page.styles
    assert "@import" not in page.styles


def test_page_forbids_the_network():
    assert "default-src 'none'; script-src 'unsafe-inline'" in render([])


def test_page_without_figures_is_small():
    text = render([Section(title="Only text")])
    assert len(text) < 10_000
    assert Page(text).scripts == []


def test_hostile_texts_stay_texts():
    record = row(HOSTILE, op=HOSTILE, case={HOSTILE: HOSTILE}, v=1.0)
    sections = [
        Section(
            title=HOSTILE,
            text=HOSTILE,
            figures=(plots.bars([record], caption=HOSTILE, x=HOSTILE, y="v"),),
            tables=(tables.from_records([record], caption=HOSTILE),),
        )
    ]
    machine = replace(MACHINE, gpu=HOSTILE, versions={HOSTILE: HOSTILE})
    text = render(sections, title=HOSTILE, summary=HOSTILE, machines=[machine], commands=[HOSTILE])
    page = Page(text)
    assert page.stack == []
    assert "img" not in page.tags
    assert page.links == []
    assert len(page.scripts) == 3  # the figure's data, plotly, ours
    assert page.text.count(HOSTILE) == 15
    (figure,) = page.figures
    # plotly reads tags in its texts, so they are escaped once more inside the JSON
    drawn = [figure["data"][0]["name"], figure["data"][0]["x"][0]]
    drawn.append(figure["layout"]["xaxis"]["title"]["text"])
    assert not any("<" in text.replace("<br>", "") for text in drawn)


def test_surrogates_and_odd_characters_are_written(tmp_path):
    path = tmp_path / "report.html"
    write_report([Section(title="\udcff\u2028😀")], path)
    assert "\\udcff\u2028😀" in path.read_text(encoding="utf-8")


def test_a_report_replaces_the_old_one_in_one_step(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report([Section(title="new")], str(path), title="T")
    assert "new" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("missing", ["jinja2", "plotly"])
def test_a_missing_extra_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UnsupportedError, match=r"pip install .*\[report\]'"):
        render([])


def test_a_figure_can_be_made_by_hand():
    figure = Figure(caption="Any plot.", data=({"type": "pie", "values": [1, 2]},), layout={})
    assert Page(render([Section(title="x", figures=(figure,))])).figures[0]["layout"] == {}
