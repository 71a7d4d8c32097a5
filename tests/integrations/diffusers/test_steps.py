"""A pipeline on prompts: what keeps steps from being seen, and which prompts a state is of."""

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import FirstBlockCacheConfig
from PIL import Image

from octavo import (
    CalibrationSettings,
    ConfigError,
    calibrate_pipeline,
    scan_sensitivity,
    use_step_cache_,
)
from octavo.integrations.diffusers.calibrate import _state_key
from octavo.integrations.diffusers.call import Run
from octavo_testkit.models.tiny_flux import make_pipeline, prompt_of

ALWAYS = {"rel_l1_thresh": 1e9, "coefficients": [1.0, 0.0]}


def watch(pipe):
    """What looks at each step of a pipeline, with its other arguments left."""
    embeds, pooled = prompt_of(1)
    prompts = [{"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}]
    yield partial(calibrate_pipeline, pipe, prompts)
    yield partial(scan_sensitivity, pipe, prompts)


@pytest.mark.parametrize("backend", ["tea_cache", "first_block_cache", "of diffusers"])
def test_who_looks_at_each_step_refuses_a_cache(backend):
    pipe = make_pipeline()
    if backend == "of diffusers":
        pipe.transformer.enable_cache(FirstBlockCacheConfig())
    else:
        use_step_cache_(pipe, backend, ALWAYS if backend == "tea_cache" else None)
    for look in watch(pipe):
        with pytest.raises(ConfigError, match="transformer: .* runs in each step, .*drop_step_cac"):
            look(num_inference_steps=2)


def key_of(prompts, **options):
    return _state_key("x", prompts, Run(call_options=options), CalibrationSettings())


def test_a_state_is_of_the_content_of_prompts():
    long = torch.zeros(2000)
    other = long.clone()
    other[1000] = 1  # which does not print
    assert repr(long) == repr(other)
    assert key_of([{"prompt_embeds": long}]) != key_of([{"prompt_embeds": other}])
    assert key_of([{"prompt_embeds": long}]) == key_of([{"prompt_embeds": long.clone()}])
    assert key_of([{"prompt_embeds": long}]) != key_of([{"prompt_embeds": long.bfloat16()}])
    # Another object of the same picture, as the next process has it.
    images = [Image.new("RGB", (2, 2), color) for color in ("red", "red", "blue")]
    first, same, blue = (key_of(["a"], image=image) for image in images)
    assert first == same != blue
    assert key_of(["a"], image=[images[0]]) == key_of(["a"], image=[images[1]])
    assert len({key_of(x)["prompts"] for x in (["a"], ["b"], [{"prompt": "a"}])}) == 3
