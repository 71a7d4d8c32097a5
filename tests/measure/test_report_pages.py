"""The page of all records: what it shows, what it says it does not show, and its other forms."""

import csv
import io
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.html import render, sections_markdown
from octavo.measure.report.kernels import Roof
from octavo.measure.report.pages import make_parts, report_sections
from octavo.measure.report.plots import Figure
from octavo.measure.report.sections import Link, Section
from octavo.measure.report.tables import Table, to_csv

RESULTS = Path(__file__).parents[2] / "results"
ROOFS = [Roof("NVIDIA H200", 4540, 694, 1309, "measured on one H200")]
MACHINE = Machine(
    cpu="A CPU", python="3.12", platform="Linux", gpu="A GPU", versions={"torch": "2.11"}
)
row = partial(Measurement, impl="octavo", machine=MACHINE, command="octavo bench throughput")
THROUGHPUT = row(
    op="throughput",
    case={"model": "m", "row": "fp8"},
    values={"output_throughput": 5.0, "output_throughput_gain": 1.5},
    baseline="auto",
)


@pytest.fixture(scope="module")
def sections():
    return report_sections(store.read(RESULTS), roofs=ROOFS)


def test_a_page_of_the_repository_s_records(sections):
    titles = [section.title for section in sections]
    assert len(set(titles)) == len(titles)
    for start in ("Latency", "Throughput", "Vision", "Attention kernels", "Perplexity", "Images"):
        assert any(title.startswith(start) for title in titles), start
    assert titles[0] == "Summary" and titles[-2:] == [
        "Machines, versions and commands",
        "Not shown",
    ]
    assert {link.to for link in sections[0].links} <= set(titles)
    assert len(sections[0].links) > 8


def test_every_plot_says_what_it_shows_and_its_units(sections):
    figures = [figure for section in sections for figure in section.figures]
    assert len(figures) > 15
    for figure in figures:
        assert len(figure.caption.split()) > 5
        for axis, letter in (("xaxis", "x"), ("yaxis", "y")):
            title = figure.layout[axis]["title"]["text"]
            values = [value for trace in figure.data for value in trace.get(letter, ())]
            layout = figure.layout[axis]
            has_names = "ticktext" in layout and layout.get("type") != "log"
            is_text = has_names or any(isinstance(value, str) for value in values)
            assert is_text or "(" in title, (figure.caption, axis)


def test_no_record_is_dropped_in_silence(sections):
    records = store.read(RESULTS)
    parts = make_parts()
    by_op = {op: part for part in parts for op in part.ops}
    num_hidden = sum(r.op not in by_op or bool(by_op[r.op].missing_names(r)) for r in records)
    (table,) = sections[-1].tables
    assert sum(cells[2] for cells in table.rows) == num_hidden > 0
    assert sum(cells[2] for cells in sections[-2].tables[1].rows) == len(records)


def test_records_of_unknown_ops_and_incomplete_ones_are_named():
    hidden = [
        row(op="new_thing", case={}, values={"v": 1.0}),
        row(op="attention", case={"recipe": "bf16"}, values={"relative_rms": 0.1}),
        row(op="ttft_fit", case={}, values={}),
    ]
    *_, last = report_sections([THROUGHPUT, *hidden, hidden[0]], notes=["No advice: a reason."])
    assert last.title == "Not shown" and last.paragraphs[-1] == "No advice: a reason."
    assert last.tables[0].rows == (
        ("new_thing", "octavo", 2, "no section for this op"),
        ("attention", "octavo", 1, "without shape, operands, median_ms"),
        ("ttft_fit", "octavo", 1, "fits are made again from the records of lengths"),
    )


def test_a_page_of_one_record_has_only_its_section_and_where_it_comes_from():
    summary, throughput, sources = report_sections([THROUGHPUT])
    assert summary.links == (Link(throughput.headline, throughput.title),)
    machines, commands = sources.tables
    assert machines.rows == (("M1", "A GPU", "A CPU", "Linux", "3.12", "2.11"),)
    assert commands.rows[0][:3] == ("throughput", "M1", 1)
    assert commands.rows[0][-1] == "octavo bench throughput"


def test_scales_layer_by_layer_and_of_pipelines():
    values = {"amax": 1.0, "headroom": 1.5, "sqnr_db": 30.0, "num_passes": 1, "num_nonfinite": 0}
    case = {"layer": "layers.0", "tensor": "q"}
    records = [
        row(op="calibrate", case=case, values=values),
        row(op="calibrate_pipeline", case=case | {"group": "dit.to_q"}, values=values),
    ]
    titles = [section.title for section in report_sections(records)]
    assert titles[:2] == [
        "Static scales, layer by layer",
        "Static scales of a pipeline, by kind of layer",
    ]


def test_advice_is_shown_and_has_no_command_of_its_own():
    compared = row(
        op="advise",
        case={"model": "m", "what": "ITL", "row": "fp8"},
        values={"measured_speedup": 2},
    )
    sections = report_sections([THROUGHPUT], compared=[compared])
    assert any(section.title.startswith("Advice") for section in sections)
    assert len(sections[-1].tables[1].rows) == 1


def test_no_records():
    with pytest.raises(ConfigError, match="expected records to show, got none"):
        report_sections([])


def test_links_lead_to_sections_of_the_page():
    first = Section(title="First", links=(Link("see <there>", "Second"),))
    page = render([first, Section(title="Second"), Section(title="Second")])
    assert '<a href="#section-2">see &lt;there&gt;</a>' in page
    with pytest.raises(
        ConfigError, match="expected a link to a section of this page, got 'Second'"
    ):
        render([first])


def test_long_tables_are_folded_and_tall_plots_have_room():
    def table(num_rows):
        return Table(caption="Numbers", header=("n",), rows=tuple((n,) for n in range(num_rows)))

    assert "<details>" not in render([Section(title="x", tables=(table(24),))])
    page = render([Section(title="x", tables=(table(25),))])
    assert "<details><summary>Numbers: 25 rows</summary>" in page and "</details>" in page
    figure = Figure(caption="c", data=(), layout={}, height_rem=30)
    assert 'style="height: 30rem"' in render([Section(title="x", figures=(figure,))])


def test_numbers_that_json_does_not_have_are_gaps():
    trace = {"y": [1.0, math.nan, (math.inf,)], "error_y": {"array": [-math.inf]}}
    page = render([Section(title="x", figures=(Figure(caption="c", data=(trace,), layout={}),))])
    assert '"data": [{"error_y": {"array": [null]}, "y": [1.0, null, [null]]}]' in page


def test_markdown_has_texts_links_and_tables():
    text = sections_markdown(report_sections([THROUGHPUT]), title="T", summary="In short.")
    assert text.startswith("# T\n\nIn short.\n\n## Summary\n")
    assert "](#throughput-m-a-gpu)" in text
    assert "Plot: Output tokens per second" in text
    assert "| row | output (tokens/s) | gain (×) |" in text


def test_csv_has_every_record_and_every_name():
    odd = row(op="x", case={"note": 'a, "b"\nc'}, values={"v": math.inf, "w": 0.1})
    text = to_csv([THROUGHPUT, replace(odd, command="other")])
    first, second = csv.DictReader(io.StringIO(text))
    assert (first["op"], first["output_throughput_gain"], first["note"]) == (
        "throughput",
        "1.5",
        "",
    )
    assert (second["note"], second["v"], second["w"]) == ('a, "b"\nc', "inf", "0.1")
    assert (second["command"], second["machine"]) == ("other", "A GPU, torch 2.11")
