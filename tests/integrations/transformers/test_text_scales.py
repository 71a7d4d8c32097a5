"""Scales of keys, values and queries from a text: exact, and the model is left as it was."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from text_models import FAMILIES, make_decoder, make_prompts  # noqa: E402

from octavo import Recipe, apply_  # noqa: E402
from octavo.calibration.observers import CalibrationSettings  # noqa: E402
from octavo.errors import ConfigError  # noqa: E402
from octavo.integrations.transformers.text_scales import (  # noqa: E402
    calibrate_text,
    observe_text,
    observe_windows,
)

WINDOWS = list(make_prompts(1, 40)["input_ids"]) + list(make_prompts(1, 40, seed=2)["input_ids"])


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_reach_to_the_largest_value_that_a_cache_would_hold(family):
    model = make_decoder(family)
    with torch.no_grad():
        before = model(WINDOWS[0][None]).logits
        caches = [model(w[None], use_cache=True).past_key_values for w in WINDOWS]
    settings = CalibrationSettings(granularity="head", margin=1.0)
    scales = calibrate_text(model, WINDOWS, settings).scales
    seen = observe_windows(model, WINDOWS, settings)
    assert len(scales.layers) == len(caches[0].layers)
    for index, (name, entry) in enumerate(scales.layers.items()):
        if caches[0].layers[index].is_sliding:
            continue  # a stock cache with a window has forgotten the first tokens
        for which, kept in ((entry.k, "keys"), (entry.v, "values")):
            held = torch.stack([getattr(c.layers[index], kept)[0] for c in caches])
            expected = held.abs().amax(dim=(0, 2, 3)) / 448
            torch.testing.assert_close(torch.tensor(which), expected)
            assert float(seen[name].parts[kept[0]].amax.max()) == pytest.approx(448 * max(which))
    with torch.no_grad():
        assert torch.equal(model(WINDOWS[0][None]).logits, before)


def test_not_a_number_is_seen():
    model = make_decoder("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = torch.nan
    seen = observe_windows(model, WINDOWS[:1], CalibrationSettings())
    assert seen["model.layers.1.self_attn"].parts["v"].num_nonfinite == 40
    assert seen["model.layers.0.self_attn"].parts["v"].num_nonfinite == 0


def test_a_model_in_fp8_is_refused():
    model = make_decoder("llama")
    apply_(model, Recipe(kv_cache={"scaling": "unit"}))
    with pytest.raises(ConfigError, match="restore_ it first"), observe_text(model, print):
        pass
