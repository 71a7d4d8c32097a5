"""octavo serve with a small chart reader: the flags of the vision encoder do what they say."""

import asyncio
import base64
import io
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")
pytest.importorskip("PIL")
pytest.importorskip("httpx")

import httpx
from PIL import Image

from octavo.cli.main import COMMANDS, make_app, run
from octavo.demo.chart_reader import (
    make_chart_reader,
    save_chart_reader,
)
from octavo.layers.encoder_attention import EncoderAttention
from octavo.serving.server import run as server_run

WORDS = ["How", "many", "bars", "are", "there", "?", *"0123456789"]
FP8 = ["--mm-encoder-attn-dtype", "fp8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader")
    save_chart_reader(make_chart_reader(WORDS), path)
    return path


@pytest.fixture
def served(monkeypatch):
    """Requests in place of listening: how many, and what was seen of the tower on the way."""
    found = {"num_requests": 1, "answers": [], "layers": []}

    def run_app(app, address, *, log_level):
        asyncio.run(_ask(app, found))

    monkeypatch.setattr(server_run, "run", run_app)
    return found


async def _ask(app, found):
    async with app.router.lifespan_context(app):
        model = app.state.server.engine.engine.model
        found["layers"] = [m for m in model.modules() if isinstance(m, EncoderAttention)]
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for number in range(found["num_requests"]):
                body = {"messages": _messages(number), "max_tokens": 2, "temperature": 0}
                answer = await client.post("/v1/chat/completions", json=body)
                found["answers"].append(answer.status_code)


def _messages(number):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 32 + 32 * (number % 2)), (number * 9 % 256, 80, 200)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "How many bars?"}]}]


def serve(folder, *args):
    options = ["--device", "cpu", "--num-pages", "8", "--max-num-seqs", "2", "--port", "0"]
    return run(make_app(COMMANDS), ["serve", str(folder), *options, *args])


def test_scales_are_saved_and_loaded(folder, served, tmp_path):
    path = tmp_path / "scales.json"
    served["num_requests"] = 18
    saving = ["--mm-encoder-fp8-scale-save-path", str(path)]
    assert serve(folder, *FP8, *saving, "--mm-encoder-fp8-scale-save-margin", "2") == 0
    assert served["answers"] == [200] * 18
    saved = json.loads(path.read_text())
    assert "visual.blocks.5.attn.attn" in json.dumps(saved) and '"margin": 2' in json.dumps(saved)
    assert {type(m.scaling).__name__ for m in served["layers"]} == {"DynamicScaling"}
    loading = ["--mm-encoder-fp8-scale-path", str(path), "--mm-encoder-attn-backend", "reference"]
    served.update(num_requests=1, answers=[])
    assert serve(folder, *FP8, *loading) == 0
    assert served["answers"] == [200]
    assert {type(m.scaling).__name__ for m in served["layers"]} == {"StaticScaling"}
    assert {m.impl for m in served["layers"]} == {"reference"}


def test_too_few_images_to_save_scales_are_an_error_at_the_end(folder, served, tmp_path, capsys):
    path = tmp_path / "scales.json"
    assert serve(folder, *FP8, "--mm-encoder-fp8-scale-save-path", str(path)) == 1
    assert served["answers"] == [200] and not path.exists()
    assert "no scales were saved" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*FP8, "--mm-encoder-attn-backend", "gluon"], "gluon"),
        ([*FP8, "--mm-encoder-fp8-scale-path", "nowhere.json"], "expected a scale file"),
    ],
)
def test_what_cannot_run_is_an_error_at_the_start(folder, served, args, message, capsys):
    assert serve(folder, *args) == 1
    assert message in capsys.readouterr().err
    assert served["answers"] == []


def test_without_flags_the_tower_is_as_it_was(folder, served):
    assert serve(folder) == 0
    assert served["answers"] == [200] and served["layers"] == []
