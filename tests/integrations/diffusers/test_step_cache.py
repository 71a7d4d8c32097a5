"""Step caches on all seven families, with FP8 linears; what is refused, and why."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import (
    DDIMScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.hooks import HookRegistry, ModelHook

from octavo import (
    ConfigError,
    Recipe,
    UnsupportedError,
    apply_,
    count_cached_steps,
    drop_step_cache_,
    use_step_cache_,
)
from octavo.integrations.diffusers.denoising import StepCounts, find_step_hook, layout_of
from octavo.integrations.diffusers.pipeline import find_transformers
from octavo.integrations.diffusers.tea_cache import (
    BY_CLASS,
    known_coefficients,
)
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.tiny_flux import draw, make_pipeline, make_transformer
from octavo_testkit.models.tiny_pipelines import few, load_pipeline, run_pipeline

NUM_STEPS = 4
ALWAYS = {"rel_l1_thresh": 1e9, "coefficients": [1.0, 0.0]}
NEVER = {"rel_l1_thresh": 0.0, "coefficients": [1.0, 0.0]}
# Calls of a transformer in a step, by what the family's pipeline calls them.
CONTEXTS = {
    "flux": ["cond"],
    "qwen_image": ["cond", "uncond"],
    "z_image": ["all"],
    "flux2_klein": ["cond", "uncond"],
    "wan": ["cond", "uncond"],
    "hunyuan_video": ["pred_cond"],
    "cosmos3": ["cond"],
}
FIRST_BLOCK_REFUSED = {
    "z_image": "it has no enable_cache",
    "flux2_klein": "its first blocks return two tensors and its last ones one",
    "hunyuan_video": "(HunyuanVideo15TransformerBlock) are not in diffusers' registry",
    "cosmos3": "(Cosmos3VLTextMoTDecoderLayer) takes no hidden_states",
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def count_runs(pipe):
    """A list that grows with each run of the attention in a transformer's last block."""
    runs = []
    for part in find_transformers(pipe).values():
        layout = layout_of(part)
        last = layout.blocks(part)[-1][2]
        attention = getattr(last, "attn", None) or last.get_submodule(layout.attention)
        attention.register_forward_hook(lambda *args: runs.append(1))
    return runs


@pytest.mark.parametrize("family", few("flux"))
def test_tea_cache_with_fp8_linears(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    apply_(pipe, Recipe(linear="fp8"))
    runs = count_runs(pipe)
    plain = run_pipeline(pipe, family, num_steps=NUM_STEPS)
    num_calls = NUM_STEPS * len(CONTEXTS[family])
    assert len(runs) == num_calls

    use_step_cache_(pipe, "tea_cache", NEVER)
    assert_same_bits(run_pipeline(pipe, family, num_steps=NUM_STEPS), plain)
    assert len(runs) == 2 * num_calls
    drop_step_cache_(pipe)
    runs.clear()

    use_step_cache_(pipe, "tea_cache", ALWAYS)
    result = run_pipeline(pipe, family, num_steps=NUM_STEPS)
    counts = count_cached_steps(pipe)
    assert all(list(found) == CONTEXTS[family] for found in counts.values() if found)
    flat = [count for found in counts.values() for count in found.values()]
    assert sum(count.computed for count in flat) == len(runs)
    assert sum(count.computed + count.skipped for count in flat) == num_calls
    if family == "wan":  # two steps are one transformer's, two the other's, with the last of all
        first, second = StepCounts(1, 1), StepCounts(2, 0)
        assert counts["transformer"] == {"cond": first, "uncond": first}
        assert counts["transformer_2"] == {"cond": second, "uncond": second}
    else:
        assert set(flat) == {StepCounts(2, NUM_STEPS - 2)}
    assert result.isfinite().all() and not torch.equal(result, plain)
    assert_same_bits(run_pipeline(pipe, family, num_steps=NUM_STEPS), result)
    drop_step_cache_(pipe)
    assert_same_bits(run_pipeline(pipe, family, num_steps=NUM_STEPS), plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "qwen_image", "wan"])
def test_first_block_cache_where_diffusers_can(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    apply_(pipe, Recipe(linear="fp8"))
    plain = run_pipeline(pipe, family, num_steps=NUM_STEPS)
    use_step_cache_(pipe, "first_block_cache", {"threshold": 1e9})
    runs = count_runs(pipe)
    result = run_pipeline(pipe, family, num_steps=NUM_STEPS)
    flat = [c for found in count_cached_steps(pipe).values() for c in found.values()]
    assert all(count.skipped for count in flat)
    assert sum(count.computed for count in flat) == len(runs)
    assert not torch.equal(result, plain)
    drop_step_cache_(pipe)
    assert_same_bits(run_pipeline(pipe, family, num_steps=NUM_STEPS), plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", FIRST_BLOCK_REFUSED)
def test_first_block_cache_where_diffusers_cannot(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    with pytest.raises(UnsupportedError, match=re.escape(FIRST_BLOCK_REFUSED[family])):
        use_step_cache_(pipe, "first_block_cache")
    assert find_step_hook(pipe.transformer) is None
    # As long as diffusers itself fails, there is nothing to allow.
    with pytest.raises((AttributeError, IndexError, TypeError, ValueError)):
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
        run_pipeline(pipe, family, num_steps=NUM_STEPS)


def stop(pipe, step, timestep, tensors):
    raise KeyboardInterrupt


def test_first_block_cache_keeps_generations_apart():
    pipe = make_pipeline()
    plain = draw(pipe, prompt=2)
    changes = use_step_cache_(pipe, "first_block_cache", {"threshold": 1e9})
    assert str(changes) == "transformer.first_block_cache: 3 blocks, threshold 1000000000.0"
    alone = draw(pipe, prompt=2)
    assert count_cached_steps(pipe) == {"transformer": {"cond": StepCounts(1, 7)}}
    with pytest.raises(KeyboardInterrupt):
        draw(pipe, prompt=1, callback_on_step_end=stop)
    assert_same_bits(draw(pipe, prompt=2), alone)
    assert drop_step_cache_(pipe).backend == "first_block_cache"
    assert not pipe.transformer.is_cache_enabled
    assert_same_bits(draw(pipe, prompt=2), plain)


def test_first_block_cache_of_a_pipeline_without_contexts():
    model, scheduler = make_transformer(), FlowMatchEulerDiscreteScheduler()
    use_step_cache_(model, "first_block_cache", {"threshold": 1e9}, scheduler=scheduler)
    scheduler.set_timesteps(3)
    for time in (1.0, 0.6, 0.3):
        out = model(
            hidden_states=torch.ones(1, 4, 16),
            encoder_hidden_states=torch.ones(1, 8, 32),
            pooled_projections=torch.ones(1, 32),
            timestep=torch.full((1,), time),
            img_ids=torch.zeros(4, 3),
            txt_ids=torch.zeros(8, 3),
        ).sample
        scheduler.step(out, scheduler.timesteps[scheduler.step_index or 0], out)
    assert count_cached_steps(model) == {"transformer": {"all": StepCounts(1, 2)}}


def test_first_block_cache_refuses_compiled_blocks():
    pipe = make_pipeline()
    use_step_cache_(pipe, "first_block_cache")
    pipe.transformer.compile_repeated_blocks(backend="eager")
    with pytest.raises(UnsupportedError, match="use tea_cache"):
        draw(pipe)
    drop_step_cache_(pipe)
    with pytest.raises(UnsupportedError, match="use tea_cache"):
        use_step_cache_(pipe, "first_block_cache")


def test_changes_say_what_was_done():
    pipe = make_pipeline()
    changes = use_step_cache_(pipe, "tea_cache", ALWAYS)
    blocks = ["transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1"]
    assert changes.blocks == {"transformer": blocks}
    assert str(changes) == (
        "transformer.tea_cache: 3 blocks, rel_l1_thresh 1000000000.0, coefficients as given"
    )
    assert drop_step_cache_(pipe).blocks == changes.blocks
    with pytest.raises(ConfigError, match="expected a model with a step cache"):
        drop_step_cache_(pipe)
    with pytest.raises(ConfigError, match="transformer: expected a transformer with a step cache"):
        count_cached_steps(pipe)


@pytest.mark.parametrize(
    ("backend", "config", "message"),
    [
        ("teacache", None, "expected one of first_block_cache, tea_cache, got 'teacache'"),
        ("tea_cache", {"rel_l1_tresh": 0.2}, "did you mean 'rel_l1_thresh'"),
        ("tea_cache", {"threshold": 0.2}, "tea_cache: unknown key 'threshold'"),
        ("first_block_cache", {"rel_l1_thresh": 0.2}, "the keys are threshold"),
        ("tea_cache", {"rel_l1_thresh": -0.1}, "rel_l1_thresh: expected a finite number"),
        ("tea_cache", {"rel_l1_thresh": float("nan")}, "expected a finite number"),
        ("first_block_cache", {"threshold": float("inf")}, "expected a finite number"),
        ("tea_cache", {"rel_l1_thresh": "much"}, "rel_l1_thresh: expected a valid number"),
        ("tea_cache", {"coefficients": []}, "at least one, got"),
        ("tea_cache", {"coefficients": [1.0, float("nan")]}, "expected finite numbers"),
        ("tea_cache", {"coefficients": {"transformer": []}}, "at least one, got"),
        ("tea_cache", {"coefficients": {"unet": [1.0]}}, "for transformer, got them for unet"),
        ("tea_cache", ["rel_l1_thresh"], "tea_cache: expected None or settings"),
    ],
)
def test_wrong_words_are_errors(backend, config, message):
    pipe = make_pipeline()
    with pytest.raises(ConfigError, match=message):
        use_step_cache_(pipe, backend, config)
    assert find_step_hook(pipe.transformer) is None


def test_a_model_without_coefficients_says_how_to_fit_them():
    with pytest.raises(ConfigError, match=r"num_layers 1, .* \(num_layers 19, .*fit_tea_cache\("):
        use_step_cache_(make_pipeline(), "tea_cache")
    for known in (one for group in BY_CLASS.values() for one in group):
        assert len(known.values) == 5 and known.source and known.model


def test_known_coefficients_are_those_of_the_whole_model():
    large = make_transformer(num_layers=19, num_single_layers=38)
    changes = use_step_cache_(
        large, "tea_cache", {"rel_l1_thresh": 0.2}, scheduler=FlowMatchEulerDiscreteScheduler()
    )
    assert str(changes).endswith("57 blocks, rel_l1_thresh 0.2, coefficients of FLUX.1-dev")
    # Of little change little is expected, of much change much.
    values = known_coefficients(large).values
    assert 0 < values[-1] < 0.3 and sum(values) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["z_image", "flux2_klein", "wan", "hunyuan_video", "cosmos3", "qwen_image"]
)
def test_families_without_coefficients_of_their_own(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    with pytest.raises(ConfigError, match="fit them with octavo.fit_tea_cache"):
        use_step_cache_(pipe, "tea_cache")


class Two:
    """A pipeline with two transformers, as Wan2.2 has them."""

    def __init__(self, second=None):
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        second = make_transformer() if second is None else second
        self.components = {"transformer": make_transformer(), "transformer_2": second, "vae": None}


def test_coefficients_for_each_transformer_by_name():
    pipe = Two()
    given = {"transformer": [1.0, 0.0], "transformer_2": [0.5]}
    use_step_cache_(pipe, "tea_cache", {"coefficients": given})
    for name, part in pipe.components.items():
        if part is not None:
            assert list(find_step_hook(part).coefficients) == given[name]
    with pytest.raises(ConfigError, match="for transformer, transformer_2, got them for"):
        use_step_cache_(Two(), "tea_cache", {"coefficients": {"transformer": [1.0]}})


def test_what_is_wrong_with_one_transformer_is_found_before_any_changes():
    pipe = Two(second=torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="transformer_2: tea_cache: expected one of Flux"):
        use_step_cache_(pipe, "tea_cache", ALWAYS)
    assert find_step_hook(pipe.components["transformer"]) is None


@pytest.mark.parametrize("backend", ["tea_cache", "first_block_cache"])
def test_one_cache_at_a_time(backend):
    pipe = make_pipeline()
    config = ALWAYS if backend == "tea_cache" else None
    use_step_cache_(pipe, backend, config)
    with pytest.raises(ConfigError, match="drop_step_cache_"):
        use_step_cache_(pipe, "tea_cache", ALWAYS)
    drop_step_cache_(pipe)
    pipe.transformer.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ConfigError, match="disable_cache"):
        use_step_cache_(pipe, backend, config)


def test_another_cache_that_came_later_is_refused():
    pipe = make_pipeline()
    use_step_cache_(pipe, "tea_cache", ALWAYS)
    pipe.transformer.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(ConfigError, match="tea_cache: expected no other step cache, .*disable_c"):
        draw(pipe)
    pipe.transformer.disable_cache()
    draw(pipe)
    drop_step_cache_(pipe)
    assert_same_bits(draw(pipe), draw(make_pipeline()))


def test_schedulers():
    with pytest.raises(ConfigError, match="expected the scheduler of the denoising loop"):
        use_step_cache_(make_transformer(), "tea_cache", ALWAYS)
    pipe = make_pipeline()
    with pytest.raises(ConfigError, match="expected the pipeline's own scheduler"):
        use_step_cache_(pipe, "tea_cache", ALWAYS, scheduler=pipe.scheduler)
    with pytest.raises(UnsupportedError, match="counts its steps .* got DDIMScheduler"):
        use_step_cache_(make_transformer(), "tea_cache", ALWAYS, scheduler=DDIMScheduler())
    use_step_cache_(pipe, "tea_cache", ALWAYS)
    draw(pipe)
    steps = find_step_hook(pipe.transformer)
    pipe.scheduler = DDIMScheduler()
    with pytest.raises(UnsupportedError, match="got DDIMScheduler"):
        steps.denoising.enter("transformer", "cond", 1.0)


def test_offloaded_parallel_and_compiled_transformers_are_refused():
    pipe = make_pipeline()
    pipe.transformer.transformer_blocks[0]._hf_hook = object()  # as accelerate marks them
    with pytest.raises(UnsupportedError, match="not offloaded yet"):
        use_step_cache_(pipe, "tea_cache", ALWAYS)
    pipe = make_pipeline()
    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer.transformer_blocks[0])
    registry.register_hook(ModelHook(), "group_offloading")  # as diffusers calls it
    with pytest.raises(UnsupportedError, match="not offloaded yet"):
        use_step_cache_(pipe, "tea_cache", ALWAYS)
    pipe = make_pipeline()
    pipe.transformer._parallel_config = object()
    with pytest.raises(UnsupportedError, match="on one device"):
        use_step_cache_(pipe, "tea_cache", ALWAYS)
    pipe = make_pipeline()
    pipe.transformer.compile(backend="eager")
    with pytest.raises(UnsupportedError, match="transformer: .*compile_repeated_blocks"):
        use_step_cache_(pipe, "tea_cache", ALWAYS)
    pipe = make_pipeline()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(UnsupportedError, match="transformer: .*compile_repeated_blocks"):
        use_step_cache_(pipe, "tea_cache", ALWAYS)


def test_a_copy_would_run_the_layers_of_the_original():
    for backend, config in (("tea_cache", ALWAYS), ("first_block_cache", None)):
        pipe = make_pipeline()
        use_step_cache_(pipe, backend, config)
        with pytest.raises(UnsupportedError, match="to copy: drop_step_cache_"):
            copy.deepcopy(pipe.transformer)
        drop_step_cache_(pipe)
        twin = copy.deepcopy(pipe.transformer)
        assert twin.transformer_blocks[0].forward.__self__ is twin.transformer_blocks[0]


def test_offloading_after_the_cache():
    accelerate = pytest.importorskip("accelerate.hooks")
    pipe = make_pipeline()
    use_step_cache_(pipe, "tea_cache", ALWAYS)
    expected = draw(pipe)
    for _ in range(2):  # a pipeline removes and adds it after each generation
        accelerate.add_hook_to_module(pipe.transformer, accelerate.ModelHook())
        assert_same_bits(draw(pipe), expected)
        with pytest.raises(UnsupportedError, match="remove_all_hooks"):
            drop_step_cache_(pipe)
        accelerate.remove_hook_from_module(pipe.transformer)
    assert count_cached_steps(pipe) == {"transformer": {"cond": StepCounts(2, 6)}}
    drop_step_cache_(pipe)
    assert_same_bits(draw(pipe), draw(make_pipeline()))


def test_no_transformer_and_no_pipeline():
    empty = SimpleNamespace(components={"unet": torch.nn.Linear(2, 2)}, scheduler=None)
    with pytest.raises(ConfigError, match="expected a pipeline with a transformer, .* 'unet'"):
        use_step_cache_(empty, "tea_cache", ALWAYS)
    with pytest.raises(ConfigError, match="got int"):
        use_step_cache_(1, "tea_cache", ALWAYS)
    none = make_transformer(num_layers=0, num_single_layers=0)
    with pytest.raises(UnsupportedError, match="transformer: tea_cache: expected blocks, got none"):
        use_step_cache_(none, "tea_cache", ALWAYS, scheduler=FlowMatchEulerDiscreteScheduler())


def test_hooks_that_came_later_must_go_first():
    pipe = make_pipeline()
    use_step_cache_(pipe, "tea_cache", ALWAYS)
    registry = HookRegistry.check_if_exists_or_initialize(pipe.transformer)
    registry.register_hook(ModelHook(), "later")
    with pytest.raises(UnsupportedError, match="got 'later' on FluxTransformer2DModel"):
        drop_step_cache_(pipe)
    registry.remove_hook("later")
    drop_step_cache_(pipe)
