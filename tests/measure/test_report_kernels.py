"""Kernels beside those of others: what is compared with what, and where the roof is."""

import pytest

from octavo.measure.records import Machine, Measurement
from octavo.measure.report.kernels import Roof, kernel_kinds

GPU = "NVIDIA H200"
MACHINE = Machine.current(gpu=GPU, capability=(9, 0))
ROOF = Roof(GPU, 4000.0, 500.0, 1000.0, "measured on one")


def record(impl, operands, ms, *, op="attention", flops=4e12, bytes=1e10, date=1, **case):
    return Measurement(
        op=op,
        impl=impl,
        case={"shape": "1x8192", "operands": operands, **case},
        values={"median_ms": ms, "flops": flops, "bytes": bytes},
        machine=MACHINE,
        command="octavo bench kernels",
        date=f"2026-11-0{date}T00:00:00Z",
    )


ATTENTION = [
    record("gluon", "FP8", 5.0),
    record("triton", "FP8", 6.0),
    record("cudnn", "FP8", 4.0, levels=1),
    record("fa3", "BF16", 10.0),
    record("triton", "BF16", 12.0),
]


def sections_of(records, roofs=()):
    """The sections of all topics that have records."""
    by_kind = [(kind, [r for r in records if r.op in kind.ops]) for kind in kernel_kinds(roofs)]
    return [section for kind, own in by_kind for section in kind.make(own)]


def test_the_fastest_of_each_kind_on_a_roofline():
    (section,) = sections_of(ATTENTION, [ROOF])
    assert section.title == "Attention kernels"
    assert "measured on one" in section.text
    (figure,) = section.figures
    traces = {trace["name"]: trace for trace in figure.data}
    assert list(traces)[:4] == ["octavo FP8", "others FP8", "octavo BF16", "others BF16"]
    # 4 TFLOP in 5 ms are 800 TFLOP/s; 400 FLOP for each byte.
    assert (traces["octavo FP8"]["x"], traces["octavo FP8"]["y"]) == ([400.0], [800.0])
    assert traces["others FP8"]["text"] == ["cudnn (levels 1), 1x8192"]
    # Both roofs have their ridge inside: 1000 TFLOP/s at 4 TB/s are 250 FLOP per byte.
    fp8, bf16 = traces["roof FP8, 1,000 TFLOP/s"], traces["roof BF16, 500 TFLOP/s"]
    assert (fp8["x"], fp8["y"]) == ([200.0, 250.0, 800.0], [800.0, 1000.0, 1000.0])
    assert (bf16["x"], bf16["y"]) == ([200.0, 800.0], [500.0, 500.0])
    assert figure.layout["xaxis"]["title"]["text"] == "arithmetic intensity (FLOP per byte)"
    assert figure.layout["xaxis"]["type"] == figure.layout["yaxis"]["type"] == "log"


def test_the_table_says_who_and_how_many_times():
    (table,) = sections_of(ATTENTION)[0].tables
    assert table.rows == (
        ("1x8192", "800, gluon", "1,000, cudnn (levels 1)", "400, fa3", 5.0, 2.0, 0.8),
    )
    assert "attention in FP8 is 2.00 times as fast" in sections_of(ATTENTION)[0].headline


def test_newer_records_count_and_a_gpu_without_roof_has_none():
    newer = record("gluon", "FP8", 8.0, date=2)
    (section,) = sections_of([*ATTENTION, newer], [])
    assert section.figures[0].data[0]["text"] == ["triton, 1x8192"]  # 6 ms, now the fastest
    assert not any("roof" in trace["name"] for trace in section.figures[0].data)


def test_scales_have_rows_of_their_own_and_share_bf16():
    records = [
        record("selected", "FP8", 1.0, op="scaled_mm", scales="tensor", bias=True),
        record("selected", "FP8", 2.0, op="scaled_mm", scales="token by channel", bias=True),
        record("torch", "BF16", 3.0, op="scaled_mm", scales="none", bias=True),
        record("torch", "BF16", 9.0, op="scaled_mm", scales="none", bias=False),
    ]
    (table,) = sections_of(records)[0].tables
    assert [(row[0], row[1], row[-2]) for row in table.rows] == [
        ("1x8192, bias", "tensor", 3.0),
        ("1x8192, bias", "token by channel", 1.5),
        ("1x8192", None, None),
    ]


def test_kernels_without_products_are_shown_by_their_bandwidth():
    records = [
        record("triton", "BF16 to FP8", 1.0, op="quantize", flops=0.0, bytes=2e9),
        record("copy", "BF16 to BF16", 1.0, op="quantize", flops=0.0, bytes=3e9),
    ]
    (section,) = sections_of(records, [ROOF])
    own, copy, memory = section.figures[0].data
    assert (own["x"], own["y"], copy["y"]) == ([2000.0], [2000.0], [3000.0])
    assert memory["name"] == "memory, 4,000 GB/s" and memory["y"] == [4000.0, 4000.0]
    assert section.figures[0].layout["yaxis"]["title"]["text"] == "bandwidth (GB/s)"
    assert section.headline == ""  # a copy is not the same work
    assert section.tables[0].rows[0][1] == "2,000, triton (BF16 to FP8)"


@pytest.mark.parametrize("op", ["decode_attention", "scaled_mm", "packed_attention"])
def test_plotly_accepts_the_figures(op):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    records = [record("triton", "FP8", 1.0, op=op), record("fa3", "BF16", 1.0, op=op)]
    for figure in sections_of(records, [ROOF])[0].figures:
        graph_objects.Figure(data=figure.data, layout=figure.layout)
