"""FP8 caches on GPUs that have no FP8: whoever makes one says so."""

import pytest
import torch

from octavo import Recipe, UnsupportedError
from octavo.integrations.apply import apply_
from octavo.kernels.device import Device
from octavo.ops import check

pytest.importorskip("transformers")
from octavo.serving.engine.engine import load_engine
from octavo_testkit.models.text_models import make_decoder, make_prompts

FP8 = Recipe(kv_cache={"granularity": "token"})
A100 = Device(type="cuda", name="NVIDIA A100", capability=(8, 0), num_sms=108)
L40 = Device(type="cuda", name="NVIDIA L40", capability=(8, 9), num_sms=142)
SAID = r"layers\.0\.self_attn: expected a GPU with FP8 .* got NVIDIA A100 .*: leave kv_cache out"


def test_apply_refuses(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: A100)
    model = make_decoder("llama")
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=SAID):
        apply_(model, FP8)
    assert model.config._attn_implementation == before
    assert model.generate(**make_prompts(2, 5), max_new_tokens=2).shape == (2, 7)


def test_the_engine_refuses_fp8_alone(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: A100)
    model = make_decoder("llama")
    with pytest.raises(UnsupportedError, match=SAID):
        load_engine(model, FP8)
    load_engine(model).close()


def test_skipped_layers_need_no_fp8(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: A100)
    recipe = Recipe(kv_cache={"granularity": "token"}, skip_layers=["0"])
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn: expected a GPU with FP8"):
        apply_(make_decoder("llama"), recipe)


def test_a_model_that_moves_to_such_a_gpu_raises_at_its_first_call(monkeypatch):
    model = make_decoder("llama")
    apply_(model, FP8)
    monkeypatch.setattr(check, "describe", lambda device: A100)
    with pytest.raises(UnsupportedError, match=SAID):
        model(torch.tensor([[1, 2, 3]]))


def test_a_gpu_with_fp8_is_not_refused(monkeypatch):
    monkeypatch.setattr(check, "describe", lambda device: L40)
    assert len(apply_(make_decoder("llama"), FP8).layers["kv_cache"]) == 4
