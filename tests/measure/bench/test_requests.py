"""Prompts of data sets: what files may hold, what is chosen; times of requests to vLLM's fields."""

import base64
import io
import json
import math

import pytest

from octavo.errors import ConfigError
from octavo.measure.bench.cases import Workload
from octavo.measure.bench.requests import (
    DataSet,
    ImageRequests,
    Prompt,
    RequestTimes,
    custom_data,
    goodput,
    random_mm_data,
    sharegpt_data,
    summarize,
)


def write(tmp_path, text):
    path = tmp_path / "data"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def rows(*rows):
    return "\n".join(map(json.dumps, rows)) + "\n\n"


def test_a_user_s_rows(tmp_path):
    lines = [{"prompt": f"text {n}", "output_tokens": n + 1, "other": 0} for n in range(20)]
    path = write(tmp_path, rows(*lines))
    data = custom_data(path, 5, seed=1)
    assert data.num_prompts == 5 and data == custom_data(path, 5, seed=1)
    assert data.prompts != custom_data(path, 5, seed=2).prompts
    assert {(p.text, p.output_len) for p in custom_data(path, 20).prompts} == {
        (f"text {n}", n + 1) for n in range(20)
    }
    assert data.facts == {"dataset": "custom", "dataset_file": "data"}
    same = custom_data(path, 5, output_len=9)
    assert {p.output_len for p in same.prompts} == {9} and same.facts["output_len"] == 9


def test_a_prompt_may_have_any_character(tmp_path):
    text = "one\u2028two\x85three"
    path = tmp_path / "data"
    row = json.dumps({"prompt": text, "output_tokens": 1}, ensure_ascii=False)
    path.write_bytes(f"{row}\r\n".encode())
    assert custom_data(path, 1).prompts == (Prompt(1, text=text),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": 1, "output_tokens": 1}', 'data:1: expected {"prompt": "a text"}'),
        ('{"prompt": "", "output_tokens": 1}', 'expected {"prompt": "a text"}'),
        ('{"prompt": "x"}', "data:1: expected output_tokens of at least 1, got None"),
        ('{"prompt": "x", "output_tokens": true}', "output_tokens of at least 1"),
        ('{"prompt": "x", "output_tokens": 1}\n[]', 'data:2: expected {"prompt"'),
        ("oops", "data:1: expected JSON"),
        ('{"prompt": "x", "output_tokens": 1}', "expected 2 prompts or more, got 1"),
    ],
)
def test_what_is_no_row(tmp_path, text, message):
    with pytest.raises(ConfigError) as info:
        custom_data(write(tmp_path, text), 2)
    assert message in str(info.value)


def chat(*turns):
    speakers = ["human", "gpt"] * len(turns)
    pairs = zip(speakers, turns, strict=False)
    return {"conversations": [{"from": speaker, "value": turn} for speaker, turn in pairs]}


def words(text):
    return len(text.split())


def test_the_first_question_of_each_conversation(tmp_path):
    system = {"conversations": [{"from": "system", "value": "x"}, {"from": "gpt", "value": "y"}]}
    path = write(tmp_path, [chat("a b c d e", "f g h i", "more"), chat("alone"), system])
    data = sharegpt_data(path, 1, output_len=7)
    assert data.prompts == (Prompt(7, text="a b c d e"),)
    assert sharegpt_data(path, 1, count_tokens=words).prompts == (Prompt(4, text="a b c d e"),)
    with pytest.raises(ConfigError, match="expected 2 prompts or more, got 1"):
        sharegpt_data(path, 2, output_len=7)


@pytest.mark.parametrize(("num_in", "num_out"), [(3, 10), (10, 3), (1025, 10), (1000, 1049)])
def test_vllm_s_limits_hold_where_tokens_are_counted(tmp_path, num_in, num_out):
    kept = chat("w " * 1000, "w " * 1048)
    path = write(tmp_path, [chat("w " * num_in, "w " * num_out), kept])
    assert len(sharegpt_data(path, 1, count_tokens=words).prompts) == 1
    with pytest.raises(ConfigError, match="got 1: ask for fewer"):
        sharegpt_data(path, 2, count_tokens=words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "expected a JSON list of conversations"),
        ("oops", "expected a JSON list of conversations"),
        ("[1]", "conversation 0: expected"),
        ('[{"conversations": [1]}]', 'expected turns with "from" and "value"'),
    ],
)
def test_what_is_no_sharegpt(tmp_path, text, message):
    with pytest.raises(ConfigError) as info:
        sharegpt_data(write(tmp_path, text), 1, output_len=1)
    assert message in str(info.value)
    with pytest.raises(ConfigError, match="a length of answers, or a tokenizer"):
        sharegpt_data(tmp_path / "data", 1)
    with pytest.raises(ConfigError, match="No such file"):
        sharegpt_data(tmp_path / "none", 1, output_len=1)


def test_random_images():
    image = pytest.importorskip("PIL.Image")
    options = ImageRequests(
        num_prompts=2, base_items_per_request=2, bucket_config="{(8, 16, 1): 1.0}", seed=5
    )
    data = random_mm_data(options, output_len=3)
    assert all(one.images for one in data.prompts) and data.num_prompts == 2 and data.seed == 5
    assert data.facts["items_per_request"] == 2 and data.facts["bucket_config"]
    kind, _, content = data.prompts[0].images[1].partition(",")
    assert kind == "data:image/png;base64"
    assert image.open(io.BytesIO(base64.b64decode(content))).size == (16, 8)
    assert data == random_mm_data(options, output_len=3)


def test_no_prompts():
    with pytest.raises(ConfigError, match="a data set with prompts"):
        DataSet(prompts=())


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
    with pytest.raises(ConfigError, match="limits of ttft, tpot, e2el; got 'itl'"):
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
