"""Accuracy, steps, throughput, sensitivity and advice as sections of a page."""

from dataclasses import replace
from functools import partial

import pytest

from octavo.measure.records import Machine, Measurement
from octavo.measure.report import images, quality, speed
from octavo.measure.report.layers import SENSITIVITY
from octavo.measure.report.plots import Point, log_ticks, points, wrapped
from octavo.measure.report.tables import newest

MACHINE = Machine(cpu="A CPU", python="3.12", platform="Linux", gpu="A GPU", capability=(9, 0))
row = partial(Measurement, impl="octavo", machine=MACHINE, command="octavo x")


def perplexity(recipe, value, baseline=None, **values):
    case = {"model": "m", "recipe": recipe, "data": "d", "context": 8192, "chunk": 512}
    values = {"perplexity": value, **values}
    return row(op="perplexity", case=case, values=values, baseline=baseline)


def test_recovery_with_its_standard_error():
    records = [
        perplexity("bf16", 10.0),
        perplexity("fp8", 10.1, "bf16", recovery_percent=99.0, recovery_standard_error_percent=0.5),
        perplexity("fp8 head", 10.3, "bf16", recovery_percent=97.0),
    ]
    (section,) = quality.PERPLEXITY.make(records)
    (trace,) = section.figures[0].data
    assert trace["name"] == "8,192 tokens, 512 at once, against bf16"
    assert trace["x"] == [99.0, 97.0] and trace["error_x"]["array"] == [0.5, 0.0]
    assert len(section.tables[0].rows) == 3 and "ratio" not in section.tables[0].header
    (alone,) = quality.PERPLEXITY.make(records[:1])
    assert alone.figures == ()
    (one,) = quality.PERPLEXITY.make(records[:2])


def test_charts_with_intervals():
    def answered(recipe, baseline=None, **values):
        case = {"model": "m", "data": "generated", "recipe": recipe, "num_questions": 100}
        values = {"relaxed_accuracy_percent": 90.0, **values}
        return row(op="chartqa", case=case, values=values, baseline=baseline)

    ends = {"difference_low_points": -3.0, "difference_high_points": 0.5}
    fp8 = answered("fp8", "bf16", difference_points=-1.0, recovery_percent=98.9, **ends)
    (section,) = images.CHARTQA.make([answered("bf16"), fp8])
    (trace,) = section.figures[0].data
    assert (trace["error_x"]["array"], trace["error_x"]["arrayminus"]) == ([1.5], [2.0])
    assert "100 questions" in section.text
    assert section.sheets == () and "not shown" not in section.text


def test_charts_are_shown_once_or_it_is_said_why_not():
    def answered(recipe, picture, **more):
        case = {"model": "m", "data": "d", "recipe": recipe, "num_questions": 9, **more}
        values = {"relaxed_accuracy_percent": 90.0}
        return row(op="chartqa", case=case | {"picture": picture}, values=values)

    url = "data:image/jpeg;base64,AAAA"
    (section,) = images.CHARTQA.make([answered("bf16", url), answered("fp8", url)])
    (sheet,) = section.sheets
    assert sheet.url == url and "the answers of bf16, fp8;" in sheet.caption
    lost = {"picture_problem": "there is no such file"}
    rows = [answered("bf16", "x.jpg", **lost), answered("fp8", "x.jpg", **lost)]
    (section,) = images.CHARTQA.make(rows)
    assert section.sheets == ()
    assert (
        section.text.count("The image x.jpg of bf16, fp8 is not shown: there is no such file.") == 1
    )


def test_needles_by_machine_and_model_with_their_recovery():
    def found(recipe, percent, date="2026-11-01T00:00:00Z"):
        case = {"model": "m", "haystack": "h", "recipe": recipe, "length": 8192, "depth": 0.5}
        values = {"found_percent": percent, "num_found": percent / 50}
        return row(op="needle", case=case | {"repetitions": 2}, values=values, date=date)

    again = found("fp8", 50.0, "2026-11-02T00:00:00Z")
    (section,) = quality.NEEDLE.make([found("bf16", 100.0), found("fp8", 100.0), again])
    assert section.figures == () and section.group == "A GPU"
    assert "fp8 finds 50 % at every length and depth." in section.text


def test_conversations_by_bucket():
    def asked(recipe, bucket, score, **values):
        case = {"model": "m", "data": "d", "recipe": recipe, "bucket": bucket, "num_needles": 2}
        return row(op="mrcr", case=case, values={"score_percent": score, **values})

    records = [
        *(asked("bf16", 8192, 50.0), asked("bf16", "all", 50.0, auc_percent=50.0)),
        *(asked("fp8", 8192, 40.0), asked("fp8", "all", 40.0, recovery_percent=80.0)),
    ]
    (section,) = quality.MRCR.make(records)
    assert [trace["x"] for trace in section.figures[0].data] == [[50.0, 50.0], [40.0, 40.0]]


def test_a_step_is_shown_by_its_fastest_way():
    def ran(recipe, ms, speedup, graphs=False, images=3):
        case = {"model": "vit", "recipe": recipe, "images": images, "resolution": "4k"}
        case["graphs"] = graphs
        values = {"median_ms": ms, "speedup": speedup}
        return row(op="encoder", case=case, values=values, baseline="stock BF16")

    records = [ran("bf16", 10, 1.0), ran("static", 8, 1.25), ran("static", 5, 2.0, graphs=True)]
    (section,) = speed.ENCODER.make(records)
    (bars,) = section.figures[0].data  # of one size: names down, no groups, and no legend
    assert (bars["y"], bars["x"], bars["orientation"]) == (["bf16", "static"], [1.0, 2.0], "h")
    layout = section.figures[0].layout
    assert not layout["showlegend"] and layout["xaxis"]["title"]["text"] == "speed-up (×)"
    (other,) = speed.ENCODER.make([*records, ran("bf16", 3, 1.0, images=1)])
    assert [trace["y"] for trace in other.figures[0].data] == [[1.0, 1.0], [2.0]]
    assert other.figures[0].layout["yaxis"]["range"] == [0, 2.3]
    assert "speed-up (×)" in section.tables[0].header


def test_steps_of_diffusion_and_of_generation():
    case = {"model": "dit", "recipe": "linear", "inputs": "1024 x 1024", "layers": 1}
    (section,) = speed.DIFFUSION.make([row(op="x", case=case, values={"median_ms": 1.0})])
    assert section.tables[0].rows[0][0] == "1024 x 1024, 1 block of each kind"
    assert section.figures == ()
    case = {"model": "llm", "recipe": "fp8", "batch": 8, "context": 32768}
    (section,) = speed.GENERATE.make([row(op="x", case=case, values={"median_ms": 1.0})])
    assert section.tables[0].rows[0][0] == "8 × 32k"
    case = {"model": "llm", "recipe": "kv", "batch": 1, "prompt": 16384}
    (section,) = speed.GENERATE_CALLS.make([row(op="x", case=case, values={"median_ms": 1.0})])
    assert section.tables[0].rows[0][0] == "1 × 16k"


def test_calls_on_the_host_in_units_of_linear():
    def called(name, over, **values):
        values |= {"median_us": 10 * over, "over_linear": over}
        case = {"call": name, "device": "cuda"}
        return replace(row(op="host", case=case, values=values), baseline="F.linear")

    (section,) = speed.HOST.make([called("F.linear", 1.0), called("attention", 2.5, budget=7.0)])
    (figure,) = section.figures
    assert figure.data[0]["x"] == [1.0, 2.5] and "in units of F.linear" in figure.caption
    assert ("budget" in section.tables[0].header) and len(section.tables[0].rows) == 2


def test_throughput_by_row_with_its_gain():
    def ran(name, speed, model="m", **values):
        case = {"model": model, "row": name, "num_prompts": 48, "max_concurrency": 8}
        values = {"output_throughput": speed, **values}
        return row(op="throughput", case=case, values=values, baseline="auto" if values else None)

    records = [ran("auto", 100.0), ran("fp8", 125.0, output_throughput_gain=1.25), ran("x", 1, "n")]
    first, second = speed.THROUGHPUT.make(records)
    assert "48 requests, 8 at once" in first.text
    assert first.figures[0].data[0]["x"] == [100.0, 125.0]
    assert first.figures[0].layout["xaxis"]["title"]["text"] == "output (tokens/s)"
    assert second.title == "Throughput: n"


def test_serving_is_a_table():
    case = {"model": "m", "request_rate": "inf"}
    (section,) = speed.SERVE.make([row(op="serve", case=case, values={"output_throughput": 5.0})])
    assert section.tables[0].header == ("request rate", "output (tokens/s)")


def test_layers_by_their_error():
    def alone(layer, error, op="sensitivity"):
        case = {"model": "dit", "by": "group", "layer": layer}
        values = {"error": error, "worst_error": error, "num_layers": 1, "weight_share": 0.1}
        return row(op=op, case=case, values=values)

    records = [
        alone("dit.small", 0.01),
        alone("dit.large", 0.2),
        alone("all", 0.3, "sensitivity_of_all"),
    ]
    (section,) = SENSITIVITY.make(records)
    assert section.figures[0].data[0]["y"] == ["large", "small"]
    assert section.figures[0].data[0]["x"] == pytest.approx([20.0, 1.0])
    assert "Together, all: 30.00 %" in section.text and "dit.large alone" in section.headline
    assert [cells[0] for cells in section.tables[0].rows] == ["dit.large", "dit.small"]


def test_advice_beside_what_was_measured():
    def compared(what, measured, **values):
        case = {"model": "m", "what": what, "row": "fp8"}
        return row(op="advise", case=case, values={"measured_speedup": measured, **values})

    records = [
        compared("ITL", 2.0, predicted_speedup=1.9, error_percent=-5.0),
        compared("TTFT", 1.0, predicted_speedup=1.1, error_percent=10.0),
        compared("host", 1.5),
    ]
    (section,) = speed.COMPARED_ADVICE.make(records)
    points_, equal = section.figures[0].data
    assert (points_["x"], points_["y"]) == ([2.0, 1.0], [1.9, 1.1])
    assert equal["x"] == [1.0, 2.0]
    assert "2 speed-ups" in section.headline
    assert "half of them within 5.0 %, all within 10.0 %" in section.headline
    (unsaid,) = speed.COMPARED_ADVICE.make(records[2:])
    assert unsaid.figures == () and unsaid.headline == ""


def test_points_of_several_series_do_not_hide_each_other():
    figure = points(
        {"a": [Point("x", 1.0)], "b": [Point("y", 2.0), Point("x", 3.0)]},
        caption="c",
        value_title="value (%)",
    )
    a, b = figure.data
    assert a["y"] == [-0.15] and b["y"] == [1.15, 0.15]
    assert figure.layout["yaxis"]["ticktext"] == ["x", "y"]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([300, 700], ["200", "500", "1,000"]),
        ([10, 1000], ["10", "30", "100", "300", "1,000"]),
        ([1, 1e6], ["1", "10", "100", "1,000", "10k", "100k", "1M"]),
        ([0.002, 0, -1, float("inf")], ["0.001", "0.002"]),
        ([], []),
    ],
)
def test_marks_of_a_logarithmic_axis_say_what_they_are(values, texts):
    assert log_ticks(values).get("ticktext", []) == texts


def test_long_names_have_lines_and_are_escaped():
    name = "fp8+ignore=proj_mlp+ignore=<b>+weight_only=modulation"
    lines = wrapped(name).split("<br>")
    assert all(len(line) < 30 for line in lines) and len(lines) > 2
    assert "".join(lines) == name.replace("<b>", "&lt;b&gt;")


def test_names_are_cut_where_words_end():
    assert wrapped("transformer_blocks.*.ff.net.0.proj") == "transformer_blocks<br>.*.ff.net.0.proj"
    assert wrapped("720 x 1280, 81 frames") == "720 x 1280, 81<br>frames"
    assert wrapped("") == ""


def test_the_newest_of_the_same_measurement():
    old, new = (
        row(op="x", case={"n": 1}, values={"v": v}, date=f"2026-11-0{v}T00:00:00Z") for v in (1, 2)
    )
    other = row(op="x", case={"n": 2}, values={"v": 3})
    assert newest([new, old, other]) == [new, other]
    assert newest([new, other], "op") == [other]
