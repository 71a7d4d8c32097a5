"""How many values have saturated, as an engine's stats say it."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
import octavo
from octavo.layers.saturation import HostCopy
from octavo.recipe import Recipe
from octavo.serving.engine import sizing
from octavo.serving.engine.request import Saturated
from octavo_testkit.serving.tiny_engine import make_engine, make_model, make_request, run

pytestmark = pytest.mark.filterwarnings("ignore:.*beyond the range")


def saturating_model():
    """Its keys lie beyond 448, its values do not."""
    model = make_model()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.k_proj.weight, 0.0)
        layer.self_attn.k_proj.weight.data[0].fill_(1.0)
        layer.self_attn.k_proj.weight.data.mul_(1e6)
    return model


def static_recipe(model, margin):
    prompt = torch.tensor([make_request(length=30).prompt])
    scales = octavo.calibrate_linear(model, [{"input_ids": prompt}])
    inputs = {name: scale * margin for name, scale in scales.inputs.items()}
    linear = {"activation": "tensor", "scaling": "static"}
    return Recipe(linear=linear, scales=replace(scales, inputs=inputs).to_dict())


def test_where_nothing_counts_there_are_no_numbers():
    engine = make_engine()
    run(engine, make_request())
    engine.read_saturation()
    assert engine.stats().saturated == Saturated()


def test_keys_of_the_cache():
    engine = make_engine(saturating_model(), Recipe(kv_cache={"scaling": "unit"}))
    engine.read_saturation()
    none = Saturated(keys=0, values=0)
    assert engine.stats().saturated == none
    run(engine, make_request())
    assert engine.stats().saturated == none  # until somebody asks
    engine.read_saturation()
    found = engine.stats().saturated
    assert found.keys > 0 and found.values == 0 and found.linear_inputs is None
    engine.close()
    engine.read_saturation()
    assert engine.stats().saturated == found


@pytest.mark.parametrize("margin", [0.1, 1.0])
def test_inputs_of_linear_layers(margin):
    model = make_model()
    engine = make_engine(model, static_recipe(model, margin))
    run(engine, make_request(length=30))
    engine.read_saturation()
    found = engine.stats().saturated
    assert (found.linear_inputs > 0) == (margin < 1)
    assert found.keys is None
    # Of 30 tokens and 5 more: one input for q, k and v, one for gate and up, and two others.
    config = model.config
    width = 3 * config.hidden_size + config.intermediate_size
    assert found.checked_linear_inputs == 35 * config.num_hidden_layers * width


def test_the_device_is_not_waited_for(monkeypatch):
    """As on a GPU: a reading arrives later, and is not asked for twice."""
    engine = make_engine(saturating_model(), Recipe(kv_cache={"scaling": "unit"}))
    run(engine, make_request())
    has_arrived, copies = [False], []

    def begin(copy, x):
        copies.append(x)
        copy._event, copy._copy = None, x

    monkeypatch.setattr(HostCopy, "__init__", begin)
    monkeypatch.setattr(HostCopy, "is_ready", property(lambda _: has_arrived[0]))
    for _ in range(3):
        engine.read_saturation()
        assert engine.stats().saturated == Saturated()
    assert len(copies) == 1
    has_arrived[0] = True
    engine.read_saturation()
    assert engine.stats().saturated.keys > 0


def test_trial_passes_are_not_counted():
    model = saturating_model()
    engine = make_engine(model, Recipe(kv_cache={"scaling": "unit"}))
    sizing.try_pass(engine._model, engine._runner.storage.spec, num_tokens=40, num_seqs=3)
    engine.read_saturation()
    assert engine.stats().saturated.keys == 0
