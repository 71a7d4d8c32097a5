"""The official client and the shipped chart reader: turns with an image."""

import base64
import functools
import io
import time

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
pytest.importorskip("PIL")
pytest.importorskip("openai")

import openai

from octavo.demo.chart_drawing import draw_chart, generated_questions
from octavo.demo.chart_reader import load_chart_reader
from octavo.demo.charts import make_chart
from octavo.recipe import Recipe
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.settings import EngineSettings
from octavo.serving.server.settings import ServerSettings
from octavo_testkit.serving.fake_server import listening

# Of the first charts that training has not seen; the reader answers 93 of 100 such questions.
QUESTIONS = generated_questions(12)
NUM_RIGHT = 8  # all of the first two charts; of the third it gets some wrong
SETTINGS = EngineSettings(num_pages=64, max_num_seqs=8)


def data_url(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def content(question, url=None):
    url = data_url(question.image) if url is None else url
    text = {"type": "text", "text": question.text}
    return [text, {"type": "image_url", "image_url": {"url": url}}]


def ask(client, parts, **fields):
    messages = [{"role": "user", "content": parts}]
    fields = {"temperature": 0, "max_tokens": 8, **fields}
    return client.chat.completions.create(model="chart-reader", messages=messages, **fields)


def connect(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


def start(dtype, recipe=None):
    engine = load_engine("chart-reader", recipe, SETTINGS, dtype=dtype, device="cpu")
    return listening(engine, ServerSettings(), make_grammar=None)


@pytest.fixture(scope="module")
def server():
    with start("float32") as running:
        yield running


@pytest.fixture
def client(server):
    with connect(server) as made:
        yield made
    deadline = time.monotonic() + 10
    while server[2].engine.num_open or server[2].engine.last_stats.num_pages_in_use:
        assert time.monotonic() < deadline, "a request or a page was not given back"
        time.sleep(0.02)


def test_answers_are_right_and_those_of_generate(client):
    images, texts = zip(*((q.image, q.text) for q in QUESTIONS), strict=True)
    own = load_chart_reader(dtype=torch.float32).answer(images, texts)
    answers = [ask(client, content(question)).choices[0] for question in QUESTIONS]
    found = [answer.message.content for answer in answers]
    assert found == own
    assert all(a in q.answers for a, q in zip(found[:NUM_RIGHT], QUESTIONS, strict=False))
    assert {answer.finish_reason for answer in answers} == {"stop"}


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [("bfloat16", None), ("bfloat16", Recipe(vision_attention="fp8"))],
    ids=["bf16", "fp8"],
)
def test_answers_are_right_in_fewer_bits(dtype, recipe):
    with start(dtype, recipe) as running, connect(running) as client:
        for question in QUESTIONS[:NUM_RIGHT]:
            answer = ask(client, content(question)).choices[0].message.content
            assert answer in question.answers, question.text


def test_streams_usage_and_a_prefix_that_is_known(client):
    question = QUESTIONS[0]
    whole = ask(client, content(question))
    chunks = list(
        ask(client, content(question), stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    width, height = question.image.size
    num_image_tokens = (width // 32) * (height // 32)
    assert whole.usage.prompt_tokens > num_image_tokens + 2
    # A page of 64 tokens is smaller than the prompt.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 64
    # With the rest of the context by default: the prompt's tokens are known.
    assert ask(client, content(question), max_tokens=None).choices[0].finish_reason == "stop"


def test_two_charts_of_one_size_are_not_taken_for_each_other(client):
    first, second = (draw_chart(chart) for chart in find_pair())
    title = {"type": "text", "text": "What is the title?"}
    found = []
    for image in (first, second, first):
        part = {"type": "image_url", "image_url": {"url": data_url(image)}}
        found.append(ask(client, [title, part]).choices[0].message.content)
    assert found == [find_pair()[0].title, find_pair()[1].title, find_pair()[0].title]


@functools.cache
def find_pair():
    """Two charts of one size with different titles."""
    charts = [make_chart(seed) for seed in range(20)]
    first = charts[0]
    is_other = [
        chart
        for chart in charts
        if chart.style.width == first.style.width
        and chart.style.height == first.style.height
        and chart.title != first.title
    ]
    return first, is_other[0]


def test_guided_decoding_says_that_it_needs_bytes(client):
    form = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="token"):
        ask(client, content(QUESTIONS[0]), response_format=form)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([content(QUESTIONS[0])[0]], "a question about one image"),
        ([*content(QUESTIONS[0]), content(QUESTIONS[4])[1]], "a question about one image"),
        (content(QUESTIONS[0])[1:], "a question about one image"),
        (content(QUESTIONS[0], "http://127.0.0.1:9/x.png"), "does not fetch"),
        (content(QUESTIONS[0], "data:image/png;base64,AAAA"), "expected an image"),
        ([{"type": "text", "text": "<image>"}, content(QUESTIONS[0])[1]], "image token"),
    ],
    ids=["no image", "two", "no question", "http", "no picture", "a place too many"],
)
def test_what_the_reader_does_not_answer_is_refused(client, parts, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, parts)


def test_an_image_beyond_the_context_is_refused(client):
    large = generated_questions(1)[0].image.resize((1024, 1024))
    with pytest.raises(openai.BadRequestError, match=r"the context of 1,024 tokens"):
        ask(client, content(QUESTIONS[0], data_url(large)))


def test_places_in_a_text_completion_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="an image for each image token"):
        client.completions.create(model="chart-reader", prompt="<image> How many ?")
