"""TeaCache on a small FLUX: its rule, its residual, and that nothing leaks anywhere."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers import FlowMatchEulerDiscreteScheduler

from octavo import (
    Recipe,
    UnsupportedError,
    apply_,
    count_cached_steps,
    drop_step_cache_,
    use_step_cache_,
)
from octavo.demo.small_image import make_small_image_model
from octavo.integrations.diffusers.denoising import StepCounts, find_step_hook
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.tiny_flux import (
    NUM_STEPS,
    Seen,
    draw,
    guided,
    make_flux2_transformer,
    make_pipeline,
    make_transformer,
)

# A polynomial that does not look at the input: 0.3 in each step.
STEADY = {"rel_l1_thresh": 1.0, "coefficients": [0.3]}
FASTER = {"rel_l1_thresh": 0.8, "coefficients": [0.3]}
ALWAYS = {"rel_l1_thresh": 1e9, "coefficients": [1.0, 0.0]}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def cached(config=ALWAYS, **changes):
    pipe = make_pipeline(**changes)
    use_step_cache_(pipe, "tea_cache", config)
    return pipe


def test_threshold_zero_skips_nothing_and_changes_no_bit():
    pipe = make_pipeline()
    plain = draw(pipe)
    use_step_cache_(pipe, "tea_cache", {"rel_l1_thresh": 0, "coefficients": [0.0]})
    seen = Seen(pipe.transformer)
    assert_same_bits(draw(pipe), plain)
    assert seen.num_runs == NUM_STEPS
    assert count_cached_steps(pipe) == {"transformer": {"cond": StepCounts(NUM_STEPS, 0)}}


@pytest.mark.parametrize("coefficient", [0.3, -0.3])
def test_estimates_add_up_until_they_reach_the_threshold(coefficient):
    pipe = cached({"rel_l1_thresh": 0.8, "coefficients": [coefficient]})
    seen = Seen(pipe.transformer)
    draw(pipe, num_inference_steps=9)
    # 0.3, 0.6, 0.9: the third step after one that ran runs; the first and the last in any case.
    ran = [True, False, False, True, False, False, True, False, True]
    assert seen.num_runs == sum(ran)
    assert count_cached_steps(pipe) == {"transformer": {"cond": StepCounts(sum(ran), 5)}}
    steps = [state for state, did in enumerate(ran) if did]
    residuals = seen.residuals()
    for step, did in enumerate(ran):
        if not did:
            last = max(s for s in steps if s < step)
            torch.testing.assert_close(residuals[step], residuals[last])
    assert not torch.allclose(residuals[0], residuals[3], rtol=1e-3)


def test_the_first_and_the_last_step_run_whatever_the_threshold():
    pipe = cached()
    seen = Seen(pipe.transformer)
    result = draw(pipe)
    assert seen.num_runs == 2
    assert not torch.equal(result, draw(make_pipeline()))


def test_the_rule_sees_the_relative_change_of_the_modulated_input():
    pipe = make_pipeline()
    inputs, changes = [], []
    norm = pipe.transformer.transformer_blocks[0].norm1
    hook = norm.register_forward_hook(lambda module, args, result: inputs.append(result[0]))
    draw(pipe)
    hook.remove()
    use_step_cache_(pipe, "tea_cache", {"rel_l1_thresh": 0, "coefficients": [1.0, 0.0]})
    steps = find_step_hook(pipe.transformer)
    last = pipe.transformer.single_transformer_blocks[-1]
    last.register_forward_pre_hook(lambda module, args: changes.append(steps.current.rel_l1))
    draw(pipe)
    pairs = list(pairwise(inputs))
    expected = [((now - before).abs().mean() / before.abs().mean()).item() for before, now in pairs]
    assert min(expected) > 0.01
    # The first step has none before it, and the last runs whatever it is.
    assert changes[1:-1] == pytest.approx(expected[:-1], rel=1e-5)


def test_prompt_and_no_prompt_have_states_of_their_own():
    pipe = cached()
    seen = Seen(pipe.transformer)
    draw(pipe, **guided())
    residuals = seen.residuals()
    assert not torch.allclose(residuals[0], residuals[1], rtol=1e-3)
    for step in range(1, NUM_STEPS - 1):
        torch.testing.assert_close(residuals[2 * step], residuals[0])
        torch.testing.assert_close(residuals[2 * step + 1], residuals[1])
    skipped = StepCounts(2, NUM_STEPS - 2)
    assert count_cached_steps(pipe) == {"transformer": {"cond": skipped, "uncond": skipped}}


def test_a_generation_does_not_depend_on_the_one_before():
    alone = [draw(cached(STEADY), prompt=prompt) for prompt in (1, 2)]
    pipe = cached(STEADY)
    assert_same_bits(draw(pipe, prompt=1), alone[0])
    assert_same_bits(draw(pipe, prompt=2), alone[1])
    assert_same_bits(draw(pipe, prompt=1), alone[0])


class Stop(Exception):
    pass


# Half of the time is one that the stopped generation had not come to: only the scheduler tells.
@pytest.mark.parametrize("sigmas", [[1.0, 0.6, 0.3], [0.5, 0.3, 0.1]])
@pytest.mark.parametrize("after", [0, 2])
def test_a_generation_that_was_stopped_leaves_nothing(after, sigmas):
    def stop(pipe, step, timestep, tensors):
        if step == after:
            raise Stop
        return tensors

    options = {"prompt": 2, "sigmas": sigmas, "num_inference_steps": 3}
    alone = draw(cached(), **options)
    pipe = cached()
    with pytest.raises(Stop):
        draw(pipe, prompt=1, callback_on_step_end=stop)
    assert_same_bits(draw(pipe, **options), alone)
    assert count_cached_steps(pipe) == {"transformer": {"cond": StepCounts(2, 1)}}


def test_a_failure_inside_the_transformer_leaves_nothing():
    alone = draw(cached(), prompt=2)
    pipe = cached()
    calls = iter(range(1000))

    def fail(*args):
        if next(calls) == 3:
            raise Stop

    hook = pipe.transformer.norm_out.register_forward_pre_hook(fail)
    with pytest.raises(Stop):
        draw(pipe, prompt=1)
    hook.remove()
    states = find_step_hook(pipe.transformer).states
    assert not states._state_cache and find_step_hook(pipe.transformer).current is None
    assert_same_bits(draw(pipe, prompt=2), alone)


def test_another_size_and_batch_and_scheduler():
    pipe = cached(STEADY)
    draw(pipe)
    for options in ({"height": 64}, {"num_images_per_prompt": 2}, {}):
        assert_same_bits(draw(pipe, **options), draw(cached(STEADY), **options))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    other = cached(STEADY)
    other.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    assert_same_bits(draw(pipe), draw(other))
    assert count_cached_steps(pipe)["transformer"]["cond"].skipped > 0


def step(model, scheduler, time, batch=1, **options):
    """One call of a transformer alone, as a loop of one's own makes it."""
    torch.manual_seed(batch)
    out = model(
        hidden_states=torch.randn(batch, 4, 16),
        encoder_hidden_states=torch.randn(batch, 8, 32),
        pooled_projections=torch.randn(batch, 32),
        timestep=torch.full((batch,), float(time)),
        img_ids=torch.zeros(4, 3),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
        **options,
    )[0]
    scheduler.step(out, scheduler.timesteps[scheduler.step_index or 0], torch.zeros_like(out))
    return out


def make_alone(make=make_transformer):
    model, scheduler = make(), FlowMatchEulerDiscreteScheduler()
    use_step_cache_(model, "tea_cache", ALWAYS, scheduler=scheduler)
    scheduler.set_timesteps(8)
    return model, scheduler


def test_a_transformer_alone_and_a_shape_that_changes_in_a_generation():
    model, scheduler = make_alone()
    seen = Seen(model)
    for time, batch in ((1.0, 1), (0.9, 1), (0.8, 2), (0.7, 2), (0.6, 1)):
        step(model, scheduler, time, batch)
    assert seen.num_runs == 3  # of 5: the first, and two of another batch than before
    assert count_cached_steps(model) == {"transformer": {"all": StepCounts(3, 2)}}


def test_what_a_control_net_adds_between_blocks_is_not_added_twice():
    model, scheduler = make_alone()
    seen = Seen(model)
    control = {"controlnet_block_samples": [torch.randn(1, 4, 32)]}
    step(model, scheduler, 1.0, **control)
    step(model, scheduler, 0.9, **control)
    assert seen.num_runs == 1
    torch.testing.assert_close(*seen.residuals())


def test_flux2_joins_its_streams_between_the_blocks():
    model, scheduler = make_alone(make_flux2_transformer)
    seen = Seen(model)
    for time in (1.0, 0.9):
        model(
            hidden_states=torch.randn(1, 4, 16),
            encoder_hidden_states=torch.randn(1, 8, 32),
            timestep=torch.full((1,), time),
            img_ids=torch.zeros(4, 4),
            txt_ids=torch.zeros(8, 4),
        )
        scheduler.step(
            torch.zeros(1), scheduler.timesteps[scheduler.step_index or 0], torch.zeros(1)
        )
    assert seen.num_runs == 1
    torch.testing.assert_close(*seen.residuals(), rtol=1e-4, atol=1e-5)


def test_a_pipeline_that_calls_with_and_without_the_prompt_at_once():
    small = {"num_single_layers": 1, "num_attention_heads": 1}
    pipe = make_small_image_model(["cat", "dog"], **small)
    use_step_cache_(pipe, "tea_cache", FASTER)
    pictures = [pipe.generate([word], num_inference_steps=5) for word in ("cat", "dog", "cat")]
    assert count_cached_steps(pipe) == {"transformer": {"all": StepCounts(3, 2)}}
    assert_same_bits(pictures[2], pictures[0])


def test_drop_restores_bits_and_leaves_nothing():
    pipe = make_pipeline()
    plain = draw(pipe)
    use_step_cache_(pipe, "tea_cache", ALWAYS)
    draw(pipe)
    drop_step_cache_(pipe)
    assert_same_bits(draw(pipe), plain)
    for part in pipe.transformer.modules():
        assert "forward" not in vars(part)
        assert not getattr(part, "_diffusers_hook", None) or not part._diffusers_hook.hooks
    use_step_cache_(pipe, "tea_cache", ALWAYS)  # once more


@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fp8_before_and_after_the_cache(is_first):
    recipe = Recipe(linear="fp8", attention="fp8")
    pipe = make_pipeline()
    if not is_first:
        apply_(pipe, recipe)
    use_step_cache_(pipe, "tea_cache", FASTER)
    if is_first:
        apply_(pipe, recipe)
    result = draw(pipe, num_inference_steps=5)
    assert count_cached_steps(pipe)["transformer"]["cond"] == StepCounts(3, 2)
    drop_step_cache_(pipe)
    plain = draw(pipe, num_inference_steps=5)
    use_step_cache_(pipe, "tea_cache", {**FASTER, "rel_l1_thresh": 0})
    assert_same_bits(draw(pipe, num_inference_steps=5), plain)
    assert 0 < (result - plain).norm() / plain.norm() < 0.5


def test_a_saved_transformer_has_no_cache(tmp_path):
    pipe = cached()
    pipe.transformer.save_pretrained(tmp_path)
    loaded = type(pipe.transformer).from_pretrained(tmp_path)
    assert find_step_hook(loaded) is None
    for name, x in pipe.transformer.state_dict().items():
        assert_same_bits(loaded.state_dict()[name], x)


def test_states_hold_no_tensors_after_the_last_step():
    model, scheduler = make_alone()
    scheduler.set_timesteps(2)
    step(model, scheduler, 1.0)
    (state,) = find_step_hook(model).states._state_cache.values()
    assert state.x is not None and state.residual and not state.entry
    step(model, scheduler, 0.5)
    assert state.x is None and not state.residual and not state.entry


def test_a_block_alone_runs():
    model, _ = make_alone()
    plain = make_transformer()
    x, encoder, temb = torch.randn(1, 4, 32), torch.randn(1, 8, 32), torch.randn(1, 32)
    for one, other in (
        (model.transformer_blocks[0], plain.transformer_blocks[0]),
        (model.single_transformer_blocks[-1], plain.single_transformer_blocks[-1]),
    ):
        assert_same_bits(one(x, encoder, temb)[1], other(x, encoder, temb)[1])


def test_training_is_refused():
    model, scheduler = make_alone()
    model.train()
    step(model, scheduler, 1.0)
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="expected inference"):
        step(model, scheduler, 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_compiled_blocks_with_full_graphs(is_first):
    size = {"num_single_layers": 10}  # more than torch would compile anew for one function
    expected = draw(cached(STEADY, **size))
    pipe = make_pipeline(**size)
    plain = draw(pipe)
    if not is_first:
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    use_step_cache_(pipe, "tea_cache", STEADY)
    if is_first:
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    assert_same_bits(draw(pipe), expected)
    assert count_cached_steps(pipe)["transformer"]["cond"].skipped > 0
    drop_step_cache_(pipe)
    assert pipe.transformer.transformer_blocks[0]._compiled_call_impl is not None
    assert_same_bits(draw(pipe), plain)


@pytest.mark.slow
def test_a_transformer_that_was_compiled_as_a_whole_later_is_refused():
    pipe = cached()
    pipe.transformer.compile(backend="eager")
    with pytest.raises(UnsupportedError, match="compile_repeated_blocks"):
        draw(pipe)
