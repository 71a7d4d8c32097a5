"""The routes, one by one: what they answer, and what they refuse."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from octavo.errors import ConfigError
from octavo.serving.server.app import create_app
from octavo.serving.server.guidance import guided_grammars
from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_engine import Deaf, FakeEngine
from octavo_testkit.serving.fake_server import (
    CHAT,
    HELLO,
    TEXT,
    events,
    get,
    post,
    serving,
    with_client,
)


def test_chat():
    body = post(CHAT, {"model": "fake", "messages": HELLO}).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    usage = body["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_chat_stream():
    asked = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    chunks, is_done = events(post(CHAT, asked))
    assert is_done
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]]
    assert "".join(texts) == "hello"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert all("usage" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("prompt", ["say:hello", ["say:hello"], [115, 97, 121, 58, 104, 105]])
def test_completion(prompt):
    body = post(TEXT, {"prompt": prompt, "max_tokens": 2}).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == ("he" if "hello" in str(prompt) else "hi")[:2]
    assert body["choices"][0]["finish_reason"] == "length"


def test_completion_stream_has_the_same_text():
    chunks, is_done = events(post(TEXT, {"prompt": "say:hello", "stream": True}))
    assert is_done
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_tokens_default_to_16_for_texts_and_the_context_for_chats():
    engine = FakeEngine(max_context=300)
    post(TEXT, {"prompt": "long:"}, engine)
    post(CHAT, {"messages": [{"role": "user", "content": "long:"}]}, engine)
    text, chat = engine.added
    assert text.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == 300 - len(chat.prompt)


def test_sampling_reaches_the_engine():
    asked = {
        "messages": HELLO,
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "seed": 3,
        "stop": ["a", "b"],
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [5],
        "n": 1,
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "mine",
        "logit_bias": {"7": -100, "9": 0.5},
    }
    engine = FakeEngine()
    assert post(CHAT, asked, engine).status_code == 200
    sampling = engine.added[0].sampling
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "min_p")
    names += ("repetition_penalty", "ignore_eos", "min_tokens")
    assert {name: getattr(sampling, name) for name in names} == {n: asked[n] for n in names}
    assert (sampling.max_tokens, sampling.top_k) == (9, 0)
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (5,))
    assert sampling.logit_bias == ((7, -100), (9, 0.5))
    assert sampling.logprobs is None and sampling.grammar is None


def test_logprobs_of_chats():
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    content = post(CHAT, asked).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("hello")
    assert content[0]["bytes"] == [104]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["h", "i"]
    chunks, _ = events(post(CHAT, {**asked, "stream": True}))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [e["token"] for one in found if one for e in one["content"]] == list("hello")


def test_logprobs_of_texts():
    asked = {"prompt": "say:hey", "logprobs": 1}
    logprobs = post(TEXT, asked).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("hey")
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"h": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2]
    chunks, _ = events(post(TEXT, {**asked, "stream": True}))
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks]
    assert sum(offsets, []) == [0, 1, 2]


REFUSED = [
    ({"n": 0}, "n: expected greater than or equal to 1, got 0"),
    ({"n": 129}, "n: expected less than or equal to 128, got 129"),
    ({"n": True}, "n: expected a valid integer"),
    ({"logit_bias": {"5": 100.5}}, "less than or equal to 100"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
    ({"logit_bias": {"five": 1}}, "logit_bias.five"),
    ({"logit_bias": {"5": 1, "05": 1}}, "two for one"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "at most 300 items"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"temprature": 1}, "temprature: this server does not know this field"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "got both"),
    ({"max_tokens": 5000}, "ask for less"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"top_logprobs": 2}, "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "needs stream"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "ask for less"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "roles must alternate"),
    ({"messages": [{"role": "king", "content": "x"}]}, "role"),
    ({"tool_choice": "required"}, "needs tools"),
    ({"response_format": {"type": "json_schema"}}, "expected json_schema"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "impossible"}},
            }
        },
        "cannot be followed",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda part: str(part)[:40])
def test_chat_refuses(fields, message):
    response = post(CHAT, {"messages": HELLO, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ["a"] * 65, "n": 2}, "65 prompts with n = 2 ask for 130 choices"),
        ({"prompt": [[5]] * 129}, "129 prompts with n = 1 ask for 129 choices"),
        ({"prompt": ["a", [5]]}, "prompt"),
        ({"prompt": ["a", ""]}, "one token or more"),
        ({"prompt": ["a", "x" * 5000]}, "ask for less"),
        ({"prompt": [[5], [2**30]]}, "expected token ids below"),
        ({"prompt": []}, "expected one prompt or more"),
        ({"prompt": ""}, "one token or more"),
        ({"prompt": [[]]}, "one token or more"),
        ({"prompt": [2**30]}, "expected token ids below"),
        ({"prompt": [-1]}, "prompt"),
        ({"echo": True, "logprobs": 0}, "echo together with logprobs is not supported"),
        ({"echo": True, "max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of must equal n (1)"),
        ({"best_of": 2, "n": 3}, "best_of must equal n (3)"),
        ({"suffix": "x"}, "suffix: not supported"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_completion_refuses(fields, message):
    response = post(TEXT, {"prompt": "x", **fields})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_models():
    names = ("a", "b/c")
    listed = get("/v1/models", model_names=names).json()
    assert [model["id"] for model in listed["data"]] == ["a", "b/c"]
    assert get("/v1/models/b/c", model_names=names).json()["max_model_len"] == 4096
    missing = get("/v1/models/d", model_names=names)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    answer = post(CHAT, {"model": "b/c", "messages": HELLO}, model_names=names)
    assert answer.json()["model"] == "b/c"
    wrong = post(CHAT, {"model": "fake", "messages": HELLO}, model_names=names)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "model")


def test_tokenize_and_back():
    body = post("/tokenize", {"prompt": "hé"}).json()
    assert body == {"count": 2, "max_model_len": 4096, "tokens": [104, 233]}
    assert post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "hé"}
    chat = post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()
    assert "".join(map(chr, chat["tokens"])) == "user: say:hello"
    assert post("/tokenize", {"prompt": "x", "messages": HELLO}).status_code == 400
    assert post("/tokenize", {}).status_code == 400
    assert post("/detokenize", {"tokens": [2**30]}).status_code == 400
    assert post("/tokenize", {"prompt": "x", "model": "other"}).status_code == 404


def test_health_follows_the_engine():
    async def scenario(client):
        assert (await client.get("/health")).json() == {"status": "ok"}
        failed = await client.post(CHAT, json={"messages": [{"role": "user", "content": "crash:"}]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_failed")
        health = await client.get("/health")
        assert (health.status_code, "the GPU is gone" in health.text) == (503, True)
        refused = await client.post(CHAT, json={"messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")

    async def run():
        async with serving() as client:
            await scenario(client)

    asyncio.run(run())


def test_a_stream_that_fails_says_so_and_has_no_done():
    asked = {"messages": [{"role": "user", "content": "fail: and so on"}], "stream": True}
    documents, is_done = events(post(CHAT, asked))
    assert not is_done
    assert documents[-1]["error"]["message"] == "this request cannot go on"


def test_token_limit():
    refused = post(CHAT, {"messages": HELLO, "max_tokens": 11}, max_tokens=10)
    assert "at most 10" in refused.json()["error"]["message"]
    engine = FakeEngine()
    assert post(CHAT, {"messages": HELLO}, engine, max_tokens=10).status_code == 200
    assert engine.added[0].sampling.max_tokens == 10


def test_a_full_server_says_when_to_come_back():
    async def scenario(client):
        slow = {"prompt": "long:", "max_tokens": 300}
        first = asyncio.ensure_future(client.post(TEXT, json=slow))
        while client.server.engine.num_open == 0:
            await asyncio.sleep(0.005)
        refused = await client.post(TEXT, json=slow)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await first).status_code == 200

    with_client(scenario, FakeEngine(step_s=0.001), max_open=1)


def test_time_out():
    engine = FakeEngine(step_s=0.02)
    response = post(TEXT, {"prompt": "long:", "max_tokens": 1000}, engine, timeout_s=0.1)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")


def test_a_stream_that_takes_too_long_ends_with_an_error():
    asked = {"prompt": "long:", "max_tokens": 1000, "stream": True}
    documents, is_done = events(post(TEXT, asked, FakeEngine(step_s=0.02), timeout_s=0.2))
    assert not is_done
    assert documents[0]["choices"][0]["text"]
    assert documents[-1]["error"]["code"] == "request_timeout"


def test_openapi_describes_the_routes():
    document = get("/openapi.json").json()
    assert {CHAT, TEXT, "/v1/models", "/tokenize", "/detokenize"} <= document["paths"].keys()
    assert get("/docs").status_code == 404


def test_one_tool_call_if_no_more_are_allowed():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": [{"role": "user", "content": f"say:{call}{call}"}], "tools": [tool]}
    for fields, num_calls in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        message = post(CHAT, {**asked, **fields}).json()["choices"][0]["message"]
        assert len(message["tool_calls"]) == num_calls
        assert message["content"] is None


def test_an_engine_without_a_tokenizer_cannot_be_served():
    with pytest.raises(ConfigError, match="tokenizer"):
        create_app(FakeEngine(tokenizer=None), ServerSettings())


def test_guided_answers_end_as_the_model_says():
    pytest.importorskip("llguidance")
    pytest.importorskip("transformers")
    from octavo_testkit.models.tokenizers_of_kinds import byte_level

    tokenizer = byte_level()
    assert tokenizer.eos_token_id is None
    engine = SimpleNamespace(tokenizer=tokenizer, eos_tokens=(9, 11, 5000))
    state = guided_grammars(engine)({"type": "integer"}).start()
    state.advance(*tokenizer.encode("7", add_special_tokens=False))
    allowed = state.allowed("cpu")[0].item()
    assert allowed >> 9 & 1
    assert allowed >> 11 & 1
    with pytest.raises(ConfigError, match="ends an answer"):
        guided_grammars(SimpleNamespace(tokenizer=tokenizer, eos_tokens=()))({"type": "integer"})


LOOK_UP = {"type": "function", "function": {"name": "look_up"}}


def test_tools_that_the_chat_template_ignores_are_refused():
    asked = {"messages": HELLO, "tools": [LOOK_UP]}
    for path, fields in ((CHAT, {}), (CHAT, {"tool_choice": "auto"}), ("/tokenize", {})):
        response = post(path, {**asked, **fields}, FakeEngine(tokenizer=Deaf()))
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("tools", "tools_not_supported")
        assert "leaves out tools" in error["message"] and "--chat-template" in error["message"]
        assert post(path, {**asked, **fields}).status_code == 200  # a template that writes them
    answer = post(CHAT, {**asked, "tool_choice": "none"}, FakeEngine(tokenizer=Deaf()))
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


def test_a_forced_call_that_the_template_does_not_show_warns_once(caplog):
    asked = {"messages": HELLO, "tools": [LOOK_UP], "tool_choice": "required"}

    async def scenario(client):
        return [await client.post(CHAT, json=asked) for _ in range(2)]

    answers = with_client(scenario, FakeEngine(tokenizer=Deaf()))
    for answer in answers:
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "look_up"
    (record,) = [r for r in caplog.records if "leaves out tools" in r.getMessage()]
    assert record.levelname == "WARNING"


def test_a_model_without_a_chat_template():
    pytest.importorskip("transformers")
    from octavo_testkit.models.text_models import make_tokenizer

    tokenizer = make_tokenizer(chat_template=None, has_bos=False)
    error = post(CHAT, {"messages": HELLO}, FakeEngine(tokenizer=tokenizer)).json()["error"]
    assert error["message"] == (
        "the model has no chat template: give it one with --chat-template FILE (octavo.LLM: "
        "chat_template=…), or send plain text (/v1/completions)"
    )
    assert error["param"] == "messages"
    answer = post(TEXT, {"prompt": "say:hello"}, FakeEngine(tokenizer=tokenizer))
    assert answer.json()["choices"][0]["text"] == "hello"


TRIP = {
    "type": "object",
    "properties": {
        "to": {"type": "object", "properties": {"city": {"type": "string"}}},
        "notes": {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
    },
    "required": ["to"],
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
def test_forced_calls_have_declared_properties_alone(choice):
    tool = {"type": "function", "function": {"name": "go", "parameters": TRIP}}

    async def scenario(client):
        asked = {"messages": HELLO, "tools": [tool], "tool_choice": choice}
        assert (await client.post(CHAT, json=asked)).status_code == 200
        return client.engine.added[-1].sampling.grammar.schema

    schema = with_client(scenario)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["to"]["additionalProperties"] is False
    assert schema["properties"]["notes"] == TRIP["properties"]["notes"]  # it says otherwise
