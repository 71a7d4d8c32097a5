"""The official client and the embedded default: a scripted conversation with SmolLM2."""

import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("gguf")
pytest.importorskip("llguidance")

import openai

from octavo_testkit.serving.small_server import NAME, listening_small_model, wait_until_idle

pytestmark = pytest.mark.slow
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": CITY}}


@pytest.fixture(scope="module")
def server():
    with listening_small_model() as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as made:
        yield made
    wait_until_idle(server[2])


def ask(client, messages=FRANCE, **fields):
    fields = {"max_tokens": 16, "temperature": 0, **fields}
    return client.chat.completions.create(model=NAME, messages=messages, **fields)


def test_whole_and_streamed_answers_are_the_same(client):
    whole = ask(client, logprobs=True, top_logprobs=2)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    tops = [token.top_logprobs[0].token for token in whole.choices[0].logprobs.content]
    assert tops == [token.token for token in whole.choices[0].logprobs.content]
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stop_and_seed(client):
    assert ask(client, stop=[" Paris"]).choices[0].message.content == "The capital of France is"
    texts = [
        ask(client, seed=seed, temperature=1.5).choices[0].message.content for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_guided_answers(client):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = ask(client, response_format=form, max_tokens=64)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Bern", "Oslo", "Paris")
    for tools in ([WEATHER], [WEATHER, CLOCK]):
        answer = ask(client, tools=tools, tool_choice="required", max_tokens=100)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name in ("weather", "clock")
        assert json.loads(call.function.arguments)["city"] in ("Bern", "Oslo", "Paris")
        assert answer.choices[0].finish_reason == "tool_calls"


def test_choices_differ_by_their_seeds(client):
    fields = {"max_tokens": 4, "temperature": 1.5, "seed": 1}
    both = [choice.message.content for choice in ask(client, n=2, **fields).choices]
    alone = [ask(client, **{**fields, "seed": seed}).choices[0].message.content for seed in (1, 2)]
    assert both == alone and both[0] != both[1]


def test_a_list_of_prompts_with_a_bias(client):
    prompts = ["The capital of France is", "The capital of Norway is"]
    fields = {"model": NAME, "prompt": prompts, "max_tokens": 1, "temperature": 0, "echo": True}
    answer = client.completions.create(**fields)
    assert answer.choices[0].text == "The capital of France is Paris"
    assert answer.choices[1].text.startswith("The capital of Norway is ")
    (token,) = client.post("/../tokenize", body={"prompt": " Paris"}, cast_to=object)["tokens"]
    biased = client.completions.create(**fields, logit_bias={str(token): -100})
    assert "Paris" not in biased.choices[0].text
    biased = client.completions.create(**fields, logit_bias={str(token): 100})
    assert [choice.text for choice in biased.choices] == [f"{one} Paris" for one in prompts]
    with pytest.raises(openai.BadRequestError, match="tokens in logit_bias"):
        client.completions.create(**fields, logit_bias={"1000000": 1})


def test_the_turn_after_a_forced_call(client):
    forced = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tools=[WEATHER], tool_choice=forced, max_tokens=40)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"}
    turn = ask(client, [*FRANCE, message, result], tools=[WEATHER], tool_choice="none")
    assert turn.choices[0].message.content


def test_cancel_and_refuse(client, server):
    stream = ask(
        client, stream=True, max_tokens=400, temperature=1, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.BadRequestError, match="512 tokens"):
        ask(client, [{"role": "user", "content": "x " * 600}])
    with pytest.raises(openai.BadRequestError, match="reads no images"):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        ask(client, [{"role": "user", "content": [image]}])
