"""Times of requests to vLLM's fields."""

import math

import pytest

from octavo.errors import ConfigError
from octavo.measure.bench.cases import Workload
from octavo.measure.bench.request_times import RequestTimes, goodput, summarize


def times(start_s, *parts_s, **changes):
    fields = {"input_len": 10, "output_len": len(parts_s), "start_s": start_s, "parts_s": parts_s}
    return RequestTimes(**{**fields, **changes})


def test_the_fields_of_two_requests():
    result = summarize([times(0.0, 0.5, 0.6, 0.8), times(0.25, 1.25)], 2.0, [50, 99])
    assert result["completed"] == 2 and result["failed"] == 0
    assert result["total_input_tokens"] == 20 and result["total_output_tokens"] == 4
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 2.0
    assert result["total_token_throughput"] == 12.0
    assert result["mean_ttft_ms"] == pytest.approx(750)
    assert result["mean_tpot_ms"] == pytest.approx(150)  # of the first: the second has one token
    assert result["median_itl_ms"] == pytest.approx(150)
    assert result["p50_e2el_ms"] == result["median_e2el_ms"] == pytest.approx(900)
    assert result["p99_itl_ms"] == pytest.approx(199)
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 3


def test_goodput_counts_what_met_every_limit():
    slow, quick = times(0.0, 0.5, 0.6, 0.8), times(0.25, 0.35)
    failed = times(0.0, output_len=0, error="refused")
    load = [slow, quick, failed]
    assert goodput(load, 2.0, {"ttft": 600}) == 1.0
    assert goodput(load, 2.0, {"ttft": 400}) == 0.5
    assert goodput(load, 2.0, {"ttft": 600, "tpot": 100}) == 0.5  # one token has a TPOT of 0
    assert goodput(load, 2.0, {"e2el": 50}) == 0
    with pytest.raises(ConfigError, match="limits of ttft, tpot, e2el, got itl"):
        goodput(load, 2.0, {"itl": 1})


def test_a_request_that_failed_counts_as_such_alone():
    failed = times(0.0, output_len=0, error="refused")
    result = summarize([times(0.0, 1.0), failed], 1.0)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["total_input_tokens"] == 10


def test_no_request_came_through():
    result = summarize([times(0.0, output_len=0, error="refused")], 1.0)
    assert result["output_throughput"] == 0 and math.isnan(result["median_ttft_ms"])
    assert result["max_concurrent_requests"] == result["max_output_tokens_per_s"] == 0


def test_parts_of_several_tokens():
    one = times(0.0, 1.0, 2.0, output_len=5)
    assert one.tpot_s == 0.25 and one.itls_s == [1.0]
    assert summarize([one], 2.0)["max_output_tokens_per_s"] == 2.5


def test_one_after_the_other_is_one_at_once():
    result = summarize([times(0.0, 1.0), times(1.0, 2.0)], 2.0)
    assert result["max_concurrent_requests"] == 1


def test_lengths_spread_by_the_ratio():
    work = Workload(num_prompts=400, input_len=100, output_len=20, range_ratio=0.15)
    prompts = work.draw(50)
    inputs = {len(prompt.tokens) for prompt in prompts}
    outputs = {prompt.output_len for prompt in prompts}
    assert min(inputs) == 85 and max(inputs) == 115
    assert outputs == set(range(17, 24))
    assert work.max_context == 115 + 23
    assert {t for p in prompts for t in p.tokens} == set(range(50))
    assert prompts == work.draw(50)
    assert prompts != Workload(**{**vars(work), "seed": 1}).draw(50)


def test_without_a_ratio_all_are_alike():
    prompts = Workload(num_prompts=3, input_len=1, output_len=1).draw(2)
    assert [(len(p.tokens), p.output_len) for p in prompts] == [(1, 1)] * 3


@pytest.mark.parametrize(
    "change", [{"num_prompts": 0}, {"input_len": 0}, {"range_ratio": 1.0}, {"range_ratio": -0.1}]
)
def test_what_is_refused(change):
    fields = {"num_prompts": 1, "input_len": 1, "output_len": 1}
    with pytest.raises(ConfigError, match="expected"):
        Workload(**{**fields, **change})
    with pytest.raises(ConfigError, match="vocabulary"):
        Workload(**fields).draw(1)
