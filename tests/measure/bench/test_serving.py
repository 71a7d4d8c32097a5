"""The load over HTTP: what is sent, what counts as an answer, and vLLM's fields of it."""

import json
import math
import sys
from dataclasses import replace

import pytest

pytest.importorskip("httpx")
from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.measure.bench.cases import ServingCase, Workload
from octavo.measure.bench.requests import DataSet, Prompt
from octavo.measure.bench.serving import make_record, run_serving, vllm_result
from octavo.measure.records import Measurement
from octavo_testkit.serving.scripted_server import scripted

WORK = Workload(num_prompts=6, input_len=10, output_len=4, range_ratio=0.15)
# Of vLLM's file, as notes on its `bench serve` have them.
VLLM_FIELDS = {
    **dict.fromkeys(("date", "endpoint_type", "backend", "model_id", "tokenizer_id"), str),
    "label": type(None),
    **dict.fromkeys(("num_prompts", "max_concurrency", "completed", "failed"), int),
    **dict.fromkeys(("total_input_tokens", "total_output_tokens", "max_concurrent_requests"), int),
    "request_rate": str,
    "request_goodput": type(None),
    **dict.fromkeys(("burstiness", "duration", "request_throughput", "output_throughput"), float),
    **dict.fromkeys(("total_token_throughput", "max_output_tokens_per_s", "rtfx"), float),
    **dict.fromkeys(("latencies", "queue_times"), list),
    **{
        f"{kind}_{metric}_ms": float
        for kind in ("mean", "median", "std", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    },
}
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")


def ramp(*given):
    names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    return dict(zip(names, given, strict=True))


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
    result = json.loads(
        json.dumps(
            vllm_result(case, served, metadata={"note": "x"}, is_detailed=False), allow_nan=False
        )
    )
    assert result.keys() == VLLM_FIELDS.keys() | {"note", "total_parts"}
    assert {name: type(result[name]) for name in VLLM_FIELDS} == VLLM_FIELDS
    assert result["request_rate"] == "inf" and result["max_concurrency"] == 3
    assert len(result["latencies"]) == 6 and min(result["latencies"]) > 0
    assert [type(time_s) for time_s in result["queue_times"]] == [float] * 6
    detailed = vllm_result(case, served, metadata={}, is_detailed=True)
    assert detailed.keys() == VLLM_FIELDS.keys() | {"total_parts", *DETAILS}
    assert all(isinstance(detailed[name], list) for name in DETAILS)
    assert set(detailed["generated_texts"][0]) == {"x"}
    record = make_record(case, served, command="c", has_own_server=False, options=[])
    assert record.op == "serve" and record.impl == "http"
    assert record.case["request_rate"] == "inf" and record.values["completed"] == 6
    assert Measurement.from_json(record.to_json()) == record


def test_octavo_s_own_server_takes_the_load():
    pytest.importorskip("fastapi")
    from octavo_testkit.serving.fake_server import listening

    with listening() as (url, engine, _):
        case = ServingCase(base_url=url, workload=WORK, max_concurrency=2, percentiles=(99.0,))
        served = run_serving(case)
        texts = DataSet(prompts=(Prompt(4, text="say:hello"),) * 2)
        chat = run_serving(ServingCase(base_url=url, workload=texts, backend="openai-chat"))
        assert engine.num_open == 0
    result = vllm_result(case, served, metadata={}, is_detailed=False)
    assert {name: type(result[name]) for name in VLLM_FIELDS} == VLLM_FIELDS
    assert chat.metrics["completed"] == 2 and chat.metrics["total_input_tokens"] > 0
    assert chat.times[0].text
    assert served.model == "fake" and served.metrics["completed"] == 6
    assert served.metrics["total_output_tokens"] == sum(p.output_len for p in WORK.draw(1000))
    assert {request.sampling.ignore_eos for request in engine.added} == {True}


def test_without_httpx_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UnsupportedError, match=r"pip install .*\[server\]'"):
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


def test_a_rate_and_limits_are_in_the_file():
    with scripted(step_s=0.002) as server:
        limits = {"ttft": 1e5, "tpot": 1e5, "e2el": 1e-3}
        case = make_case(server, request_rate=500.0, goodput_ms=limits)
        served = run_serving(case)
        easy = replace(case, goodput_ms={"ttft": 1e5})
        good = run_serving(easy)
    result = vllm_result(case, served, metadata={}, is_detailed=False)
    assert result["request_rate"] == 500.0 and result["request_goodput"] == 0.0
    assert isinstance(result["request_goodput"], float)
    assert good.metrics["request_goodput"] == good.metrics["request_throughput"]
    record = make_record(easy, good, command="c", has_own_server=False, options=[])
    assert record.case["goodput"] == "ttft:100000"


def test_what_waits_here_is_in_the_queue():
    with scripted(step_s=0.01) as server:
        served = run_serving(make_case(server, max_concurrency=1))
    waits = sorted(one.queue_s for one in served.times)
    assert waits[0] < 0.01 and waits[-1] > 5 * 0.03  # behind five answers of three parts or more


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_goes_from_one_rate_to_another(strategy, middle):
    work = Workload(num_prompts=4002, input_len=1, output_len=1)
    case = ServingCase(workload=work, **ramp(strategy, 1.0, 100.0), burstiness=1e6)
    delays = case.delays_s()
    gaps = [later - earlier for earlier, later in zip(delays, delays[1:], strict=False)]
    assert (1 / gaps[0], 1 / gaps[-1]) == pytest.approx((1.0, 100.0), rel=0.02)
    assert 1 / gaps[2000] == pytest.approx(middle, rel=0.02)
    assert delays == case.delays_s() and delays[0] == 0 and len(delays) == 4002


def test_texts_and_images_go_to_chat():
    prompts = (Prompt(3, text="one"), Prompt(3, text="two", images=("data:image/png;base64,AA",)))
    with scripted() as server:
        case = make_case(server, workload=DataSet(prompts=prompts), backend="openai-chat")
        served = run_serving(case)
    assert set(server.paths) == {"/v1/chat/completions"}
    contents = [body["messages"][0]["content"] for body in server.bodies]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert "one" in contents and [{"type": "text", "text": "two"}, image] in contents
    # A role alone, and a reason to end, are no parts.
    assert [len(one.parts_s) for one in served.times] == [3, 3]
    assert [one.text for one in served.times] == ["xxx"] * 2
    assert served.metrics["total_input_tokens"] == 14
    result = vllm_result(case, served, metadata={}, is_detailed=False)
    assert result["backend"] == result["endpoint_type"] == "openai-chat"


def test_a_chat_without_text_has_one_part():
    data = DataSet(prompts=(Prompt(2, text="hello"),))
    with scripted(["empty"]) as server:
        served = run_serving(make_case(server, workload=data, backend="openai-chat"))
    assert len(served.times[0].parts_s) == 1 and served.metrics["total_output_tokens"] == 2


def test_texts_go_to_completions():
    data = DataSet(prompts=(Prompt(2, text="hello"),), seed=3, facts={"dataset": "custom"})
    with scripted() as server:
        case = make_case(server, workload=data)
        served = run_serving(case)
    assert server.bodies[0]["prompt"] == "hello" and server.paths == ["/v1/completions"]
    record = make_record(case, served, command="c", has_own_server=False, options=[])
    assert record.case["dataset"] == "custom" and record.case["seed"] == 3
    assert "input_len" not in record.case


IMAGES = DataSet(prompts=(Prompt(1, text="x", images=("data:,",)),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "openai-chat"}, "random prompts are tokens"),
        ({"backend": "tgi"}, "expected a backend of openai, openai-chat"),
        ({"workload": IMAGES}, "completions take no images"),
        ({"goodput_ms": {"itl": 3.0}}, "limits above 0 ms of ttft, tpot, e2el"),
        ({"goodput_ms": {"ttft": 0.0}}, "limits above 0 ms"),
        (
            {"request_rate": 2.0, **ramp("linear", 1, 2)},
            "a request rate or a ramp",
        ),
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


@pytest.mark.parametrize(
    "given", [("steep", 1, 2), ("linear", 0, 2), ("linear", 1, math.inf), ("linear", 1, None)]
)
def test_what_is_no_ramp(given):
    with pytest.raises(ConfigError, match="ramp"):
        ServingCase(workload=WORK, **ramp(*given))
