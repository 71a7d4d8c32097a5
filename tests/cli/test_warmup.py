"""octavo warmup on a machine without a GPU, and with one."""

import json

import pytest
import torch

from octavo.cli.main import COMMANDS, make_app, run

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
