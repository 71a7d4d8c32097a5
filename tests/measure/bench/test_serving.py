"""The load over HTTP: what is sent, what counts as an answer, and vLLM's fields of it."""

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx")
sys.path.insert(0, str(Path(__file__).parent))
from scripted_server import scripted

from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.measure.bench.request_times import Workload
from octavo.measure.bench.serving import ServingCase, make_record, run_serving, vllm_result
from octavo.measure.records import Measurement

WORK = Workload(num_prompts=6, input_len=10, output_len=4, range_ratio=0.15)
VLLM_FIELDS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(
        f"{kind}_{metric}_ms"
        for kind in ("mean", "median", "std", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
}


def make_case(server, **changes):
    return ServingCase(**{"base_url": server.url, "workload": WORK, **changes})


def test_what_is_sent_and_what_comes_back():
    seen = []
    with scripted(step_s=0.01) as server:
        case = make_case(server, max_concurrency=2, num_warmups=1, api_key="secret", vocab_size=50)
        served = run_serving(case, on_request=lambda: seen.append(1))
    prompts = WORK.draw(50)
    assert len(seen) == 6 and served.model == "scripted"
    assert [body["prompt"] for body in server.bodies][0] == list(prompts[0].tokens)
    assert sorted(len(body["prompt"]) for body in server.bodies[1:]) == sorted(
        len(prompt.tokens) for prompt in prompts
    )
    body = server.bodies[0]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True and body["temperature"] == 0
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.most_open == 2
    metrics = served.metrics
    assert (metrics["completed"], metrics["failed"]) == (6, 0)
    assert metrics["total_output_tokens"] == sum(prompt.output_len for prompt in prompts)
    assert metrics["total_parts"] == metrics["total_output_tokens"]
    assert metrics["median_itl_ms"] >= 9 and metrics["median_ttft_ms"] >= 9
    assert metrics["max_concurrent_requests"] <= 2
    assert "secret" not in repr(case)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("refused", "status 429: .*the queue is full"),
        ("broken", r"the stream ended after 2 parts, without \[DONE\]"),
        ("error", "it failed"),
        ("nonsense", "expected events of JSON"),
        ("empty", "the answer has no parts"),
    ],
)
def test_one_that_fails_is_counted_and_its_error_kept(kind, message):
    with scripted([kind]) as server:
        served = run_serving(make_case(server, max_concurrency=1))
    assert (served.metrics["completed"], served.metrics["failed"]) == (5, 1)
    (error,) = [one.error for one in served.times if one.error is not None]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)
    result = vllm_result(make_case(server), served, metadata={}, is_detailed=True)
    assert [bool(text) for text in result["errors"]].count(True) == 1
    assert len(result["ttfts"]) == 5


def test_all_that_fail_raise_the_first():
    with (
        scripted(["refused"] * 6) as server,
        pytest.raises(OctavoError, match="all 6 requests failed; the first: status 429"),
    ):
        run_serving(make_case(server))


def test_a_warm_up_that_fails_raises():
    with scripted(["refused"]) as server, pytest.raises(OctavoError, match="the warm-up failed"):
        run_serving(make_case(server, num_warmups=1))


def test_nobody_listens():
    with scripted() as server:
        pass
    with pytest.raises(OctavoError, match="expected a server with models at .*ConnectError"):
        run_serving(make_case(server))
    with pytest.raises(OctavoError, match="all 6 requests failed; the first: ConnectError"):
        run_serving(make_case(server, model="m"))


def test_parts_of_several_tokens_and_servers_without_usage():
    with scripted(["pairs"] * 6) as server:
        metrics = run_serving(make_case(server, ignore_eos=False)).metrics
    assert metrics["total_parts"] < metrics["total_output_tokens"]
    assert "ignore_eos" not in server.bodies[0]
    with scripted(["no usage"] * 6) as server:
        metrics = run_serving(make_case(server)).metrics
    assert metrics["total_output_tokens"] == metrics["total_parts"] > 0


def test_the_fields_are_vllm_s():
    with scripted() as server:
        case = make_case(server, max_concurrency=3)
        served = run_serving(case)
    result = vllm_result(case, served, metadata={"note": "x"}, is_detailed=False)
    assert result.keys() - VLLM_FIELDS == {"note", "total_parts"} and result.keys() >= VLLM_FIELDS
    assert result["request_rate"] == "inf" and result["max_concurrency"] == 3
    json.dumps(result, allow_nan=False)
    record = make_record(case, served, command="c", has_own_server=False, options=[])
    assert record.op == "serve" and record.impl == "http"
    assert record.case["request_rate"] == "inf" and record.values["completed"] == 6
    assert Measurement.from_json(record.to_json()) == record


def test_octavo_s_own_server_takes_the_load():
    pytest.importorskip("fastapi")
    sys.path.insert(0, str(Path(__file__).parents[2] / "serving" / "server"))
    from fake_server import listening

    with listening() as (url, engine, _):
        case = ServingCase(base_url=url, workload=WORK, max_concurrency=2, percentiles=(50.0,))
        served = run_serving(case)
        assert engine.num_open == 0
    assert served.model == "fake" and served.metrics["completed"] == 6
    assert served.metrics["total_output_tokens"] == sum(p.output_len for p in WORK.draw(1000))
    assert {request.sampling.ignore_eos for request in engine.added} == {True}


def test_without_httpx_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'octavo\[server\]'"):
        run_serving(ServingCase(base_url="http://x", workload=WORK))


def test_one_token_has_no_time_for_each_token():
    work = Workload(num_prompts=1, input_len=3, output_len=1)
    with scripted() as server:
        case = make_case(server, workload=work)
        served = run_serving(case)
    assert math.isnan(served.metrics["mean_tpot_ms"])
    result = vllm_result(case, served, metadata={}, is_detailed=False)
    assert result["mean_tpot_ms"] is None


def test_requests_come_at_their_rate():
    work = Workload(num_prompts=2000, input_len=1, output_len=1)
    case = ServingCase(base_url="http://x", workload=work, request_rate=10.0)
    delays = case.delays_s()
    assert delays == case.delays_s() and delays[0] == 0 and len(delays) == 2000
    assert delays[-1] == pytest.approx(200, rel=0.1)
    gaps = [later - earlier for earlier, later in zip(delays, delays[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread == pytest.approx(mean, rel=0.1)  # as in a Poisson process
    at_once = ServingCase(base_url="http://x", workload=work)
    assert at_once.delays_s() == [0.0] * 2000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "localhost:8000"}, "expected a URL"),
        ({"request_rate": 0.0}, "request rate"),
        ({"request_rate": math.nan}, "request rate"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"max_concurrency": 0}, "requests at once"),
        ({"num_warmups": -1}, "warm-ups"),
        ({"percentiles": (101.0,)}, "percentiles"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ServingCase(**{"base_url": "http://x", "workload": WORK, **change})
