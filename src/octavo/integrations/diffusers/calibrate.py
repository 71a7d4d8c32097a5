"""Static scales for the layers of a pipeline, over prompts and timesteps.

Ranges move while noise becomes a picture, so that a scale has to hold at all steps: each layer sees
every step of every prompt.
"""

import hashlib
import math
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
from octavo.integrations.apply_model import skipped_layers
from octavo.integrations.calibrate_linear import InputObserver, watch_inputs
from octavo.integrations.diffusers.attention import choose_layers, observe_attention
from octavo.integrations.diffusers.call import Prompt, Run, Steps, timesteps_of
from octavo.integrations.diffusers.pipeline import find_parts, is_text_encoder, naming
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerTensor
from octavo.numerics.scales import finite_amax
from octavo.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """One tensor of one layer: its largest absolute value at each step, over all prompts.

    tensor: "input" of a linear layer, "q", "k" or "v" of attention. amax: NaN at steps at which the
    layer did not run.
    """

    layer: str
    tensor: str
    amax: tuple[float, ...]

    @property
    def lowest(self) -> float:
        """The amax of the step at which it is smallest."""
        return min(x for x in self.amax if not math.isnan(x))

    @property
    def highest(self) -> float:
        """The amax of the step at which it is largest, which a static scale has to reach."""
        return max(x for x in self.amax if not math.isnan(x))

    @property
    def spread(self) -> float:
        """How many times larger the highest is: what a scale of one step alone could miss."""
        return math.inf if self.lowest == 0 else self.highest / self.lowest


@dataclass(frozen=True)
class TimestepRanges:
    """The ranges of all layers over the steps of denoising.

    timesteps: the scheduler's, as the first prompt had them, in the order of the steps.
    """

    timesteps: tuple[float, ...]
    rows: tuple[StepRange, ...]

    def __str__(self) -> str:
        lines = []
        for row in sorted(self.rows, key=lambda row: -row.spread):
            reach = f"{row.lowest:.4g} to {row.highest:.4g} ({row.spread:.2f} times)"
            lines.append(f"{row.layer} {row.tensor}: amax {reach}")
        return "\n".join(lines)


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
    patterns = {"ignored_layers": ignored_layers, "weight_only_layers": weight_only_layers}
    if recipe is None:
        recipe = Recipe(linear="fp8", **patterns)
    elif given := [name for name, values in patterns.items() if values]:
        raise ConfigError(f"expected {given[0]} in the recipe, got them beside")
    return observe_pipeline(pipe, prompts, run, settings, recipe).scales


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
    calibration = PipelineCalibration(pipe, recipe or Recipe(linear="fp8"), settings)
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
    num_done = calibration.num_prompts
    on_step(num_done * num_steps)
    with run.counted(pipe, on_step, num_done) as steps, calibration.watching(steps):
        for call in calls[num_done:]:
            steps.run(call)
            # Of a pipeline that begins later, as from an image, only the last ones ran.
            calibration.finish_prompt(timesteps_of(pipe)[-steps.index :])
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


class PipelineCalibration:
    """What the layers of a pipeline have seen so far."""

    def __init__(self, pipe: Any, recipe: Recipe, settings: CalibrationSettings) -> None:
        self.modules: dict[str, nn.Module] = {}
        # By component: the names of linear layers, and attention layers by name.
        self.linear: dict[str, list[str]] = {}
        self.layers: dict[str, dict[str, nn.Module]] = {}
        for part in find_parts(pipe, recipe):
            own, self.modules[part.name] = part.recipe, part.module
            with naming(part.name):
                if own.linear is not None:
                    self.linear[part.name] = part.plan_linear().with_inputs()
                if own.attention is not None:
                    skipped = skipped_layers(part.module, own)
                    self.layers[part.name] = choose_layers(part.module, skipped)
        linear = [f"{name}.{layer}" for name, found in self.linear.items() for layer in found]
        attention = [f"{name}.{layer}" for name, found in self.layers.items() for layer in found]
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
        self.settings = settings
        self.inputs = InputObserver(linear)
        self.attention = Calibration(attention, settings, is_nonfinite_refused=True)
        self.num_prompts = 0
        self._timesteps: tuple[float, ...] = ()
        # By layer and tensor: the amax at each step, on the device until it is asked for.
        self._ranges: dict[tuple[str, str], dict[int, Tensor]] = {}

    def watching(self, steps: Steps) -> ExitStack:
        """A context in which everything that the layers are given is seen."""
        with ExitStack() as stack:
            for name, module in self.modules.items():
                # Text encoders run once for a prompt, before the first step.
                own = None if is_text_encoder(name) else steps
                see = partial(self._see, name, own)
                stack.enter_context(watch_inputs(module, self.linear.get(name, ()), see))
                stack.enter_context(observe_attention(self.layers.get(name, {}), see))
            return stack.pop_all()

    def _see(self, component: str, steps: Steps | None, layer: str, *tensors: Tensor) -> None:
        """One pass of a layer: the input of a linear one, or q, k and v of attention."""
        name = f"{component}.{layer}"
        if len(tensors) == 1:
            self.inputs.see(name, *tensors)
        else:
            self.attention.see(name, *tensors)
        if steps is None:
            return
        kinds = ("input",) if len(tensors) == 1 else ("q", "k", "v")
        for tensor, x in zip(kinds, tensors, strict=True):
            amax = finite_amax(x, PerTensor())
            seen = self._ranges.setdefault((name, tensor), {})
            before = seen.get(steps.index)
            seen[steps.index] = amax if before is None else amax.maximum(before.to(amax.device))

    def finish_prompt(self, timesteps: Sequence[float]) -> None:
        """One more prompt is done; the first says what the timesteps are."""
        self.num_prompts += 1
        self._timesteps = self._timesteps or tuple(timesteps)

    def ranges(self) -> TimestepRanges:
        """What was seen so far, in the order in which the layers first ran."""
        num_steps = max((1 + max(steps) for steps in self._ranges.values()), default=0)
        num_steps = max(num_steps, len(self._timesteps))
        rows = []
        for (layer, tensor), steps in self._ranges.items():
            amax = tuple(float(steps.get(i, math.nan)) for i in range(num_steps))
            rows.append(StepRange(layer=layer, tensor=tensor, amax=amax))
        return TimestepRanges(self._timesteps, tuple(rows))

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
            ranges=self.ranges(),
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
        ranges = [
            (*key, {step: float(x) for step, x in steps.items()})
            for key, steps in self._ranges.items()
        ]
        return {
            "num_prompts": self.num_prompts,
            "inputs": self.inputs.state_dict(),
            "attention": {name: None if x is None else x.state_dict() for name, x in layers},
            "ranges": {"timesteps": list(self._timesteps), "seen": ranges},
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
        for name, layer in state["attention"].items():
            observer = None if layer is None else LayerObserver.from_state_dict(layer)
            self.attention.layers[name] = observer
        self._timesteps = tuple(state["ranges"]["timesteps"])
        self._ranges = {
            (layer, tensor): {step: torch.tensor(x) for step, x in steps.items()}
            for layer, tensor, steps in state["ranges"]["seen"]
        }


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
