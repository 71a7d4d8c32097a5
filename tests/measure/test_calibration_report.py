"""The table and the page of a calibration, from records alone."""

import math

import pytest

from octavo.calibration.run import CalibrationResult, TensorStatistics
from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet
from octavo.measure.evaluate.calibration import calibration_records
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.layers import (
    CALIBRATION,
    calibration_table,
    pipeline_table,
)

LAYERS = [f"visual.blocks.{index}.attn.attn" for index in (0, 1, 10)]


def records(layers=LAYERS, **values):
    defaults = {"amax": 2.0, "scale": 0.01, "headroom": 1.5, "sqnr_db": 31.5}
    statistics = tuple(
        TensorStatistics(
            layer=layer,
            tensor=tensor,
            num_passes=7,
            num_nonfinite=index,
            **{**defaults, **values},
        )
        for layer in layers
        for index, tensor in enumerate("qkv")
    )
    scales = ScaleSet(dict.fromkeys(layers, LayerScales(1, 1, 1)), ScaleHeader(observer="mse"))
    result = CalibrationResult(scales=scales, statistics=statistics, num_prompts=7)
    return calibration_records(result, "octavo calibrate")


def test_one_row_for_each_layer():
    table = calibration_table(records())
    assert [row[0] for row in table.rows] == LAYERS
    assert table.header[:4] == ("layer", "q amax", "k amax", "v amax")
    assert table.rows[0][-2:] == (7, 3)  # passes; not finite, of q, k and v together
    assert records()[0].impl == "mse"


def test_plots_name_only_what_tells_layers_apart():
    (section,) = CALIBRATION.make(records())
    assert len(section.figures) == 3
    assert section.figures[0].data[0]["x"] == ["0", "1", "10"]
    assert [trace["name"] for trace in section.figures[0].data] == ["q", "k", "v"]


@pytest.mark.parametrize("layers", [["only"], ["a", "a.b"]])
def test_awkward_names_have_a_label(layers):
    labels = CALIBRATION.make(records(layers))[0].figures[0].data[0]["x"]
    assert len(set(labels)) == len(layers) and all(labels)


def test_an_exact_result_is_in_the_table_and_not_on_the_axis():
    (section,) = CALIBRATION.make(records(sqnr_db=math.inf))
    assert section.figures[2].data[0]["y"] == [None] * 3
    assert "∞" in section.tables[0].texts()[0]


def test_no_records_have_no_section():
    assert CALIBRATION.make([]) == []


def pipeline_row(group, tensor, **values):
    defaults = {"amax": 2.0, "scale": 0.01, "headroom": 1.5, "sqnr_db": 31.5, "num_passes": 7}
    return Measurement(
        op="calibrate_pipeline",
        impl="amax",
        case={"layer": group.replace("*", "0"), "tensor": tensor, "group": group},
        values={**defaults, **values},
        machine=Machine.current(),
        command="octavo calibrate",
    )


def test_a_pipeline_has_one_row_for_each_kind_of_layer():
    rows = [
        pipeline_row("transformer.blocks.*.up", "input", amax=3.0, lowest_amax=2.0, spread=1.5),
        pipeline_row("transformer.blocks.*.up", "input", lowest_amax=1.0, spread=2.0, sqnr_db=30),
        pipeline_row("transformer.blocks.*.attn", "q", lowest_amax=2.0, spread=1.0),
        pipeline_row("text_encoder.blocks.*.up", "input"),  # it runs before the first step
    ]
    found = pipeline_table(rows).rows
    assert found[0] == ("transformer.blocks.*.up", "input", 2, 3.0, 1.0, 2.0, 1.5, 30.0, 7)
    assert [row[:3] for row in found[1:]] == [
        ("transformer.blocks.*.attn", "q", 1),
        ("text_encoder.blocks.*.up", "input", 1),
    ]
    assert found[2][4:6] == (None, None)
