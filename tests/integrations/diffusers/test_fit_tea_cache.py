"""TeaCache's polynomial fitted to a pipeline's own steps."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import (
    ConfigError,
    UnsupportedError,
    count_cached_steps,
    fit_tea_cache,
    use_step_cache_,
)
from octavo.demo.small_image import (
    load_small_image_model,
    make_small_image_model,
)
from octavo.integrations.diffusers.denoising import find_step_hook
from octavo.integrations.diffusers.tea_cache import (
    fit_polynomial,
    known_coefficients,
)
from octavo.measure.evaluate.image_scores import compare_images
from octavo_testkit.models.tiny_flux import make_pipeline, prompt_of
from octavo_testkit.models.tiny_pipelines import FAMILIES, few, load_pipeline

COEFFICIENTS = [498.65, -283.78, 55.856, -3.8202, 0.26423]
SIZES = {"height": 32, "width": 32}


def words(number):
    """The arguments of a call, for a pipeline without text encoders."""
    embeds, pooled = prompt_of(number)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def call(pipe, number, seed):
    options = {"num_inference_steps": 8, "output_type": "latent", **SIZES}
    return pipe(**words(number), generator=torch.Generator().manual_seed(seed), **options)


def fit(pipe, num_inference_steps=8, **options):
    return fit_tea_cache(
        pipe, [words(3), words(5)], num_inference_steps=num_inference_steps, **SIZES, **options
    )


def test_a_known_polynomial_is_found_again():
    x = np.linspace(0.01, 0.3, 40)
    pairs = list(zip(x, np.polyval(COEFFICIENTS, x), strict=True))
    pairs += [(0.1, float("nan")), (float("inf"), 1.0)]  # steps whose input was zero
    assert fit_polynomial(pairs) == pytest.approx(COEFFICIENTS, rel=1e-6)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0.1, 0.2), (0.2, 0.3)], "at least 5 different changes .* got 2"),
        ([(0.1, 0.2)] * 10, "got 1"),
        ([], "got 0"),
        ([(1 + i * 1e-15, 0.2) for i in range(10)], "changes that differ"),
    ],
)
def test_too_few_pairs_are_an_error(pairs, message):
    with pytest.raises(ConfigError, match=message):
        fit_polynomial(pairs, "transformer")


def test_a_fit_is_near_to_what_the_pipeline_does_and_the_config_takes_it():
    pipe = make_pipeline()
    fitted = fit(pipe, seed=3)
    assert list(fitted) == ["transformer"] and len(fitted["transformer"]) == 5
    assert find_step_hook(pipe.transformer) is None

    # The same pairs from what the model's parts are given, without any cache.
    inputs, residuals, entries = [], [], []
    first = pipe.transformer.transformer_blocks[0]
    hooks = [
        first.norm1.register_forward_hook(lambda m, a, result: inputs.append(result[0])),
        first.register_forward_pre_hook(
            lambda m, a, kwargs: entries.append(kwargs["hidden_states"]), with_kwargs=True
        ),
        pipe.transformer.norm_out.register_forward_pre_hook(
            lambda m, a: residuals.append(a[0] - entries[-1])
        ),
    ]
    pairs = []
    for number, seed in ((3, 3), (5, 4)):
        inputs.clear(), residuals.clear()
        call(pipe, number, seed)
        changes = [
            [((b - a).abs().mean() / a.abs().mean()).item() for a, b in zip(x, x[1:], strict=False)]
            for x in (inputs, residuals)
        ]
        pairs += list(zip(*changes, strict=True))
    for hook in hooks:
        hook.remove()
    assert len(pairs) == 14
    expected = np.polyval(np.polyfit(*np.array(pairs).T, 4), [x for x, _ in pairs])
    found = np.polyval(fitted["transformer"], [x for x, _ in pairs])
    assert found == pytest.approx(expected, rel=1e-2)

    use_step_cache_(pipe, "tea_cache", {"rel_l1_thresh": 0.5, "coefficients": fitted})
    call(pipe, 3, seed=0)
    assert 0 < count_cached_steps(pipe)["transformer"]["cond"].skipped < 7


def test_a_failed_fit_leaves_no_hooks():
    pipe = make_pipeline()
    with pytest.raises(ConfigError, match="transformer: expected at least 5 different changes"):
        fit(pipe, num_inference_steps=2)
    assert find_step_hook(pipe.transformer) is None
    with pytest.raises(UnsupportedError, match="no_such_option: expected an option of FluxPipe"):
        fit(pipe, no_such_option=1)
    with pytest.raises(ValueError, match="Provide either `prompt` or"):
        fit_tea_cache(pipe, [{}], num_inference_steps=8)
    assert find_step_hook(pipe.transformer) is None


@pytest.mark.parametrize("family", few())
def test_all_families_can_be_fitted(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    prompts = ["a cat on a mat", "two dogs"]
    fitted = fit_tea_cache(pipe, prompts, num_inference_steps=10, **FAMILIES[family].call)
    names = ["transformer", "transformer_2"] if family == "wan" else ["transformer"]
    assert list(fitted) == names
    assert np.isfinite(list(fitted.values())).all()
    use_step_cache_(pipe, "tea_cache", {"coefficients": fitted})


@pytest.mark.parametrize("prompts", ["a cat", []])
def test_prompts_are_a_list(prompts):
    with pytest.raises(ConfigError, match="expected (a list of )?prompts, got"):
        fit_tea_cache(make_pipeline(), prompts, num_inference_steps=8)


def test_a_model_alone_is_refused():
    with pytest.raises(ConfigError, match="expected a pipeline, got FluxTransformer2DModel"):
        fit_tea_cache(make_pipeline().transformer, ["a"], num_inference_steps=8)


def test_the_small_image_model_has_coefficients_of_its_own():
    model = make_small_image_model(["cat"]).transformer
    assert known_coefficients(model).model == "small-image"
    wider = make_small_image_model(["cat"], num_attention_heads=2).transformer
    with pytest.raises(ConfigError, match=r"num_attention_heads 2, got those of FLUX.1-dev \("):
        known_coefficients(wider)


@pytest.mark.slow
def test_the_small_image_model_skips_a_quarter_of_its_steps_and_draws_the_same():
    pipe = load_small_image_model(dtype=torch.float32)

    def draw():
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            return pipe("strawberry on white", generator=generator, output_type="pt").images

    plain = draw()
    use_step_cache_(pipe, "tea_cache")
    cached = draw()
    counts = count_cached_steps(pipe)["transformer"]["all"]
    assert counts.computed + counts.skipped == 20 and 5 <= counts.skipped < 15
    assert 25 < compare_images(cached, plain, lpips=False).psnr_db[0] < 60
