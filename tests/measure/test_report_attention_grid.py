"""The grid of attention as tables and heat maps, from planted times."""

import pytest

from octavo.measure.records import Machine, Measurement
from octavo.measure.report.attention_grid import GRID, grid_tables
from octavo.measure.report.html import render
from octavo.measure.report.pages import report_sections


def records_at(length, head_dim, times, *, is_causal=False, num_kv_heads=16, **about):
    """The records of one shape. times: milliseconds of (impl, operands); * marks the selected."""
    return [
        Measurement(
            op="attention_grid",
            impl=impl.removesuffix("*"),
            case={
                "shape": f"{32768 // length}x{length} heads 16/{num_kv_heads} head_dim {head_dim}",
                "causal": is_causal,
                "num_heads": 16,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "length": length,
                "operands": operands,
                **({"is_selected": impl.endswith("*")} if operands == "FP8" else {}),
            },
            values={"median_ms": ms},
            machine=Machine.current(gpu="NVIDIA H200", capability=(9, 0)),
            command="octavo bench kernels --op attention_grid",
            **about,
        )
        for (impl, operands), ms in times.items()
    ]


ALL = {
    ("gluon*", "FP8"): 2.0,
    ("triton", "FP8"): 1.0,  # faster, but nobody gets it unasked
    ("triton", "BF16"): 4.0,
    ("fa3-fwd", "BF16"): 3.0,
    ("fa3-fwd", "FP8"): 1.6,
    ("vllm-fa3", "FP8"): 2.5,
}
OWN = {("gluon*", "FP8"): 2.0, ("triton", "BF16"): 2.2}
RECORDS = [
    *records_at(8192, 64, ALL),
    *records_at(512, 64, OWN),
    *records_at(512, 72, {("gluon*", "FP8"): 1.0, ("cudnn", "FP8"): 1.5}),
    *records_at(512, 64, ALL, is_causal=True, num_kv_heads=2),
]


def test_cells_have_both_ratios_where_there_are_rivals():
    full, causal = grid_tables(RECORDS)
    assert full.header == causal.header[:2] + ("8k",) == ("head_dim", "512", "8k")
    assert full.rows == (("64", "1.10 / –", "1.50 / 0.80"), ("72", "– / 1.50", "– / –"))
    assert causal.rows == (("64", "1.50 / 0.80"),)
    assert full.caption.startswith("heads 16/16: octavo's FP8 over the fastest BF16 / the fastest")
    assert causal.caption.startswith("heads 16/2, causal:")


def test_a_heat_map_for_each_rival():
    (section,) = GRID.make(RECORDS)
    assert section.title == "Attention over a grid of shapes"
    assert (
        "1.10 to 1.50 times as fast as the fastest BF16, and faster at 3 of 3" in section.headline
    )
    assert "0.80 to 1.50 times as fast as the fastest other FP8, and faster at 1 of 3" in (
        section.headline
    )
    over_bf16, over_fp8 = section.figures
    ((trace,), layout) = over_bf16.data, over_bf16.layout
    # A row for each title, without cells.
    assert trace["z"] == [[None, None], [1.1, 1.5], [None, None], [None, None], [1.5, None]]
    assert over_fp8.data[0]["z"][1:3] == [[None, 0.8], [1.5, None]]
    assert (trace["zmin"] + trace["zmax"]) / 2 == 1 and trace["x"] == ["512", "8k"]
    assert layout["yaxis"]["tickvals"] == [1, 2, 4]
    assert layout["yaxis"]["ticktext"] == ["64", "72", "64"]
    titles = [(title["text"], title["y"]) for title in layout["annotations"]]
    assert titles == [("<b>heads 16/16</b>", 0), ("<b>heads 16/2, causal</b>", 3)]
    shape = "4x8192 heads 16/16 head_dim 64"
    assert trace["text"][1][1] == f"{shape}: gluon FP8 2 ms against fa3-fwd BF16 3 ms"


def test_a_rival_that_nobody_is_has_no_heat_map():
    (section,) = GRID.make(records_at(512, 64, OWN))
    assert [figure.data[0]["z"] for figure in section.figures] == [[[None], [1.1]]]
    (bare,) = GRID.make(records_at(512, 64, {("gluon*", "FP8"): 1.0}))
    assert bare.figures == () and bare.headline == ""


def test_the_newest_of_each_counts():
    newer = records_at(8192, 64, {("fa3-fwd", "BF16"): 6.0}, date="2099-01-01T00:00:00Z")
    (section,) = GRID.make([*newer, *RECORDS])
    assert section.tables[0].rows[0][2] == "2.00 / 0.80"  # now our own in BF16 is the fastest


def test_a_page_without_records_has_no_section():
    other = records_at(8192, 64, ALL)[0]
    other = Measurement(**{**vars(other), "op": "attention"})
    titles = [section.title for section in report_sections([other])]
    assert not any("grid" in title for title in titles)
    titles = [section.title for section in report_sections(RECORDS)]
    assert "Attention over a grid of shapes" in titles


def test_plotly_accepts_the_page():
    graph_objects = pytest.importorskip("plotly.graph_objects")
    sections = GRID.make(RECORDS)
    for figure in sections[0].figures:
        graph_objects.Figure(data=figure.data, layout=figure.layout)
    assert render(sections, title="grid").count('"type": "heatmap"') == 2
