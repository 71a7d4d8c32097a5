"""Scales of 1.0: a model with an outlier is caught, one without is not."""

import pytest
import torch

pytest.importorskip("transformers")


from octavo.errors import ConfigError
from octavo.integrations.transformers.text_model import TextModel
from octavo.measure.advise.memory import check_kv, check_table, kv_advice
from octavo_testkit.models.text_models import make_decoder, make_prompts

WINDOWS = [make_prompts(1, 50)["input_ids"][0]]


def check(model, format="e4m3"):
    return check_kv(TextModel("tiny", model, None), WINDOWS, format)


def test_a_model_with_room_is_fine():
    found = check(make_decoder("llama"))
    assert found.is_good and found.num_tokens == 50
    assert all(0 < layer.key_amax < 448 for layer in found.layers)
    assert "Nothing saturates on these 50 tokens" in kv_advice(found, "tiny")[0]
    assert "queries as they are" in kv_advice(found, "tiny")[-1]


@pytest.mark.parametrize("which", ["k_proj", "v_proj"])
def test_a_planted_outlier_is_caught_and_its_layer_named(which):
    model = make_decoder("llama")
    with torch.no_grad():
        getattr(model.model.layers[2].self_attn, which).weight[3] *= 5e4
        before = model(WINDOWS[0][None]).logits
    found = check(model)
    assert not found.is_good
    assert [layer.index for layer in found.layers if layer.verdict == "breaks"] == [2]
    broken = found.layers[2]
    counts = (broken.keys_saturated, broken.values_saturated)
    amax = (broken.key_amax, broken.value_amax)
    index = 0 if which == "k_proj" else 1
    assert 0 < counts[index] <= 50 * 2 and counts[1 - index] == 0 and amax[index] > 448
    text = kv_advice(found, "tiny")[0]
    assert "break layers 2:" in text and "octavo calibrate tiny --kv --data TEXT" in text
    assert "--kv-cache-dtype-skip-layers 2)" in text
    verdicts = [row[-1] for row in check_table(found).rows]
    assert verdicts[2] == "breaks" and "breaks" not in verdicts[:2] + verdicts[3:]
    with torch.no_grad():
        assert torch.equal(model(WINDOWS[0][None]).logits, before)


def test_e5m2_reaches_further():
    model = make_decoder("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[3] *= 2e3
    assert not check(model).is_good
    found = check(model, "e5m2")
    assert found.is_good and found.layers[0].key_sqnr_db is None


def test_small_values_are_coarse_and_not_a_number_breaks():
    model = make_decoder("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight *= 1e-3
    found = check(model)
    assert found.is_good and found.layers[1].verdict == "coarse"
    assert any("Layers" in line and "few bits" in line for line in kv_advice(found, "tiny"))
    with torch.no_grad():
        model.model.layers[3].self_attn.v_proj.weight[0, 0] = torch.nan
    found = check(model)
    assert not found.is_good and found.layers[3].num_nonfinite == 50
    assert any("no scale mends them" in line for line in kv_advice(found, "tiny"))


def test_nothing_to_read():
    with pytest.raises(ConfigError, match="one window or more"):
        check_kv(TextModel("tiny", make_decoder("llama"), None), [])
