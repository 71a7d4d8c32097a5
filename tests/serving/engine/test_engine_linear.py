"""Linear layers in FP8 in the engine: the answers of the same model quantized by itself."""

import copy
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
import octavo
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.linear import read_saturation
from octavo.integrations.transformers import engine_model
from octavo.layers.joint_linear import JointPart
from octavo.layers.linear import Fp8Linear
from octavo.recipe import Recipe
from octavo.serving.engine.engine import load_engine
from octavo.serving.engine.settings import EngineSettings
from octavo_testkit.models.text_models import save_decoder
from octavo_testkit.serving.tiny_engine import make_engine, make_model, make_request, run

LENGTHS = (20, 7, 33)


def split_(model):
    """As a checkpoint in FP8 loads, without what apply_ has joined."""
    for part in model.modules():
        if isinstance(part, JointPart):
            part.joint.split_()


def joint_parts(model):
    return [part for part in model.modules() if isinstance(part, JointPart)]


def answers(engine):
    requests = [make_request(str(n), length=n, which=n, max_tokens=12) for n in LENGTHS]
    return [done.tokens for done in run(engine, *requests)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_the_answers_of_a_quantized_model(family):
    recipe = Recipe(linear="fp8", ignored_layers=["down_proj"] if family != "gpt_oss" else [])
    quantized = copy.deepcopy(model := make_model(family))
    octavo.quantize_(quantized, recipe)
    truth = [
        tuple(
            quantized.generate(
                torch.tensor([make_request(length=n, which=n).prompt]),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )[0, n:].tolist()
        )
        for n in LENGTHS
    ]
    engine = make_engine(model, recipe)
    parts = [part for part in engine.model.modules() if isinstance(part, Fp8Linear)]
    assert any(type(part) is JointPart for part in parts)
    assert answers(engine) == truth
    engine.close()
    # The model that was given is as it was, and serves again.
    assert not any(isinstance(part, Fp8Linear) for part in model.modules())
    plain = make_engine(model)
    assert len(answers(plain)) == len(LENGTHS)
    plain.close()


def test_a_model_that_is_quantized_already():
    model = make_model()
    recipe = Recipe(linear="fp8")
    engine = make_engine(model, recipe)
    truth = answers(engine)
    engine.close()
    octavo.quantize_(model)
    before = joint_parts(model)
    engine = make_engine(model)
    assert engine._model._joined == []
    assert answers(engine) == truth
    engine.close()
    assert before and joint_parts(model) == before  # as apply_ has left it
    split_(model)
    engine = make_engine(model)
    joined = [weakref.ref(joint) for joint in engine._model._joined]
    assert answers(engine) == truth
    engine.close()
    # A closed engine has no second copy of the weights.
    assert joined and all(joint() is None for joint in joined)
    assert not joint_parts(model)
    with pytest.raises(ConfigError, match="in FP8 already"):
        make_engine(model, recipe)


def test_a_model_that_is_refused_stays_as_it_was(monkeypatch):
    def refuse(*_, **options):
        raise UnsupportedError("no")

    octavo.quantize_(model := make_model())
    split_(model)
    monkeypatch.setattr(engine_model, "install", refuse)
    with pytest.raises(UnsupportedError):
        make_engine(model)
    assert not joint_parts(model)


def test_with_an_fp8_cache():
    recipe = Recipe(linear="fp8", kv_cache={"scaling": "unit"})
    engine = make_engine(recipe=recipe)
    assert {layer.dtype for layer in engine._model.attention} == {torch.float8_e4m3fn}
    assert all(len(tokens) == 12 for tokens in answers(engine))
    engine.close()


def test_a_model_by_name_is_quantized_in_place(tmp_path):
    save_decoder(tmp_path, make_model())
    settings = EngineSettings(num_pages=32, page_size=16)
    engine = load_engine(str(tmp_path), Recipe(linear="fp8"), settings, dtype="float32")
    linears = [p for p in engine.model.modules() if isinstance(p, torch.nn.Linear)]
    assert {type(part) for part in linears} >= {Fp8Linear}
    engine.close()


def test_static_scales_that_do_not_reach_are_reported():
    model = make_model()
    prompt = torch.tensor([make_request(length=30).prompt])
    scales = octavo.calibrate_linear(model, [{"input_ids": prompt}])
    small = {name: scale / 10 for name, scale in scales.inputs.items()}
    recipe = Recipe(
        linear={"activation": "tensor", "scaling": "static"},
        scales=replace(scales, inputs=small).to_dict(),
    )
    engine = make_engine(model, recipe)
    with pytest.warns(UserWarning, match="beyond the range of their static scales") as told:
        run(engine, make_request(length=30))
    assert len(told) == 1
    # Joined layers have one input and are one name.
    assert "model.layers.0.mlp.gate_proj + model.layers.0.mlp.up_proj (" in str(told[0].message)


def test_static_scales_that_reach_are_not():
    model = make_model()
    prompt = torch.tensor([make_request(length=30).prompt])
    scales = octavo.calibrate_linear(model, [{"input_ids": prompt}])
    recipe = Recipe(linear={"activation": "tensor", "scaling": "static"}, scales=scales.to_dict())
    engine = make_engine(model, recipe)
    run(engine, make_request(length=30))
    found = read_saturation(engine.model)
    assert found and all(x.num_values > 0 == x.num_saturated for x in found.values())
