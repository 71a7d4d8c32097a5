"""Static scales for the layers of a pipeline, over prompts and timesteps.

Ranges move while noise becomes a picture, so that a scale has to hold at all steps: each layer sees
every step of every prompt.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.autosave import check_scale_paths
from octavo.calibration.observers import CalibrationSettings, LayerObserver
from octavo.calibration.run import Calibration, TensorStatistics
from octavo.calibration.scale_file import ScaleHeader, ScaleSet, save_scales
from octavo.calibration.state import StateFile, state_path
from octavo.errors import ConfigError
from octavo.integrations.apply import skipped_layers
from octavo.integrations.diffusers.attention import choose_layers
from octavo.integrations.diffusers.current_layer import observe_attention
from octavo.integrations.diffusers.pipeline import (
    component_recipes,
    find_components,
    is_text_encoder,
    kept_in,
    naming,
)
from octavo.integrations.diffusers.step_ranges import RangeObserver, TimestepRanges
from octavo.integrations.diffusers.steps import Prompt, Run, Steps, counted_steps
from octavo.integrations.linear import plan_linear
from octavo.integrations.observe_linear import InputObserver, watch_inputs
from octavo.numerics.formats import E4M3
from octavo.recipe import Recipe


@dataclass(frozen=True)
class Component:
    """The layers of one component of a pipeline whose scales are looked for."""

    module: nn.Module
    linear: list[str]
    attention: dict[str, nn.Module]


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """The scales of a pipeline, the statistics behind them, and how ranges moved over the steps."""

    scales: ScaleSet
    statistics: tuple[TensorStatistics, ...]
    ranges: TimestepRanges
    num_prompts: int


def calibrate_pipeline(
    pipe: Any,
    prompts: Sequence[Prompt],
    *,
    settings: CalibrationSettings | None = None,
    num_inference_steps: int | None = None,
    seed: int = 0,
    ignored_layers: Sequence[str] = (),
    weight_only_layers: Sequence[str] = (),
    recipe: Recipe | None = None,
    call_options: Mapping[str, Any] | None = None,
) -> ScaleSet:
    """Static scales for a pipeline of diffusers, from all denoising steps of these prompts.

    The layers are those that `apply_(pipe, recipe)` would quantize, but for weight-only ones, which
    have no scales of inputs: left out, the linear layers of its transformers, without
    ignored_layers and weight_only_layers. The scale set names them component.layer. prompts:
    texts, or the arguments of a call ({"prompt": …, "image": …}); call_options: arguments of every
    call, such as height and width. num_inference_steps: left out, the pipeline's own. The i-th
    prompt has the noise of seed + i. The pipeline runs in its own dtype and is left as it was. With
    the observer "amax", a scale is margin times the largest absolute value of all steps and
    prompts, exactly, over 448. Layers that no step reaches, only zeros, NaN and Inf are errors.
    `observe_pipeline` also says how ranges move over the steps.
    """
    run = Run(num_inference_steps=num_inference_steps, seed=seed, call_options=call_options or {})
    recipe = linear_recipe(recipe, ignored_layers, weight_only_layers)
    return observe_pipeline(pipe, prompts, run, settings, recipe).scales


def linear_recipe(
    recipe: Recipe | None, ignored_layers: Sequence[str], weight_only_layers: Sequence[str]
) -> Recipe:
    """What is quantized: the recipe, or linear layers without those that are ignored."""
    patterns = {"ignored_layers": ignored_layers, "weight_only_layers": weight_only_layers}
    if recipe is None:
        return Recipe(linear="fp8", **patterns)
    if given := [name for name, values in patterns.items() if values]:
        raise ConfigError(f"expected {given[0]} in the recipe, got them beside")
    return recipe


def observe_pipeline(
    pipe: Any,
    prompts: Sequence[Prompt],
    run: Run | None = None,
    settings: CalibrationSettings | None = None,
    recipe: Recipe | None = None,
    *,
    save_path: str | os.PathLike[str] | None = None,
    is_resumed: bool = True,
    name: str | None = None,
    on_step: Callable[[int], None] = lambda num_steps: None,
) -> PipelineResult:
    """Run a pipeline on prompts while its layers are watched: scales, statistics and ranges.

    save_path: where the scale file is written. What was seen lies beside it after each prompt, and
    a run that was interrupted goes on from there unless is_resumed is False. name: of the model, in
    the file. on_step: called with the number of steps so far, those of an earlier run included.
    """
    run, settings = run or Run(), settings or CalibrationSettings()
    components = plan_components(pipe, recipe or Recipe(linear="fp8"))
    calibration = PipelineCalibration(components, settings)
    calls, num_steps = run.calls(pipe, prompts), run.num_steps(pipe)
    state_file = None
    if save_path is not None:
        check_scale_paths(is_fp8=True, save_path=save_path, margin=settings.margin)
        subject = f"{name or type(pipe).__name__} in {pipe.dtype}"
        key = _state_key(subject, prompts, run, settings)
        state_file = StateFile(path=state_path(save_path), key=key)
        if not is_resumed:
            state_file.remove()
        elif (state := state_file.load()) is not None:
            calibration.load_state_dict(state, str(state_file.path))
    done = calibration.num_prompts * num_steps
    on_step(done)
    progress = partial(_report, calibration, num_steps, on_step)
    with counted_steps(pipe, progress) as steps, calibration.watching(steps):
        for call in calls[calibration.num_prompts :]:
            steps.start()
            call()
            calibration.finish_prompt(steps)
            if state_file is not None:
                state_file.save(calibration.state_dict())
    header = ScaleHeader(
        kind="pipeline",
        model=None if name is None else name[:1000],
        data=f"{len(calls)} prompts of {num_steps} steps",
    )
    result = calibration.result(header)
    if state_file is not None and save_path is not None:
        save_scales(save_path, result.scales)
        state_file.remove()
    return result


def _report(
    calibration: "PipelineCalibration",
    num_steps: int,
    on_step: Callable[[int], None],
    steps: Steps,
) -> None:
    on_step(calibration.num_prompts * num_steps + min(steps.index, num_steps))


def plan_components(pipe: Any, recipe: Recipe) -> dict[str, Component]:
    """The layers of each component that a recipe would quantize."""
    modules = find_components(pipe)
    planned = {}
    for name, own in component_recipes(pipe, recipe).items():
        module = modules[name]
        with naming(name):
            linear: list[str] = []
            if own.linear is not None:
                kept = kept_in(name, module, own)
                patterns = (own.ignored_layers, kept, own.weight_only_layers)
                linear = plan_linear(module, *patterns).with_inputs()
            attention = {}
            if own.attention is not None:
                attention = choose_layers(module, skipped_layers(module, own))
        planned[name] = Component(module, linear, attention)
    return planned


class PipelineCalibration:
    """What the layers of a pipeline have seen so far."""

    def __init__(self, components: Mapping[str, Component], settings: CalibrationSettings) -> None:
        self.components, self.settings = components, settings
        linear = [f"{name}.{n}" for name, part in components.items() for n in part.linear]
        attention = [f"{name}.{n}" for name, part in components.items() for n in part.attention]
        if settings.rotate_keys or settings.center_keys:
            raise ConfigError(
                "expected a pipeline's scales without rotate_keys and center_keys, which are of a "
                "KV cache"
            )
        if not linear and not attention:
            raise ConfigError("expected layers that take scales, got weight-only ones alone")
        if settings.granularity == "head" and not attention:
            raise ConfigError(
                "expected attention for scales per head, got linear layers, whose inputs have one "
                "scale: calibrate with Recipe(attention='fp8', …)"
            )
        self.inputs = InputObserver(linear)
        self.attention = Calibration(attention, settings, is_nonfinite_refused=True)
        self.ranges = RangeObserver()
        self.num_prompts = 0

    def watching(self, steps: Steps) -> ExitStack:
        """A context in which everything that the layers are given is seen."""
        stack = ExitStack()
        with stack:
            for name, part in self.components.items():
                # Text encoders run once for a prompt, before the first step.
                own = None if is_text_encoder(name) else steps
                stack.enter_context(
                    watch_inputs(part.module, part.linear, partial(self._see_input, name, own))
                )
                stack.enter_context(
                    observe_attention(part.attention, partial(self._see_qkv, name, own))
                )
            return stack.pop_all()

    def _see_input(self, component: str, steps: Steps | None, layer: str, x: Tensor) -> None:
        name = f"{component}.{layer}"
        self.inputs.see(name, x)
        if steps is not None:
            self.ranges.see(name, "input", x, steps.index)

    def _see_qkv(
        self, component: str, steps: Steps | None, layer: str, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        name = f"{component}.{layer}"
        self.attention.see(name, q, k, v)
        if steps is not None:
            for tensor, x in (("q", q), ("k", k), ("v", v)):
                self.ranges.see(name, tensor, x, steps.index)

    def finish_prompt(self, steps: Steps) -> None:
        """One more prompt is done."""
        self.num_prompts += 1
        self.ranges.finish_prompt(steps.timesteps)

    def result(self, header: ScaleHeader) -> PipelineResult:
        """Scales for every layer; ConfigError names layers that saw nothing, or only zeros."""
        inputs: dict[str, float] = {}
        passes = []
        if self.inputs.seen:
            passes.append(self._fewest_passes())
            inputs = self.inputs.scales(self.settings)
        statistics = [self._input_statistics(name, scale) for name, scale in inputs.items()]
        layers = {}
        if self.attention.layers:
            found = self.attention.result()
            layers = dict(found.scales.layers)
            statistics += found.statistics
            passes.append(found.scales.header.passes or 0)
        header = replace(
            header,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            observer=str(self.settings),
            passes=min(passes),
            margin=self.settings.margin,
        )
        return PipelineResult(
            scales=ScaleSet(layers, header, inputs),
            statistics=tuple(statistics),
            ranges=self.ranges.result(),
            num_prompts=self.num_prompts,
        )

    def _fewest_passes(self) -> int:
        try:
            return self.inputs.fewest_passes()
        except ConfigError as error:
            raise ConfigError(
                f"{error}. Layers of a second transformer need steps at which it runs: more "
                "num_inference_steps; others may need another argument of the call, such as image"
            ) from None

    def _input_statistics(self, name: str, scale: float) -> TensorStatistics:
        seen = self.inputs.seen[name]
        amax = float(seen.amax)
        return TensorStatistics(
            layer=name,
            tensor="input",
            amax=amax,
            scale=scale,
            headroom=E4M3.max * scale / amax,
            sqnr_db=seen.sqnr_db(seen.amax.new_full((1,), scale)),
            num_passes=self.inputs.num_passes[name],
            num_nonfinite=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, on the CPU, as `load_state_dict` takes it."""
        layers = self.attention.layers.items()
        return {
            "num_prompts": self.num_prompts,
            "inputs": self.inputs.state_dict(),
            "attention": {name: None if x is None else x.state_dict() for name, x in layers},
            "ranges": self.ranges.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], source: str) -> None:
        """Go on from what `state_dict` gave; source: where it comes from, for errors."""
        own = self.inputs.seen.keys() | self.attention.layers.keys()
        theirs = state["inputs"]["seen"].keys() | state["attention"].keys()
        if own != theirs:
            raise ConfigError(
                f"{source}: expected the state of the {len(own)} layers that are asked for, got "
                f"{len(theirs)} others; start afresh"
            )
        self.num_prompts = state["num_prompts"]
        self.inputs.load_state_dict(state["inputs"])
        self.ranges.load_state_dict(state["ranges"])
        for name, layer in state["attention"].items():
            observer = None if layer is None else LayerObserver.from_state_dict(layer)
            self.attention.layers[name] = observer


def _state_key(
    name: str, prompts: Sequence[Prompt], run: Run, settings: CalibrationSettings
) -> dict[str, str]:
    """What a state belongs to, in words."""
    content = hashlib.sha256(repr(_content([*prompts, run.call_options])).encode())
    return {
        "model": name,
        "prompts": f"{len(prompts)} ({content.hexdigest()[:16]})",
        "steps": f"{run.num_inference_steps or 'the pipeline own'}",
        "seed": f"{run.seed}",
        "observer": str(settings),
        "granularity": settings.granularity,
        "margin": f"{settings.margin:g}",
    }


def _content(x: Any) -> Any:
    """What prints the same whenever it is the same: tensors print in part, pictures by address."""
    match x:
        case Tensor():
            data = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return (str(x.dtype), tuple(x.shape), hashlib.sha256(data).hexdigest())
        case Mapping():
            return {name: _content(x[name]) for name in x}
        case list() | tuple():
            return [_content(item) for item in x]
    if callable(as_bytes := getattr(x, "tobytes", None)):
        return (type(x).__name__, getattr(x, "size", None), hashlib.sha256(as_bytes()).hexdigest())
    return x
