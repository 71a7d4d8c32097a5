"""One batch: what is counted as what, rows side by side, and rows that do not count."""

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.measure.bench import engine, engine_load
from octavo.measure.bench.cases import LatencyCase
from octavo.measure.bench.engine import make_rows, open_subject
from octavo.measure.bench.engine_load import (
    fit_values,
    length_values,
    run_load,
)
from octavo.measure.bench.engine_tables import vllm_documents
from octavo.measure.bench.requests import RequestTimes
from octavo.measure.fit import (
    Line,
    Quadratic,
    curve_break_even,
    fit_quadratic,
)
from octavo.measure.records import Measurement
from octavo.measure.report.latency import ITL, TTFT, fit_itl, fit_ttft
from octavo.measure.run import Records
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.settings import EngineSettings

CASE = LatencyCase(input_lens=(5, 70), output_len=3, batch_size=2, num_iters=2)


@pytest.fixture(scope="module")
def subject():
    return open_subject(None, "tiny-gpt-oss", dtype="float32", device="cpu", layers=None)


def run(subject, names, case=CASE, **options):
    rows = make_rows(names, subject)
    return run_load(subject, rows, case, EngineSettings(), command="octavo", **options)


def by_row(result):
    """The records of each row, in the order of rows."""
    found = {}
    for record in result.records:
        found.setdefault(record.case["row"], []).append(record)
    return found


def test_records_of_lengths_and_of_lines(subject):
    seen, done = [], []
    names = ["auto", "fp8", "fp8+skip=sliding_window"]
    kept = Records(on_record=done.append)
    result = run(subject, names, on_step=seen.append, records=kept)
    results = by_row(result)
    assert done == list(result.records) and list(results) == names and not result.failures
    assert seen[:4] == ["auto, 5 tokens"] * 3 + ["auto, 70 tokens"]
    assert len(seen) == 3 * CASE.num_runs
    for name, (short, long, fit) in results.items():
        assert (short.op, long.op, fit.op) == ("latency", "latency", "latency_fit")
        assert (short.case["input_len"], long.case["input_len"]) == (5, 70)
        assert short.case["row"] == fit.case["row"] == name and short.case["batch_size"] == 2
        assert short.case["mlp"] == "dense 128 in place of experts"
        assert short.values["num_ttft_samples"] == 4  # 2 sequences, 2 iterations
        assert short.values["num_itl_samples"] == 8
        for metric in ("ttft", "itl"):
            assert 0 < short.values[f"p20_{metric}_ms"] <= short.values[f"p80_{metric}_ms"]
        line = fit_itl([short, long])
        assert fit.values["itl_intercept_ms"] == line.intercept
        assert line.at(5 + 1.5) == pytest.approx(short.values["median_itl_ms"])
        assert fit.case["input_lens"] == "5,70" and "input_len" not in fit.case
        assert fit.case["num_pages"] == short.case["num_pages"]
    first, second, _ = results.values()
    assert "itl_speedup" not in first[0].values and first[0].baseline is None
    ratio = first[1].values["median_itl_ms"] / second[1].values["median_itl_ms"]
    assert second[1].values["itl_speedup"] == ratio
    assert second[2].values["break_even_tokens"] is not None
    assert second[2].baseline == "auto"
    assert first[0].values["relative_rms"] < 1e-5 < second[0].values["relative_rms"]


def test_one_length_is_no_line(subject):
    case = LatencyCase(input_lens=(5,), output_len=2, num_iters=1, num_warmups=0)
    (record,) = run(subject, ["auto"], case).records
    assert record.op == "latency"


def test_three_lengths_are_a_curve_and_a_baseline_may_have_run_before(subject):
    case = LatencyCase(input_lens=(5, 20, 40, 60), output_len=3, num_iters=3, num_warmups=0)
    result = run(subject, ["auto"], case)
    plain = result.records
    assert [r.op for r in plain] == ["latency"] * 4 + ["latency_fit", "ttft_fit"]
    line, curve = plain[4].values, plain[5].values
    assert curve["ttft_constant_ms"] == fit_ttft(plain[:4]).constant
    assert line["itl_slope_low_us_per_1k_tokens"] < line["itl_slope_us_per_1k_tokens"]
    assert "square_ratio" not in curve and "slope_ratio" not in line
    fp8 = run(subject, ["fp8"], case, baseline=plain[:4]).records
    assert {record.baseline for record in fp8} == {"auto"}
    ratio = plain[3].values["median_ttft_ms"] / fp8[3].values["median_ttft_ms"]
    assert fp8[3].values["ttft_speedup"] == ratio
    assert fp8[4].values["slope_ratio"] == pytest.approx(
        fit_itl(fp8[:4]).slope / fit_itl(plain[:4]).slope
    )
    assert "square_ratio" in fp8[5].values
    found = curve_break_even(fit_ttft(fp8[:4]), fit_ttft(plain[:4]))
    assert fp8[5].values["ttft_break_even_tokens"] == found.tokens
    assert "ttft_break_even_tokens" not in curve
    # vLLM's fields: times of whole batches, in seconds.
    found = vllm_documents(result)["auto", 20]
    assert list(found) == ["model_id", "avg_latency", "latencies", "percentiles"]
    assert found["model_id"] == "tiny-gpt-oss" and len(found["latencies"]) == 3
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["percentiles"]["50"] == sorted(found["latencies"])[1]
    values = plain[1].values
    assert found["avg_latency"] == pytest.approx(values["avg_latency"])
    assert values["avg_latency"] * 1e3 >= values["mean_e2el_ms"] > 0
    assert values["p10_e2el_ms"] <= values["p25_e2el_ms"] <= values["p99_e2el_ms"]
    for record in (*plain[:4], *fp8[:5]):
        assert Measurement.from_json(record.to_json()) == record


def test_a_row_that_is_wrong_has_no_records_and_others_go_on(subject, monkeypatch):
    monkeypatch.setitem(engine.MAX_ERROR, "e4m3", 1e-9)
    told = []
    result = run(subject, ["auto", "fp8", "fp8_e5m2"], records=Records(on_record=told.append))
    assert {name: len(own) for name, own in by_row(result).items()} == {"auto": 3, "fp8_e5m2": 3}
    assert list(result.failures) == ["fp8"] and "fp8 is wrong" in result.failures["fp8"]
    assert told == list(result.records)


def test_a_first_row_that_is_wrong_ends_the_run(subject, monkeypatch):
    monkeypatch.setitem(engine.MAX_ERROR, "float32", -1.0)
    with pytest.raises(UnsupportedError, match="auto is wrong"):
        run(subject, ["auto", "fp8"])


def test_a_failed_request_raises(subject, monkeypatch):
    def fail(engine, prompts):
        return [RequestTimes(input_len=1, output_len=0, start_s=0, parts_s=(), error="boom")], 1.0

    monkeypatch.setattr(engine_load, "serve_prompts", fail)
    with pytest.raises(OctavoError, match="1 requests failed: boom"):
        run(subject, ["auto"])


def test_a_failed_request_fails_its_row(subject, monkeypatch):
    serve_prompts, served = engine_load.serve_prompts, []

    def fail(engine, prompts):
        served.append(engine)
        times, duration_s = serve_prompts(engine, prompts)
        if engine is not served[0]:
            times[-1] = replace(times[-1], error="boom")
        return times, duration_s

    monkeypatch.setattr(engine_load, "serve_prompts", fail)
    told = []
    result = run(subject, ["auto", "fp8"], records=Records(on_record=told.append))
    assert list(result.failures) == ["fp8"] and "boom" in result.failures["fp8"]
    assert {record.case["row"] for record in told} == {"auto"}
    assert {name for name, _ in vllm_documents(result)} == {"auto"}


def test_between_tokens_counts_from_the_last_first_token():
    def times(*parts_s):
        return RequestTimes(input_len=1, output_len=len(parts_s), start_s=0.0, parts_s=parts_s)

    # The first sequence waits for the prompt of the second one: its gap of 8 s is not counted.
    values = length_values([[times(1.0, 9.0, 10.0, 11.0), times(9.0, 10.0, 11.0)]])
    assert values["num_itl_samples"] == 4
    assert values["mean_itl_ms"] == values["p99_itl_ms"] == 1000
    assert values["median_ttft_ms"] == 5000


def test_between_tokens_counts_while_the_whole_batch_decodes():
    def times(*parts_s):
        return RequestTimes(input_len=1, output_len=len(parts_s), start_s=0.0, parts_s=parts_s)

    # After 5 s the second sequence is alone, and twice as fast.
    values = length_values([[times(1.0, 3.0, 4.0, 5.0), times(3.0, 4.0, 5.0, 5.5, 6.0)]])
    assert values["num_itl_samples"] == 4
    assert values["mean_itl_ms"] == values["p10_itl_ms"] == 1000


def test_a_batch_that_never_decodes_together_is_refused(subject):
    """A prompt takes nine passes here, in which the answer before it comes to its end."""
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=8)
    rows = make_rows(["auto"], subject)
    with pytest.raises(ConfigError, match="2 sequences at once.*output_len"):
        run_load(subject, rows, CASE, settings, command="octavo")


def test_graphs_are_captured_before_the_clock_starts(subject, monkeypatch):
    seen = []
    serve_prompts, warm_up = engine_load.serve_prompts, Engine.warm_up
    monkeypatch.setattr(Engine, "warm_up", lambda engine: seen.append("graphs") or warm_up(engine))
    monkeypatch.setattr(
        engine_load, "serve_prompts", lambda *args: seen.append("batch") or serve_prompts(*args)
    )
    run(subject, ["auto"])
    assert seen == ["graphs"] + ["batch"] * CASE.num_runs


def test_values_of_a_line():
    first = Line(3.0, 4e-5, 0.01)
    assert fit_values(ITL, first, None) == {
        "itl_intercept_ms": 3.0,
        "itl_slope_us_per_1k_tokens": pytest.approx(40.0),
        "itl_residual_ms": 0.01,
    }
    values = fit_values(ITL, Line(3.02, 2e-5, 0.01), first)
    assert values["intercept_gap_ms"] == pytest.approx(0.02)
    assert values["slope_ratio"] == 0.5
    assert values["break_even_tokens"] == pytest.approx(1000)
    assert fit_values(ITL, Line(2.9, 2e-5, 0.01), first)["break_even_tokens"] < 0
    assert fit_values(ITL, Line(2.9, 8e-5, 0.01), first)["faster_up_to_tokens"] == pytest.approx(
        2500
    )


def test_values_of_a_curve():
    lengths = (1000, 4000, 8000, 16000)
    first, own = (
        fit_quadratic(lengths, [c + 0.01 * x + a * x**2 + (x == off) / 8 for x in lengths])
        for c, a, off in ((50.0, 2e-6, 0), (75.0, 1e-6, 4000))
    )
    values = fit_values(TTFT, own, first)
    assert values["ttft_break_even_tokens"] == pytest.approx(5000, rel=0.01)
    low, high = (values[f"ttft_break_even_{end}_tokens"] for end in ("low", "high"))
    assert 4500 < low < 5000 < high < 5500
    assert "ttft_faster_up_to_tokens" not in values
    assert fit_values(TTFT, first, own)["ttft_faster_up_to_tokens"] == pytest.approx(5000, rel=0.01)
    given = fit_values(TTFT, Quadratic(1, 2e-3, 3e-6, 0), first)  # at which lengths, nobody says
    assert "square_ratio" in given and "ttft_break_even_tokens" not in given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_lens": ()}, "at least 1"),
        ({"input_lens": (0,)}, "at least 1"),
        ({"input_lens": (5, 5)}, "different lengths"),
        ({"output_len": 1}, "2 or more tokens"),
        ({"num_iters": 0}, "at least 1"),
        ({"num_warmups": -1}, "at least 1"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        LatencyCase(**{"input_lens": (5,), **change})


@pytest.mark.gpu
def test_on_a_gpu():
    """Graphs or not: rows of a batch are right, and times are positive."""
    subject = open_subject(None, "tiny-gpt-oss", dtype="auto", device="cuda", layers=None)
    case = LatencyCase(input_lens=(20, 300), output_len=4, batch_size=3, num_iters=1)
    result = run(subject, ["auto", "fp8", "fp8+token", "fp8+skip=sliding_window"], case)
    assert not result.failures and len(by_row(result)) == 4
    assert all(record.machine.gpu for record in result.records)
