"""Many requests in one process: how many are open, what is recorded, what fails a row."""

import pytest

pytest.importorskip("transformers")

from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.measure.bench import engine, engine_load
from octavo.measure.bench.cases import ThroughputCase
from octavo.measure.bench.engine import make_rows, open_engine, open_subject, serve_prompts
from octavo.measure.bench.engine_load import run_load
from octavo.measure.bench.requests import Prompt, RequestTimes
from octavo.serving.engine.engine import Engine
from octavo.serving.engine.settings import EngineSettings

pytestmark = pytest.mark.slow  # in CI with `make test-slow`: it takes its time

WORK = {"num_prompts": 5, "input_len": 20, "output_len": 6, "range_ratio": 0.15}


@pytest.fixture(scope="module")
def subject():
    return open_subject(None, "tiny", dtype="float32", device="cpu", layers=None)


def run(subject, names, **case):
    rows = make_rows(names, subject)
    case = ThroughputCase(**WORK, **case)
    return run_load(subject, rows, case, EngineSettings(), command="octavo")


def test_records(subject):
    auto, fp8 = run(subject, ["auto", "fp8"], max_concurrency=2).records
    prompts = ThroughputCase(**WORK).draw(256)
    for record in (auto, fp8):
        values, case = record.values, record.case
        assert values["completed"] == 5 and values["failed"] == 0
        assert values["total_input_tokens"] == sum(len(prompt.tokens) for prompt in prompts)
        assert values["total_output_tokens"] == sum(prompt.output_len for prompt in prompts)
        assert values["max_concurrent_requests"] == 2
        total = values["total_input_tokens"] + values["total_output_tokens"]
        assert values["total_token_throughput"] == pytest.approx(total / values["duration"])
        assert case["max_concurrency"] == case["max_num_seqs"] == 2 and case["range_ratio"] == 0.15
    gain = fp8.values["output_throughput"] / auto.values["output_throughput"]
    assert fp8.values["output_throughput_gain"] == gain
    slower = fp8.values["median_itl_ms"] / auto.values["median_itl_ms"]
    assert fp8.values["median_itl_gain"] == pytest.approx(1 / slower)
    assert fp8.baseline == "auto" and auto.baseline is None


def test_all_at_once(subject):
    (record,) = run(subject, ["auto"], num_warmups=0).records
    assert record.values["max_concurrent_requests"] == 5
    assert "max_concurrency" not in record.case


def test_a_row_that_is_wrong(subject, monkeypatch):
    monkeypatch.setitem(engine.MAX_ERROR, "e4m3", 1e-9)
    result = run(subject, ["auto", "fp8"])
    assert [record.case["row"] for record in result.records] == ["auto"]
    assert list(result.failures) == ["fp8"] and "fp8 is wrong" in result.failures["fp8"]
    with pytest.raises(UnsupportedError, match="fp8 is wrong"):
        run(subject, ["fp8", "auto"])


def test_a_request_that_fails_fails_its_row(subject, monkeypatch):
    failed = RequestTimes(input_len=1, output_len=0, start_s=0, parts_s=(), error="boom")
    monkeypatch.setattr(engine_load, "serve_prompts", lambda *a, **k: ([failed], 1.0))
    with pytest.raises(OctavoError, match="auto: 1 requests failed: boom"):
        run(subject, ["auto"])


def test_graphs_are_captured_before_the_clock_starts(subject, monkeypatch):
    seen, warm_up = [], Engine.warm_up
    monkeypatch.setattr(Engine, "warm_up", lambda engine: seen.append("graphs") or warm_up(engine))

    def serve(*args, **options):
        seen.append("load")
        return serve_prompts(*args, **options)

    monkeypatch.setattr(engine_load, "serve_prompts", serve)
    run(subject, ["auto"])
    assert seen == ["graphs", "load", "load"]  # the first is a warm-up


def test_prompts_that_never_fit_raise_before_any_runs(subject):
    (row,) = make_rows(["auto"], subject)
    with open_engine(subject, row, EngineSettings(num_pages=2)) as engine:
        with pytest.raises(ConfigError, match="within the context of 128 tokens"):
            serve_prompts(engine, [Prompt(3, (1, 2)), Prompt(3, (1,) * 500)])
        assert not engine.has_work


def test_times_of_served_prompts(subject):
    (row,) = make_rows(["auto"], subject)
    seen = []
    with open_engine(subject, row, EngineSettings(num_pages=8, max_queue=2)) as engine:
        prompts = [Prompt(3, (1, 2)), Prompt(1, (3,)), Prompt(2, (4, 5, 6))]
        times, duration_s = serve_prompts(engine, prompts, on_token=lambda: seen.append(1))
    assert [one.output_len for one in times] == [3, 1, 2] and len(seen) == 6
    assert all(one.error is None and one.ttft_s > 0 for one in times)
    assert times[0].latency_s <= duration_s
    assert times[2].start_s >= times[1].parts_s[-1]  # the queue has room for two


@pytest.mark.parametrize("change", [{"num_warmups": -1}, {"max_concurrency": 0}])
def test_what_is_refused(change):
    with pytest.raises(ConfigError, match="expected"):
        ThroughputCase(**WORK, **change)
