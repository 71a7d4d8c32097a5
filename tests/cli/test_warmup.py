"""octavo warmup on a machine without a GPU, and with one."""

import json
from importlib import import_module

import pytest
import torch

from octavo.cli.main import COMMANDS, make_app, run
from octavo.kernels.device import Device

CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vision_config": {"hidden_size": 144, "num_heads": 2},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_it_needs_a_gpu(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert run(make_app(COMMANDS), ["warmup", str(tmp_path)]) == 1
    assert "compiled on the GPU they will run on, got CPU" in capsys.readouterr().err


def test_a_model_that_does_not_exist(capsys, tmp_path):
    assert run(make_app(COMMANDS), ["warmup", str(tmp_path / "none")]) != 0


@pytest.mark.gpu
def test_it_compiles_on_a_gpu(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert run(make_app(COMMANDS), ["warmup", str(tmp_path)]) == 0
    assert "calls compiled" in capsys.readouterr().out


FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that says it is a GPU."""
    fake = Device(type="cpu", name="NVIDIA H200", capability=(9, 0), num_sms=132)
    monkeypatch.setattr(import_module("octavo.ops.warm_up"), "default_device", lambda: fake)


def octavo(*args):
    return run(make_app(COMMANDS), ["warmup", *map(str, args)])


def test_shapes_need_no_model(capsys, gpu, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/triton")
    assert octavo("--shapes", "5x32x48,7x32x48") == 0
    assert "10 calls compiled for NVIDIA H200 into /cache/triton" in capsys.readouterr().out
    assert octavo("--shapes", "5x32x48", "--linear", "static") == 0
    assert "5 calls compiled" in capsys.readouterr().out


def test_a_transformer_of_diffusers(capsys, gpu, tmp_path):
    pytest.importorskip("diffusers")
    (tmp_path / "config.json").write_text(json.dumps(FLUX))
    assert octavo(tmp_path) == 1
    assert "expected --tokens" in capsys.readouterr().err
    assert octavo(tmp_path, "--tokens", "6,9") == 0
    # (32, 32), (32, 128), (128, 32), (160, 32)
    assert f"{4 * 2 * 5} calls compiled" in capsys.readouterr().out


def test_a_model_of_transformers_with_tokens_and_shapes(monkeypatch, gpu, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    module, seen = import_module("octavo.ops.warm_up"), []

    def calls(layers, device):
        seen.extend(layers)
        return []

    monkeypatch.setattr(module, "warm_up_calls", calls)
    args = ("--tokens", "300", "--shapes", "5x32x48", "--linear", "block")
    assert octavo(tmp_path, *args) == 0
    linears = [one for one in seen if isinstance(one, module.LinearLayers)]
    assert {one.rows for one in linears} == {(5,), (*module.ROWS, 300)}
    assert {str(one.weight) for one in linears} == {"block 128x128"}
    assert len(seen) > len(linears)  # attention, too


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected a model or --shapes, got neither"),
        (("--shapes", "5x32"), "expected shapes MxKxN"),
        (("--shapes", "5x32x48", "--tokens", "4"), "--tokens is for a model's layers"),
        ((".", "--tokens", "4,x"), "expected numbers of tokens such as 4608,512; got '4,x'"),
    ],
)
def test_wrong_requests_are_one_sentence(capsys, gpu, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert octavo(*args) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
