"""The page of all records: what it shows, what it says it does not show, and its other forms."""

import csv
import io
import math
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.measure import store
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.evidence import make_verdicts
from octavo.measure.report.html import render, sections_markdown
from octavo.measure.report.kernels import Roof
from octavo.measure.report.pages import make_parts, report_sections
from octavo.measure.report.plots import Figure
from octavo.measure.report.sections import Section
from octavo.measure.report.tables import to_csv
from octavo.measure.report.verdict import FASTER

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
    places = [(section.group, section.title) for section in sections]
    assert len(set(places)) == len(places)
    for start in ("Latency", "Throughput", "Vision", "Attention kernels", "Perplexity", "Images"):
        assert any(title.startswith(start) for title in titles), start
    assert titles[-2:] == ["Machines, versions and commands", "Not shown"]


def test_a_machine_is_named_once_over_its_sections(sections):
    machines = [machine for machine, _ in groupby(section.group for section in sections)]
    assert machines == ["NVIDIA H200", "Intel(R) Xeon(R) Processor @ 2.50GHz", ""]
    for section in sections[:-2]:
        assert section.group not in (section.title + section.headline)


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
    throughput, sources = report_sections([THROUGHPUT])
    assert (throughput.title, throughput.group) == ("Throughput: m", "A GPU")
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


def test_contents_lead_inside_folded_sections():
    sections = [Section(title=f"<{n}>", group="A GPU" * (n < 2)) for n in range(3)]
    page = render(sections)
    assert '<a href="#section-1">&lt;0&gt;</a>' in page and 'id="section-1" class="body"' in page
    assert page.index('href="#group-1">A GPU') < page.index('href="#group-2">About these')
    assert "<h2>A GPU</h2>" in page and "<h2>About these numbers</h2>" in page
    assert '<details class="section">' in page and '<details class="section" open' not in page
    assert "<nav" not in render(sections[:2])  # short pages are unfolded, and need no contents
    assert render(sections[:2]).count('<details class="section" open>') == 2
    opened = render([*sections, Section(title="read me", is_open=True)])
    assert opened.count('<details class="section" open>') == 1


def test_a_headline_is_read_before_its_section_is_unfolded():
    page = render([Section(title="x", headline="1.5 times as fast & more.")])
    assert '<span class="quiet">1.5 times as fast &amp; more.</span></summary>' in page


def test_tall_plots_have_room():
    figure = Figure(caption="c", data=(), layout={}, height_rem=30)
    assert 'style="height: 30rem"' in render([Section(title="x", figures=(figure,))])


def test_verdicts_come_first_with_words_beside_colours():
    slow = replace(THROUGHPUT, case={"model": "m<", "row": "fp8"})
    slow = replace(slow, values={"output_throughput": 5.0, "output_throughput_gain": 0.5})
    verdicts = make_verdicts([THROUGHPUT, slow])
    page = render(report_sections([THROUGHPUT]), verdicts=verdicts)
    assert page.index("Use FP8: yes, if quality holds") < page.index('<details class="section"')
    assert "2 verdicts: 1 amber, 1 red." in page and "<h3>m&lt;</h3>" in page
    assert '<article class="verdict poor">' in page and '<span class="grade">red</span>' in page
    assert '<dd class="large">1.50×</dd>' in page and "not measured" in page
    assert page.count("A GPU</h2>") == 2  # over the verdicts, and over the sections
    assert f"{FASTER:g}× of the baseline" in page


def test_small_plots_have_the_reference_and_the_interval_in_them():
    values = {"recovery_percent": 98.0, "recovery_standard_error_percent": 0.5, "perplexity": 9.0}
    case = {"model": "m", "data": "d", "recipe": "fp8 head", "context": 8, "chunk": 1}
    record = row(op="perplexity", case=case, values=values, baseline="bf16")
    page = render([], verdicts=make_verdicts([record]))
    # Percent from 95 to 100.25 on 200 units: 97.02 to 98.98, 98 and 100.
    assert '<path d="M77.0 21.0H151.6" stroke-width="2"/>' in page
    assert '<path class="reference" d="M190.5 0V42"/>' in page
    broken = {**values, "recovery_percent": math.nan}
    page = render([], verdicts=make_verdicts([replace(record, values=broken)]))
    assert "<path" not in page and "nan %" in page
    page = render([], verdicts=make_verdicts([THROUGHPUT]))
    # Ratios from 0 to 1.55.
    assert '<path d="M0 21.0H193.5" stroke-width="10"/>' in page
    assert '<path class="reference" d="M129.0 0V42"/>' in page


def test_numbers_that_json_does_not_have_are_gaps():
    trace = {"y": [1.0, math.nan, (math.inf,)], "error_y": {"array": [-math.inf]}}
    page = render([Section(title="x", figures=(Figure(caption="c", data=(trace,), layout={}),))])
    assert '"data": [{"error_y": {"array": [null]}, "y": [1.0, null, [null]]}]' in page


def test_markdown_has_verdicts_texts_and_tables():
    verdicts = make_verdicts([THROUGHPUT])
    sections = report_sections([THROUGHPUT])
    text = sections_markdown(sections, title="T", summary="In short.", verdicts=verdicts)
    assert text.startswith("# T\n\nIn short.\n\nm, requests, recipe fp8 on A GPU\n\n**Use FP8: yes")
    assert "\n\n## A GPU\n\n### Throughput: m\n\n" in text
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
