"""The official client and the embedded default: a scripted conversation with SmolLM2."""

import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
pytest.importorskip("gguf")
pytest.importorskip("llguidance")
sys.path.insert(0, str(Path(__file__).parent))

from fake_server import listening  # noqa: E402

from octavo.errors import UnsupportedError  # noqa: E402
from octavo.integrations.transformers.small_model import find_weights  # noqa: E402
from octavo.serving.engine import engine as engine_module  # noqa: E402
from octavo.serving.engine import settings as engine_settings  # noqa: E402
from octavo.serving.server.settings import ServerSettings  # noqa: E402

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
    try:
        find_weights()
    except UnsupportedError as error:
        pytest.skip(str(error))
    settings = engine_settings.EngineSettings(num_pages=64, max_context=512, max_num_seqs=8)
    engine = engine_module.load_engine(None, None, settings, device="cpu")
    # None: the real grammars.
    with listening(engine, ServerSettings(), make_grammar=None) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as made:
        yield made
    deadline = time.monotonic() + 10
    while server[2].engine.num_open or server[2].engine.last_stats.num_pages_in_use:
        assert time.monotonic() < deadline, "a request or a page was not given back"
        time.sleep(0.02)


def ask(client, messages=FRANCE, **fields):
    fields = {"max_tokens": 16, "temperature": 0, **fields}
    name = "SmolLM2-135M-Instruct"
    return client.chat.completions.create(model=name, messages=messages, **fields)


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
