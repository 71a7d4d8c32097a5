"""octavo calibrate --kv, from texts and chats on disk to a scale file."""

import json
from contextlib import nullcontext

import pytest

from octavo import load_scales
from octavo.cli.main import COMMANDS, make_app, run

pytest.importorskip("transformers")
from octavo_testkit.models import text_models

LAYERS = [f"model.layers.{index}.self_attn" for index in range(4)]


def make_model():
    sizes = {"vocab_size": text_models.NUM_TOKENS, "max_position_embeddings": 256}
    return text_models.make_decoder("llama", **sizes)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return text_models.save_decoder(tmp_path_factory.mktemp("calibrate") / "model", make_model())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(text_models.SENTENCES * 5))
    return path


def calibrate(*args):
    return run(make_app(COMMANDS), ["calibrate", "--kv", *map(str, args)])


def test_from_a_text_to_a_scale_file(model, text, tmp_path, capsys):
    path, page = tmp_path / "kv.json", tmp_path / "page.html"
    args = (model, "--data", text, "--scale-save-path", path, "--plot", page)
    assert calibrate(*args, "--max-length", "32", "--num-prompts", "4", "--per-head") == 0
    shown = capsys.readouterr()
    for words in (*LAYERS, "headroom", "SQNR", "4 layers, 4 prompts, observer amax, margin 1.5"):
        assert words in shown.out
    assert "4/4" in shown.err
    scales = load_scales(path)
    assert list(scales.layers) == LAYERS
    assert (scales.header.kind, scales.header.data) == ("kv_cache", str(text))
    assert all(len(layer.q) == 4 and len(layer.k) == 2 for layer in scales.layers.values())
    shown = page.read_text()
    assert "Signal to quantization noise" in shown
    assert "--kv" in shown and "--max-length 32" in shown


def test_from_chats(model, tmp_path, capsys):
    rows = [{"conversations": [{"from": "human", "value": s}]} for s in text_models.SENTENCES]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "kv.json"
    args = (model, "--data", data, "--scale-save-path", path, "--observer", "mse")
    assert calibrate(*args) == 0
    shown = capsys.readouterr()
    assert "4 layers, 3 prompts, observer mse" in shown.out
    assert "3/3" in shown.err  # the end of the data is the end of the bar
    assert load_scales(path).header.observer == "mse"


def test_rotated_and_centered_keys(model, text, tmp_path, capsys):
    path, page = tmp_path / "kv.json", tmp_path / "page.html"
    args = (model, "--data", text, "--scale-save-path", path, "--max-length", "32")
    args = (*args, "--num-prompts", "4", "--rotate-keys", "--center-keys", "--plot", page)
    assert calibrate(*args) == 0
    shown = capsys.readouterr()
    assert "4 layers, 4 prompts" in shown.out and "8/8" in shown.err  # two passes
    scales = load_scales(path)
    assert scales.header.rotate_keys
    assert all(len(layer.k_mean) == 2 for layer in scales.layers.values())
    assert "--rotate-keys --center-keys" in page.read_text()
    assert run(make_app(COMMANDS), ["calibrate", "--help"]) == 0
    assert "--center-keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-length", "257"], "expected max_length up to 256, the context of"),
        (["--data", "gone.txt"], "expected a file or folder of text"),
        (
            ["--observer", "percentile", "--percentile", "0"],
            "percentile: expected a number greater than 0",
        ),
        (["--device", "abacus"], "got 'abacus'"),
    ],
)
def test_requests_that_fail(model, text, tmp_path, capsys, args, message):
    path = tmp_path / "kv.json"
    assert calibrate(model, "--data", text, "--scale-save-path", path, *args) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not path.exists()


def test_options_that_need_the_other_kind(text, tmp_path, capsys):
    args = ["calibrate", "--data", str(text), "--scale-save-path", str(tmp_path / "s.json")]
    assert run(make_app(COMMANDS), args) == 1  # the chart reader, whose data are images
    assert "expected a folder of images" in capsys.readouterr().err
    assert run(make_app(COMMANDS), [*args, "some-model", "--max-length", "8"]) == 1
    assert "expected --kv with --max-length" in capsys.readouterr().err
    assert run(make_app(COMMANDS), [*args, "some-model", "--rotate-keys"]) == 1
    assert "expected --kv with --rotate-keys" in capsys.readouterr().err


def test_without_a_model_it_is_the_small_one(text, tmp_path, capsys, monkeypatch):
    from octavo.integrations.transformers import gguf_file, load, text_model

    model, tokenizer = make_model(), text_models.make_tokenizer()
    monkeypatch.setattr(text_model, "find_weights", lambda: "small.gguf")
    monkeypatch.setattr(gguf_file, "read_once", lambda name: nullcontext())
    monkeypatch.setattr(load, "load_config", lambda name: model.config)
    monkeypatch.setattr(text_model, "load_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr(load, "load_weights", lambda *args, **options: model)
    path = tmp_path / "kv.json"
    assert calibrate("--data", text, "--scale-save-path", path, "--device", "cpu") == 0
    assert load_scales(path).header.model == "SmolLM2-135M-Instruct"
