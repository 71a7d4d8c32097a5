"""LangChain and litellm in conversation with the server, as their documentation shows it."""

import asyncio
import json
import socket
import time
from typing import Literal

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("openai")

import httpx
import openai

from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_engine import FakeEngine
from octavo_testkit.serving.fake_server import listening

# "default": what other libraries warn of is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
QUESTION = "What is the capital of France?"
FRANCE = [{"role": "user", "content": QUESTION}]
PARIS = "The capital of France is Paris."


class City(BaseModel):
    """A city."""

    city: Literal["Bern", "Oslo", "Paris"] = Field(description="Its name.")


def weather(city: Literal["Bern", "Oslo", "Paris"]) -> str:
    """Tell the weather in a city."""
    return f"In {city} it is sunny."


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
WEATHER["function"]["parameters"] = City.model_json_schema()


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing but this machine can be reached."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or litellm fetches its prices
    connect = socket.socket.connect

    def connect_here(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)


@pytest.fixture(scope="module")
def small():
    pytest.importorskip("gguf")
    pytest.importorskip("llguidance")
    from octavo_testkit.serving.small_server import listening_small_model, wait_until_idle

    with listening_small_model() as running:
        yield running
        wait_until_idle(running[2])


@pytest.fixture(scope="module")
def fake():
    with listening(FakeEngine(), ServerSettings(max_open=2)) as running:
        yield running


def chat_model(server, **options):
    """LangChain's model."""
    langchain_openai = pytest.importorskip("langchain_openai")
    options = {"max_tokens": 16, "temperature": 0, **options}
    name = server[1].model_name
    return langchain_openai.ChatOpenAI(
        base_url=f"{server[0]}/v1", api_key="none", model=name, max_retries=0, **options
    )


def complete(server, messages=FRANCE, is_async=False, **fields):
    """litellm's function."""
    litellm = pytest.importorskip("litellm")
    function = litellm.acompletion if is_async else litellm.completion
    return function(
        model=f"openai/{server[1].model_name}",
        api_base=f"{server[0]}/v1",
        api_key="none",
        messages=messages,
        max_retries=0,
        **{"max_tokens": 16, "temperature": 0, **fields},
    )


def test_langchain_answers_whole_and_streamed(small):
    model = chat_model(small)
    answer = model.invoke([("system", "Answer in one sentence."), ("human", QUESTION)])
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == PARIS
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)


def test_langchain_asks_for_several_at_once(small):
    async def ask():
        # LangChain's own client would outlive the event loop.
        async with httpx.AsyncClient(timeout=60) as connections:
            short = chat_model(small, max_tokens=2, http_async_client=connections)
            batch = await short.abatch([QUESTION, QUESTION])
            streamed = [chunk.content async for chunk in short.astream(QUESTION)]
        return [answer.content for answer in batch], "".join(streamed)

    texts, streamed = asyncio.run(ask())
    assert texts == ["The capital"] * 2 and streamed == "The capital"
    short = chat_model(small, max_tokens=2)
    assert [answer.content for answer in short.batch([QUESTION] * 2)] == texts


def test_langchain_generates_two_choices(small):
    messages = pytest.importorskip("langchain_core.messages")

    model = chat_model(small, n=2, temperature=1.5, seed=1, max_tokens=4)
    result = model.generate([[messages.HumanMessage(QUESTION)]])
    first, second = [generation.text for generation in result.generations[0]]
    assert first != second
    assert result.llm_output["token_usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("method", [None, "json_schema", "function_calling", "json_mode"])
def test_langchain_has_structured_output(small, method):
    options = {} if method is None else {"method": method}
    structured = chat_model(small, max_tokens=40).with_structured_output(City, **options)
    asked = QUESTION + (' Answer as JSON: {"city": "…"}' if method == "json_mode" else "")
    assert structured.invoke(asked) == City(city="Paris")


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_langchain_binds_tools_and_sends_their_results(small, choice):
    messages = pytest.importorskip("langchain_core.messages")

    model = chat_model(small, max_tokens=40)
    bound = model.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    question = messages.HumanMessage(QUESTION)
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Bern", "Oslo", "Paris")
    result = messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    turn = model.bind(max_tokens=8).invoke([question, answer, result])
    assert turn.content and not turn.tool_calls


def test_langchain_learns_why_tools_that_nobody_sees_are_refused(small):
    bound = chat_model(small).bind_tools([weather])
    with pytest.raises(openai.BadRequestError, match="chat template leaves out tools"):
        bound.invoke(QUESTION)


def test_langchain_reads_calls_that_the_model_chose_to_make(fake):
    messages = pytest.importorskip("langchain_core.messages")

    text = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    question = messages.HumanMessage(f"say:{text}")
    bound = chat_model(fake, max_tokens=200).bind_tools([weather])
    answer = bound.invoke([question])
    chunks = list(bound.stream([question]))
    for calls in (answer.tool_calls, sum(chunks[1:], chunks[0]).tool_calls):
        (call,) = calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Bern"})
    result = messages.ToolMessage("say:sunny", tool_call_id=answer.tool_calls[0]["id"])
    assert bound.invoke([question, answer, result]).content == "sunny"


def test_litellm_answers_whole_and_streamed(small):
    answer = complete(small)
    assert answer.choices[0].message.content == PARIS
    assert answer.usage.completion_tokens > 0
    chunks = list(complete(small, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == PARIS
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_litellm_asks_for_two_choices(small):
    answer = complete(small, n=2, temperature=1.5, seed=1, max_tokens=4)
    first, second = [choice.message.content for choice in answer.choices]
    assert first != second and answer.usage.completion_tokens == 8


def test_litellm_asks_asynchronously(small):
    async def ask():
        # litellm's own client would outlive the event loop.
        async with openai.AsyncOpenAI(base_url=f"{small[0]}/v1", api_key="none") as client:
            fields = {"is_async": True, "max_tokens": 2, "client": client}
            whole = await complete(small, **fields)
            stream = await complete(small, **fields, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(texts)

    assert asyncio.run(ask()) == ("The capital", "The capital")


def test_litellm_has_structured_output(small):
    answer = complete(small, response_format=City, max_tokens=40)
    assert City.model_validate_json(answer.choices[0].message.content).city == "Paris"


def test_litellm_calls_tools_and_sends_their_results(small):
    answer = complete(small, tools=[WEATHER], tool_choice="required", max_tokens=40)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Oslo", "Paris")
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "sunny"}
    turn = complete(small, [*FRANCE, message, result], max_tokens=8)
    assert turn.choices[0].message.content


def test_litellm_knows_the_errors(fake):
    litellm = pytest.importorskip("litellm")
    url, engine, server = fake
    with pytest.raises(litellm.BadRequestError, match="less than or equal to 128, got 129"):
        complete(fake, n=129)
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(fake, [{"role": "user", "content": "x" * 5000}])
    engine.step_s = 0.01
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked = {"model": "fake", "prompt": "long:", "max_tokens": 4000, "n": 2}
        stream = client.completions.create(**asked, stream=True)
        with pytest.raises(litellm.RateLimitError, match="2 of at most 2 requests are open"):
            complete(fake)
        stream.close()
    deadline = time.monotonic() + 10
    while server.engine.num_open:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.step_s = 0.0
