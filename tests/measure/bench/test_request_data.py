"""Prompts of data sets: what files may hold, what is chosen, what is refused."""

import base64
import io
import json

import pytest

from octavo.errors import ConfigError
from octavo.measure.bench.request_data import (
    DataSet,
    ImageRequests,
    ServingPrompt,
    custom_data,
    random_mm_data,
    sharegpt_data,
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
    assert custom_data(path, 1).prompts == (ServingPrompt(text, 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": 1, "output_tokens": 1}', 'data:1: expected {"prompt": "a text"}'),
        ('{"prompt": "", "output_tokens": 1}', 'expected {"prompt": "a text"}'),
        ('{"prompt": "x"}', "data:1: expected output_tokens of at least 1, got None"),
        ('{"prompt": "x", "output_tokens": true}', "output_tokens of at least 1"),
        ('{"prompt": "x", "output_tokens": 1}\n[]', "data:2: expected a JSON object"),
        ("oops", "data:1: expected a line of JSON"),
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
    assert data.prompts == (ServingPrompt("a b c d e", 7),)
    assert sharegpt_data(path, 1, count_tokens=words).prompts == (ServingPrompt("a b c d e", 4),)
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
    assert data.has_images and data.num_prompts == 2 and data.seed == 5
    assert data.facts["items_per_request"] == 2 and data.facts["bucket_config"]
    kind, _, content = data.prompts[0].images[1].partition(",")
    assert kind == "data:image/png;base64"
    assert image.open(io.BytesIO(base64.b64decode(content))).size == (16, 8)
    assert data == random_mm_data(options, output_len=3)


def test_no_prompts():
    with pytest.raises(ConfigError, match="a data set with prompts"):
        DataSet(prompts=())
