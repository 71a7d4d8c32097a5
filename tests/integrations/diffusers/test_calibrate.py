"""Static scales of pipelines: over all prompts and all steps, used, saved and loaded."""

import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import (
    CalibrationSettings,
    CheckpointError,
    ConfigError,
    Recipe,
    ScaleSet,
    UnsupportedError,
    apply_,
    calibrate_pipeline,
    load_scales,
    restore_,
    save_scales,
)
from octavo.calibration.scale_file import ScaleHeader
from octavo.integrations.diffusers import attention
from octavo.integrations.diffusers.attention import find_layers
from octavo.integrations.diffusers.calibrate import observe_pipeline
from octavo.integrations.diffusers.call import Run
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.numerics.scales import amax_to_scale
from octavo.testing.asserts import assert_same_bits
from octavo_testkit.models.tiny_pipelines import FAMILIES, few, load_pipeline, run_pipeline

PROMPTS = ["a cat on a mat", "two dogs"]
NUM_STEPS = {"wan": 4}  # both of its transformers run
STATIC = {"scaling": "static"}
BOTH = Recipe(linear="fp8", attention="fp8")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def options_of(family, **others):
    steps = NUM_STEPS.get(family, 2)
    return {"num_inference_steps": steps, "call_options": FAMILIES[family].call, **others}


def fp8_layers(pipe):
    return {
        f"{component}.{name}"
        for component, module in pipe.components.items()
        if isinstance(module, torch.nn.Module)
        for name, part in module.named_modules()
        if isinstance(part, Fp8Linear)
    }


def run(pipe, family):
    return run_pipeline(pipe, family, num_steps=NUM_STEPS.get(family, 1))


def recorded_inputs(pipe, prompts, family):
    """The largest input of every linear layer of the transformers, by hand."""
    amax, hooks = {}, []
    for component in ("transformer", "transformer_2"):
        module = getattr(pipe, component, None)
        for name, part in module.named_modules() if module is not None else ():
            if isinstance(part, torch.nn.Linear):

                def note(_, args, key=f"{component}.{name}"):
                    largest = args[0].float().abs().max()
                    amax[key] = torch.maximum(amax.get(key, largest), largest)

                hooks.append(part.register_forward_pre_hook(note))
    for index, prompt in enumerate(prompts):
        pipe(
            prompt=prompt,
            generator=torch.Generator().manual_seed(index),
            num_inference_steps=NUM_STEPS.get(family, 2),
            output_type="latent",
            **FAMILIES[family].call,
        )
    for hook in hooks:
        hook.remove()
    return amax


@pytest.mark.parametrize("family", few("flux"))
def test_scales_are_those_of_the_largest_value_of_all_prompts_and_steps(family, folder_of):
    pipe = load_pipeline(folder_of(family))
    expected = recorded_inputs(pipe, PROMPTS, family)
    settings = CalibrationSettings(margin=1.25)
    scales = calibrate_pipeline(pipe, PROMPTS, settings=settings, **options_of(family))
    assert not scales.layers and scales.header.kind == "pipeline"
    assert scales.header.margin == 1.25 and scales.header.observer == "amax"
    for name, scale in scales.inputs.items():
        assert scale == float(amax_to_scale(expected[name], margin=1.25))
        assert scale == pytest.approx(1.25 * float(expected[name]) / 448, rel=1e-6)
    # One prompt of one step has not seen as much.
    fewer = recorded_inputs(pipe, PROMPTS[:1], family)
    assert any(fewer[name] < expected[name] for name in scales.inputs)
    assert not fp8_layers(pipe)
    apply_(pipe, Recipe(linear=STATIC, scales=scales.to_dict()))
    assert fp8_layers(pipe) == scales.inputs.keys()
    components = {"transformer", "transformer_2"} if family == "wan" else {"transformer"}
    assert {name.partition(".")[0] for name in scales.inputs} == components


@pytest.mark.parametrize("family", few("flux"))
def test_static_linear_and_attention_saved_and_loaded(family, folder_of, tmp_path):
    pipe = load_pipeline(folder_of(family))
    plain = run(pipe, family)
    scales = calibrate_pipeline(pipe, PROMPTS, recipe=BOTH, **options_of(family))
    assert scales.layers and scales.inputs
    assert_same_bits(run(pipe, family), plain)  # as it was
    path = tmp_path / "scales.json"
    save_scales(path, scales)
    assert load_scales(path) == scales
    recipe = Recipe(linear=STATIC, attention=STATIC, scales=str(path))
    changes = apply_(pipe, recipe)
    layers = [
        f"{c}.{n}"
        for c in ("transformer", "transformer_2")
        if hasattr(pipe, c)
        for n in changes.layers.get(f"{c}.attention", [])
    ]
    assert set(layers) == scales.layers.keys()
    static = run(pipe, family)
    assert 0 < relative_rms(static, plain) < 0.15
    layer = next(n for n in changes.layers["transformer.linear"])
    found = pipe.transformer.get_submodule(layer).input_scale
    assert float(found) == scales.inputs[f"transformer.{layer}"]

    pipe.save_pretrained(tmp_path / "saved")
    loaded = load_pipeline(tmp_path / "saved")
    assert fp8_layers(loaded) == scales.inputs.keys()
    for part in ("transformer", "transformer_2"):
        if getattr(pipe, part, None) is not None:
            before, after = getattr(pipe, part).state_dict(), getattr(loaded, part).state_dict()
            assert before.keys() == after.keys()
            for name, x in before.items():
                assert_same_bits(after[name], x)
    apply_(loaded, Recipe(attention=STATIC, scales=str(path)))
    assert_same_bits(run(loaded, family), static)


@pytest.fixture(scope="module")
def flux(folder_of):
    """A plain pipeline that no test changes, and what was seen in it."""
    with torch.no_grad():
        pipe = load_pipeline(folder_of("flux"))
        run = Run(num_inference_steps=3, call_options=FAMILIES["flux"].call)
        return pipe, run, observe_pipeline(pipe, PROMPTS, run, recipe=BOTH)


def test_ranges_over_the_steps(flux):
    _, _, found = flux
    assert len(found.ranges.timesteps) == 3 and found.num_prompts == 2
    assert list(found.ranges.timesteps) == sorted(found.ranges.timesteps, reverse=True)
    rows = {(row.layer, row.tensor): row for row in found.ranges.rows}
    assert len(rows) == len(found.scales.inputs) + 3 * len(found.scales.layers)
    for name, scale in found.scales.inputs.items():
        row = rows[name, "input"]
        assert len(row.amax) == 3 and row.lowest <= row.highest
        assert scale == float(amax_to_scale(torch.tensor(row.highest), margin=1.5))
    for name, scales in found.scales.layers.items():
        for tensor in "qkv":
            highest = torch.tensor(rows[name, tensor].highest)
            assert getattr(scales, tensor) == float(amax_to_scale(highest, margin=1.5))
    # Denoising moves the ranges: that is why all steps are seen.
    assert max(row.spread for row in rows.values()) > 1.05
    assert "transformer.transformer_blocks.0.attn q: amax" in str(found.ranges)


def test_statistics(flux):
    _, _, found = flux
    for row in found.statistics:
        assert row.headroom == pytest.approx(1.5, rel=1e-6) and 20 < row.sqnr_db < 40
        # Two prompts of three steps, and the pipeline guides within the model: one pass each.
        assert row.num_passes == 6
    assert {row.tensor for row in found.statistics} == {"input", "q", "k", "v"}
    assert found.scales.header.passes == 6
    assert found.scales.header.data == "2 prompts of 3 steps"


def test_transformers_that_share_the_steps(folder_of):
    pipe = load_pipeline(folder_of("wan"))
    options = options_of("wan")
    run = Run(num_inference_steps=4, call_options=options["call_options"])
    ranges = observe_pipeline(pipe, PROMPTS[:1], run).ranges
    for row in ranges.rows:
        ran = [not math.isnan(x) for x in row.amax]
        first = row.layer.startswith("transformer.")
        assert ran == sorted(ran, reverse=first) and any(ran) and not all(ran)
    options["num_inference_steps"] = 1
    with pytest.raises(ConfigError, match=r"got no pass of 'transformer_2.*more num_inference"):
        calibrate_pipeline(pipe, PROMPTS, **options)
    recipe = Recipe(linear="fp8", components={"transformer_2": None})
    scales = calibrate_pipeline(pipe, PROMPTS, recipe=recipe, **options)
    with pytest.raises(CheckpointError, match=r"expected scales of layers named transformer_2\."):
        apply_(pipe, Recipe(linear=STATIC, scales=scales.to_dict()))
    assert not fp8_layers(pipe)


def test_an_interrupted_run_goes_on(flux, tmp_path):
    pipe, run, expected = flux
    path, seen = tmp_path / "scales.json", []
    calls = []

    def stop(num_steps):
        seen.append(num_steps)
        if num_steps == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe_pipeline(pipe, PROMPTS, run, recipe=BOTH, save_path=path, on_step=stop)
    assert seen == [0, 1, 2, 3, 4]
    assert "progress_bar" not in vars(pipe) and not path.exists()
    assert not any(m._forward_pre_hooks for m in pipe.transformer.modules())
    assert all(
        x.processor._attention_backend is None for x in find_layers(pipe.transformer).values()
    )
    with pytest.raises(ConfigError, match="is the state of another calibration"):
        observe_pipeline(pipe, PROMPTS[:1], run, recipe=BOTH, save_path=path)
    with pytest.raises(ConfigError, match="expected the state of the 17 layers"):
        observe_pipeline(pipe, PROMPTS, run, save_path=path)
    found = observe_pipeline(pipe, PROMPTS, run, recipe=BOTH, save_path=path, on_step=calls.append)
    assert calls == [3, 4, 5, 6]
    assert found.scales.inputs == expected.scales.inputs
    assert found.scales.layers == expected.scales.layers
    assert found.ranges.rows == expected.ranges.rows and found.statistics == expected.statistics
    assert load_scales(path) == found.scales
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([], {}, "expected prompts, got none"),
        ("a cat", {}, "expected a list of prompts"),
        ([3], {}, "expected a prompt as a text"),
        (PROMPTS, {"ignored_layers": ["img_mpl"]}, "matches none of the"),
        (PROMPTS, {"ignored_layers": ["to_q"], "recipe": BOTH}, "expected ignored_layers in the"),
        (PROMPTS, {"num_inference_steps": 0}, "expected num_inference_steps from 1 on"),
        (PROMPTS, {"call_options": {"hieght": 32}}, "hieght: expected an option of FluxPipeline"),
        (PROMPTS, {"call_options": {"self": 1}}, "self: expected an option of FluxPipeline"),
        (PROMPTS, {"call_options": {"width": 33}}, "width: expected a multiple of 2, got 33"),
        (PROMPTS, {"call_options": {"generator": None}}, "expected generator beside the call's"),
        (PROMPTS, {"settings": CalibrationSettings(granularity="head")}, "expected attention for"),
        (PROMPTS, {"settings": CalibrationSettings(rotate_keys=True)}, "without rotate_keys"),
        (PROMPTS, {"recipe": Recipe()}, "got an empty one"),
    ],
)
def test_what_is_refused(flux, prompts, options, said):
    with pytest.raises((ConfigError, UnsupportedError), match=said):
        calibrate_pipeline(flux[0], prompts, **options)


def test_ignored_layers_have_no_scales(flux):
    pipe, run, found = flux
    options = {"num_inference_steps": 3, "call_options": run.call_options}
    scales = calibrate_pipeline(pipe, PROMPTS, ignored_layers=["to_q"], **options)
    left = {name for name in found.scales.inputs if not name.endswith("to_q")}
    assert scales.inputs == {name: found.scales.inputs[name] for name in left}


def test_scales_that_are_not_a_pipelines(flux, folder_of):
    pipe = load_pipeline(folder_of("flux"))
    with pytest.raises(CheckpointError, match="expected scales for pipeline, got a file for lin"):
        scales = ScaleSet({}, ScaleHeader(kind="linear"), {"transformer.a": 1.0})
        apply_(pipe, Recipe(linear=STATIC, scales=scales.to_dict()))
    with pytest.raises(CheckpointError, match=r"layers named transformer\.…, got 'blocks.0'"):
        apply_(pipe, Recipe(linear=STATIC, scales={"blocks.0": {"input": 1.0}}))
    some = dict(flux[2].scales.inputs)
    del some["transformer.transformer_blocks.0.attn.to_q"]
    with pytest.raises(CheckpointError, match="transformer: expected input scales for 'transf"):
        apply_(pipe, Recipe(linear=STATIC, scales=ScaleSet({}, inputs=some).to_dict()))
    with pytest.raises(CheckpointError, match="expected scales for 'transformer_blocks.0.attn'"):
        apply_(pipe, Recipe(attention=STATIC, scales=ScaleSet({}, inputs=some).to_dict()))
    assert not fp8_layers(pipe)


def test_static_attention_with_scales_of_each_layer(flux, folder_of, monkeypatch):
    pipe = load_pipeline(folder_of("flux"))
    plain = run(pipe, "flux")
    scales = flux[2].scales.layers
    recipe = Recipe(attention=STATIC, scales=ScaleSet(scales).to_dict())
    apply_(pipe, recipe)
    find, seen = attention.current_scales, []

    def note(query):
        found = find(query)
        seen.append([float(x) for x in (found.q, found.k, found.v)])
        return found

    monkeypatch.setattr(attention, "current_scales", note)
    static = run(pipe, "flux")
    assert 0 < relative_rms(static, plain) < 0.1
    names = [f"transformer.{name}" for name in find_layers(pipe.transformer)]
    assert seen == [[scales[n].q, scales[n].k, scales[n].v] for n in names]
    assert seen[0] != seen[1]
    layer = pipe.transformer.transformer_blocks[0].attn
    assert layer.processor._attention_backend == "octavo_static"
    x = torch.zeros(1, 4, 32, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="expected a call through its layer"):
        layer.processor(layer, x, x)
    restore_(pipe)
    assert not any(m._forward_pre_hooks for m in pipe.transformer.modules())
    assert layer.processor._attention_backend is None


@pytest.mark.slow
def test_static_attention_is_one_graph_for_all_blocks(folder_of):
    from torch._dynamo.testing import CompileCounter

    pipe = load_pipeline(folder_of("wan"))
    recipe = Recipe(attention="fp8")
    scales = calibrate_pipeline(pipe, PROMPTS[:1], recipe=recipe, **options_of("wan"))
    apply_(pipe, Recipe(attention=STATIC, scales=scales.to_dict()))
    static, counter = run(pipe, "wan"), CompileCounter()
    for transformer in (pipe.transformer, pipe.transformer_2):
        transformer.compile_repeated_blocks(fullgraph=True, backend=counter)
    assert_same_bits(run(pipe, "wan"), static)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_scales_per_head(flux, folder_of):
    pipe = load_pipeline(folder_of("flux"))
    options = {"num_inference_steps": 3, "call_options": flux[1].call_options}
    settings = CalibrationSettings(granularity="head")
    recipe = Recipe(attention="fp8")
    scales = calibrate_pipeline(pipe, PROMPTS, settings=settings, recipe=recipe, **options)
    for name, per_tensor in flux[2].scales.layers.items():
        assert len(scales.layers[name].q) == 2
        assert scales.layers[name].per_tensor() == per_tensor
    head = {"scaling": "static", "granularity": "head"}
    with pytest.raises(ConfigError, match="expected scales per head, got one for all heads"):
        apply_(pipe, Recipe(attention=head, scales=flux[2].scales.to_dict()))
    plain = run(pipe, "flux")
    apply_(pipe, Recipe(attention=head, scales=scales.to_dict()))
    assert 0 < relative_rms(run(pipe, "flux"), plain) < 0.1


def test_text_encoders_too(folder_of):
    pipe = load_pipeline(folder_of("flux"))
    run_ = Run(num_inference_steps=1, call_options=FAMILIES["flux"].call)
    found = observe_pipeline(pipe, PROMPTS, run_, recipe=Recipe(text_encoder="fp8"))
    components = {name.partition(".")[0] for name in found.scales.inputs}
    assert components == {"text_encoder", "text_encoder_2"}
    assert found.ranges.rows == ()  # they run before the first step
    apply_(pipe, Recipe(text_encoder=STATIC, scales=found.scales.to_dict()))
    assert fp8_layers(pipe) == found.scales.inputs.keys()
    assert run(pipe, "flux").isfinite().all()


def test_a_pipeline_without_a_vae():
    from octavo.demo.small_image import make_small_image_model

    pipe = make_small_image_model(["red", "cat"], num_single_layers=1)
    scales = calibrate_pipeline(
        pipe, ["red cat"], recipe=Recipe(linear="fp8", attention="fp8"), num_inference_steps=1
    )
    assert len(scales.layers) == 2
    pipe.scheduler = None
    with pytest.raises(ConfigError, match="expected a pipeline with a scheduler"):
        calibrate_pipeline(pipe, ["red cat"], num_inference_steps=1)


@pytest.mark.gpu
def test_on_a_gpu():
    """From calibration to static FP8 and a scan, with all tensors on the device."""
    from octavo import scan_sensitivity
    from octavo.demo.small_image import make_small_image_model

    pipe = make_small_image_model(["red", "cat"], num_single_layers=1)
    torch.manual_seed(0)
    for weight in pipe.transformer.parameters():
        if not weight.any():  # new blocks are the identity
            torch.nn.init.normal_(weight, std=0.05)
    pipe.to("cuda", torch.bfloat16)
    options = {"num_inference_steps": 2}
    scan = scan_sensitivity(pipe, ["red cat"], by="group", num_timesteps=1, **options)
    assert scan.floor < 1e-3 and 0 < scan.error < 0.1

    def draw():
        generator = torch.Generator().manual_seed(7)
        return pipe("red cat", generator=generator, output_type="pt", **options).images

    plain = draw()
    scales = calibrate_pipeline(pipe, ["red cat", "cat"], recipe=BOTH, **options)
    assert_same_bits(draw(), plain)
    apply_(pipe, Recipe(linear=STATIC, attention=STATIC, scales=scales.to_dict()))
    assert 0 < relative_rms(draw(), plain) < 0.1
