"""The official client against a server that listens: what OpenAI's users do."""

import json
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai

from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import listening

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "$defs": {"days": {"type": "integer"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def server():
    with listening(FakeEngine(), ServerSettings(api_keys=("secret",))) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="secret", max_retries=0) as made:
        yield made
    _, engine, asynchronous = server
    deadline = time.monotonic() + 5
    while engine.num_open or asynchronous.engine.num_open:
        assert time.monotonic() < deadline, "a request was not ended"
        time.sleep(0.01)


def say(text):
    return [{"role": "user", "content": f"say:{text}"}]


def test_models_and_wrong_keys(client, server):
    assert [model.id for model in client.models.list()] == ["fake"]
    with (
        openai.OpenAI(base_url=f"{server[0]}/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError, match="expected an API key"),
    ):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=say("x"))
    with pytest.raises(openai.BadRequestError, match="n: expected less than or equal to 128"):
        client.chat.completions.create(model="fake", messages=say("x"), n=129)


def test_stream(client):
    stream = client.chat.completions.create(
        model="fake",
        messages=say("Grüße, 世界"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Grüße, 世界"
    assert chunks[-1].usage.completion_tokens == len(text)


def test_several_choices(client):
    asked = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "n": 3, "seed": 1}
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    by_index = sorted(streamed.choices, key=lambda choice: choice.index)
    assert [choice.message.content for choice in by_index] == texts


def test_a_list_of_prompts(client):
    prompts = ["say:one", "say:two"]
    whole = client.completions.create(model="fake", prompt=prompts, n=2, echo=True)
    texts = [choice.text for choice in whole.choices]
    assert texts == ["say:oneone", "say:oneone", "say:twotwo", "say:twotwo"]
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(
        model="fake", prompt=[list(map(ord, one)) for one in prompts], n=2, stream=True
    ):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
    assert list(streamed.values()) == ["one", "one", "two", "two"]


def test_stop_and_seed_and_logprobs(client):
    ask = client.chat.completions.create
    answer = ask(model="fake", messages=say("one two three"), stop=[" three"])
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].finish_reason == "stop"
    hello = [{"role": "user", "content": "hello"}]
    texts = [
        ask(model="fake", messages=hello, seed=seed).choices[0].message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    answer = ask(model="fake", messages=say("hi"), logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert [token.token for token in content] == ["h", "i"]
    assert len(content[0].top_logprobs) == 3
    text = client.completions.create(model="fake", prompt="say:hi", logprobs=2)
    assert text.choices[0].logprobs.tokens == ["h", "i"]


def test_json_schema_and_json_object(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    }
    answer = client.chat.completions.create(
        model="fake",
        messages=say("x"),
        response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content) == {"name": "text", "n": 7}
    answer = client.chat.completions.create(
        model="fake", messages=say("x"), response_format={"type": "json_object"}
    )
    assert json.loads(answer.choices[0].message.content) == {}


@pytest.mark.parametrize(
    ("tools", "choice", "name", "arguments", "reason"),
    [
        (
            [WEATHER, CLOCK],
            {"type": "function", "function": {"name": "weather"}},
            "weather",
            {"city": "Bern", "days": 7},
            "stop",
        ),
        ([WEATHER], "required", "weather", {"city": "Bern", "days": 7}, "tool_calls"),
        # The fake grammar takes the last of several.
        ([CLOCK, WEATHER], "required", "weather", {"city": "Bern", "days": 7}, "tool_calls"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_forced_tool_calls(client, tools, choice, name, arguments, reason, is_stream):
    asked = {"model": "fake", "messages": say("x"), "tools": tools, "tool_choice": choice}
    if is_stream:
        with client.chat.completions.stream(**asked) as stream:
            answer = stream.get_final_completion()
    else:
        answer = client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == name
    assert json.loads(call.function.arguments) == arguments
    assert call.id
    assert answer.choices[0].finish_reason == reason
    assert not answer.choices[0].message.content


def test_a_tool_call_of_the_models_own_and_the_turn_after_it(client, server):
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    answer = client.chat.completions.create(model="fake", messages=say(call), tools=[CLOCK])
    (made,) = answer.choices[0].message.tool_calls
    assert (made.function.name, made.function.arguments) == ("clock", "{}")
    assert answer.choices[0].finish_reason == "tool_calls"
    messages = [
        *say(call),
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": made.id, "content": "say:noon"},
    ]
    answer = client.chat.completions.create(model="fake", messages=messages, tools=[CLOCK])
    assert answer.choices[0].message.content == "noon"
    prompt = "".join(map(chr, server[1].added[-1].prompt))
    assert '"name": "clock"' in prompt and f"'id': '{made.id}'" in prompt


def test_a_message_comes_back_as_litellm_sends_it(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *say("x"),
        {"role": "assistant", "tool_calls": [call], "provider_specific_fields": {"refusal": None}},
        {"role": "tool", "tool_call_id": "call_1", "name": "clock", "content": "say:noon"},
    ]
    answer = client.chat.completions.create(model="fake", messages=messages)
    assert answer.choices[0].message.content == "noon"


def test_closing_a_stream_cancels_its_request(client, server):
    engine = server[1]
    engine.step_s = 0.002
    stream = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "long:"}], stream=True
    )
    answer_id = next(iter(stream)).id
    stream.close()
    deadline = time.monotonic() + 5
    while answer_id not in engine.ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.ended[answer_id] == "abort"
    engine.step_s = 0.0


def test_a_client_that_gives_up_on_a_whole_answer_cancels_it(client, server):
    engine = server[1]
    engine.step_s = 0.005
    before = len(engine.added)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model="fake", prompt="long:", max_tokens=4000
        )
    asked = engine.added[before].request_id
    deadline = time.monotonic() + 5
    while engine.ended.get(asked) != "abort":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.step_s = 0.0
