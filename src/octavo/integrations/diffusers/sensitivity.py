"""Which linear layers of a pipeline matter: the error of each when it alone is quantized.

Whole pictures would differ by more than the layers: after some steps, two runs draw other details.
So the passes of the transformers are recorded once, as they are, and repeated with some layers
quantized: each has the inputs of the plain run, and its error is that of the layers alone.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from octavo.brief import brief
from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.integrations.diffusers.call import Prompt, Run, Steps
from octavo.integrations.diffusers.linear import as_patterns_see
from octavo.integrations.diffusers.pipeline import Part, find_parts, naming
from octavo.integrations.fused_layers import By, pattern_of, shards_of, units
from octavo.integrations.linear import (
    IGNORED,
    LinearPlan,
    check_linear,
    layer_index,
    plan_linear,
    put_linear_,
)
from octavo.integrations.patch import Patch
from octavo.internals import internals
from octavo.layers.linear import Fp8Linear
from octavo.numerics.error import relative_rms
from octavo.patterns import Layer, match_layers
from octavo.recipe import LinearSettings, Recipe

with internals("torch"):
    from torch.utils._pytree import tree_flatten, tree_map

# A plain transformer differs from itself by less, on any device.
MAX_FLOOR = 1e-3


@dataclass(frozen=True, kw_only=True)
class SensitivityRow:
    """Layers that are quantized together, and what that does to the transformer.

    name: of the layer, the kind of layers (with * for the block) or the block. pattern: for
    ignored_layers. error: relative RMS of the transformer's result over all recorded passes, and
    errors at each recorded step. kept: why the model's defaults leave these layers; None if they
    do not. is_weight_only: whether their weights alone are quantized, as weight_only_layers say.
    """

    component: str
    name: str
    pattern: str
    layers: tuple[str, ...]
    num_weights: int
    error: float
    errors: Mapping[int, float]
    kept: str | None = None
    is_weight_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What `scan_sensitivity` found: layers by their error, the largest first.

    error: of all layers that are not kept, quantized at once. floor: of the plain transformers
    against themselves. left: layers that were not tried though nobody ignored them, and why.
    """

    rows: tuple[SensitivityRow, ...]
    error: float
    floor: float
    left: Mapping[str, str] = field(default_factory=dict)

    def propose(self, *, reduction: float = 0.5, max_share: float = 0.2) -> list[str]:
        """Patterns of layers to ignore: the fewest rows without which the error is so much lower.

        Errors of layers are taken to add up in squares, as independent ones do. Where that takes
        more than max_share of the weights, no layer stands out, and nothing is proposed. Layers
        that the defaults leave anyway have no part in it, nor have weight-only ones, which somebody
        asked for. For a pipeline with two transformers a pattern holds for both.
        """
        for name, share in (("reduction", reduction), ("max_share", max_share)):
            if not 0 < share < 1:
                raise ConfigError(f"expected {name} between 0 and 1, got {share}")
        rows = [row for row in self.rows if row.kept is None and not row.is_weight_only]
        total = sum(row.error**2 for row in rows if math.isfinite(row.error))
        num_weights = sum(row.num_weights for row in rows)
        proposed: list[SensitivityRow] = []
        rest = total
        for row in rows:
            if math.isfinite(row.error):
                if rest <= (1 - reduction) ** 2 * total:
                    break
                rest -= row.error**2
            proposed.append(row)
        if sum(row.num_weights for row in proposed) > max_share * num_weights:
            return []
        return list(dict.fromkeys(row.pattern for row in proposed))

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            about = f" (kept: {row.kept})" if row.kept else ""
            about += " (weight-only)" if row.is_weight_only else ""
            lines.append(f"{row.component}.{row.name}: {row.error:.2e}{about}")
        return "\n".join([*lines, f"all at once: {self.error:.2e}"])


def scan_sensitivity(
    pipe: Any,
    prompts: Sequence[Prompt],
    *,
    linear: str | Mapping[str, Any] | LinearSettings = "fp8",
    by: By = "layer",
    num_inference_steps: int | None = None,
    num_timesteps: int = 4,
    seed: int = 0,
    ignored_layers: Sequence[str] = (),
    weight_only_layers: Sequence[str] = (),
    is_all: bool = False,
    call_options: Mapping[str, Any] | None = None,
) -> Sensitivity:
    """The error of each linear layer of a pipeline's transformers when it alone is quantized.

    The pipeline runs once as it is, on all prompts, and the inputs of its transformers are kept at
    num_timesteps of the steps. Each of these passes is then repeated with one layer in FP8 (by
    "layer"), those of one kind in all blocks ("group"), or those of one block ("block"), and its
    result compared. is_all: also the layers that the model's defaults leave, to see that they
    should. weight_only_layers: patterns of layers that are tried with their weight alone in FP8, as
    `apply_` makes them. prompts, call_options, num_inference_steps, seed: as of
    `calibrate_pipeline`. The pipeline is left as it was.
    """
    run = Run(num_inference_steps=num_inference_steps, seed=seed, call_options=call_options or {})
    scan = Scan(pipe, linear, ignored_layers, weight_only_layers, is_all=is_all)
    scan.record(prompts, run, num_timesteps)
    return scan.result(by)


@dataclass(frozen=True)
class _Tried:
    """One transformer: the layers that are tried, and why the defaults leave some of them."""

    module: nn.Module
    plan: LinearPlan
    kept: Mapping[str, str]

    @property
    def default(self) -> list[str]:
        """What a recipe quantizes, with weights alone or not."""
        return [name for name in self.plan.chosen if name not in self.kept]


def _plan(part: Part, is_all: bool) -> _Tried:
    own, module = part.recipe, part.module
    if not is_all:
        plan = part.plan_linear()
    else:
        # By their names: without the reasons to stay, nobody knows what is modulation.
        ignored = match_layers(own.ignored_layers, as_patterns_see(module))
        plan = plan_linear(module, [f"re:^{re.escape(layer.name)}$" for layer in ignored])
        if own.weight_only_layers:
            plan = replace(plan, weight_only=part.plan_linear().weight_only)
    others = {name: reason for name, reason in part.kept.items() if name not in plan.weight_only}
    return _Tried(module, plan, others)


@dataclass(frozen=True)
class _Pass:
    """One pass of a transformer: its inputs, and what it made of them, flat and in float32."""

    component: str
    step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor


class Scan:
    """A scan in parts: what to try, then `record`, then any of the rest."""

    def __init__(
        self,
        pipe: Any,
        linear: str | Mapping[str, Any] | LinearSettings = "fp8",
        ignored_layers: Sequence[str] = (),
        weight_only_layers: Sequence[str] = (),
        *,
        is_all: bool = False,
    ) -> None:
        settings = LinearSettings.read(linear)
        if settings is None or settings.scaling == "static":
            raise ConfigError(
                f"expected 'fp8' or dynamic settings of linear layers to try, got {brief(linear)}"
            )
        self.pipe, self.settings = pipe, settings
        self.parts: dict[str, _Tried] = {}
        patterns = {"ignored_layers": ignored_layers, "weight_only_layers": weight_only_layers}
        recipe = Recipe(linear=settings, **patterns)
        for part in find_parts(pipe, recipe):
            with naming(part.name):
                self.parts[part.name] = tried = _plan(part, is_all)
                check_linear(part.module, tried.plan, settings, None)
        self.passes: list[_Pass] = []
        self.floor = math.nan

    def record(
        self,
        prompts: Sequence[Prompt],
        run: Run | None = None,
        num_timesteps: int = 4,
        on_step: Callable[[int], None] = lambda num_steps: None,
    ) -> None:
        """Run the pipeline as it is, and keep what its transformers were given.

        num_timesteps: at so many of the steps, spread evenly from the first to the last. on_step:
        called with the number of steps so far.
        """
        if num_timesteps < 1:
            raise ConfigError(f"expected num_timesteps from 1 on, got {num_timesteps}")
        run = run or Run()
        calls = run.calls(self.pipe, prompts)
        chosen = spread_evenly(run.num_steps(self.pipe), num_timesteps)
        passes: list[_Pass] = []
        with run.counted(self.pipe, on_step) as steps, self._recording(passes, steps, chosen):
            for call in calls:
                steps.run(call)
        seen = {one.component for one in passes}
        if missing := [name for name in self.parts if name not in seen]:
            raise ConfigError(
                f"expected passes of {', '.join(missing)}, got none at the recorded steps: more "
                "num_timesteps or num_inference_steps"
            )
        self.passes = passes
        self.floor = overall(self.errors(list(self.parts)))
        if not self.floor <= MAX_FLOOR:
            raise UnsupportedError(
                "expected transformers that make the same of the same inputs, got a difference of "
                f"{self.floor:.3g}: turn dropout off"
            )

    @contextmanager
    def _recording(self, passes: list[_Pass], steps: Steps, chosen: set[int]) -> Iterator[None]:
        """Inside, the passes of the transformers at the chosen steps are kept."""
        inputs: tuple[Any, Any] = ((), {})

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal inputs
            if steps.index in chosen:  # copied now: some are written to later
                inputs = (_copied(args), _copied(kwargs))

        def after(name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if steps.index in chosen:
                passes.append(_Pass(name, steps.index, *inputs, flat(result)))

        with Patch() as patch:
            for name, part in self.parts.items():
                patch.hook(part.module.register_forward_pre_hook(before, with_kwargs=True))
                hook = partial(after, name)
                patch.hook(part.module.register_forward_hook(hook, with_kwargs=True))
            yield

    def errors(self, components: Sequence[str]) -> dict[int, float]:
        """The error of these transformers as they are now, by step: relative RMS of the result."""
        if not self.passes:
            raise ConfigError("expected a scan that has recorded its prompts, got a new one")
        squares: dict[int, list[float]] = {}
        for one in self.passes:
            if one.component in components:
                with torch.no_grad():
                    module = self.parts[one.component].module
                    result = flat(module(*_copied(one.args), **_copied(one.kwargs)))
                error = relative_rms(result, one.result)
                squares.setdefault(one.step, []).append(error**2)
        return {step: math.sqrt(sum(x) / len(x)) for step, x in squares.items()}

    def units(self, by: By) -> list[tuple[str, str, list[str]]]:
        """What is quantized together: component, name and layers."""
        if by not in get_args(By):
            raise ConfigError(f"expected by, one of {', '.join(get_args(By))}, got {brief(by)}")
        found = []
        for component, part in self.parts.items():
            # Those that the defaults leave, and weight-only ones, are apart: a block may have all.
            alone = part.plan.weight_only
            kinds = (
                [n for n in part.default if n not in alone],
                [n for n in part.default if n in alone],
                [n for n in part.plan.chosen if n in part.kept],
            )
            for names in kinds:
                found += [(component, name, layers) for name, layers in units(names, by).items()]
        return found

    def result(
        self, by: By = "layer", on_row: Callable[[int], None] = lambda num_rows: None
    ) -> Sensitivity:
        """The rows; on_row: called with the number of rows so far."""
        rows: list[SensitivityRow] = []
        left: dict[str, str] = {}
        for component, part in self.parts.items():
            left |= {
                f"{component}.{name}": reason
                for name, reason in part.plan.left.items()
                if reason != IGNORED and reason != part.kept.get(name)
            }
        for index, (component, name, layers) in enumerate(self.units(by), 1):
            try:
                rows.append(self._row(component, name, layers))
            except (OctavoError, RuntimeError) as error:
                if layers[0] not in self.parts[component].kept:
                    raise
                # Some models read the dtype of such a weight.
                left |= {f"{component}.{layer}": str(error)[:200] for layer in layers}
            on_row(index)
        # A result that is not finite is worse than all others.
        rows.sort(key=lambda row: -(math.inf if math.isnan(row.error) else row.error))
        return Sensitivity(rows=tuple(rows), error=self.error(), floor=self.floor, left=left)

    def _row(self, component: str, name: str, layers: list[str]) -> SensitivityRow:
        part = self.parts[component]
        is_kept = layers[0] in part.kept
        weights = [part.module.get_submodule(layer).weight for layer in layers]
        with self._quantized({component: layers}):
            errors = self.errors([component])
        return SensitivityRow(
            component=component,
            name=name,
            pattern=pattern_of(layers, name, part.kept if is_kept else part.default),
            layers=tuple(layers),
            num_weights=sum(weight.numel() for weight in weights),  # type: ignore[operator,misc]
            error=overall(errors),
            errors=errors,
            kept=part.kept.get(layers[0]),
            is_weight_only=layers[0] in part.plan.weight_only,
        )

    def error(self, ignored_layers: Sequence[str] = ()) -> float:
        """The error of all layers at once that a recipe would quantize, without those ignored."""
        layers = {
            component: [Layer(name, layer_index(name)) for name in part.default]
            for component, part in self.parts.items()
        }
        everywhere = [layer for found in layers.values() for layer in found]
        hits = {id(layer) for layer in match_layers(ignored_layers, everywhere)}
        chosen = {
            component: [layer.name for layer in found if id(layer) not in hits]
            for component, found in layers.items()
        }
        with self._quantized(chosen):
            return overall(self.errors(list(chosen)))

    @contextmanager
    def _quantized(self, names: Mapping[str, Sequence[str]]) -> Iterator[None]:
        with ExitStack() as stack:
            for component, layers in names.items():
                part = self.parts[component]
                stack.enter_context(quantized(part.module, part.plan, layers, self.settings))
            yield


def overall(errors: Mapping[int, float]) -> float:
    """The error of all steps: the root of the mean square."""
    if not errors:
        return math.nan
    return math.sqrt(sum(x**2 for x in errors.values()) / len(errors))


def spread_evenly(num_steps: int, num_chosen: int) -> set[int]:
    """`num_chosen` of the steps, the first and the last included if there are two or more."""
    if num_chosen >= num_steps:
        return set(range(num_steps))
    if num_chosen == 1:
        return {num_steps // 2}
    return {round(i * (num_steps - 1) / (num_chosen - 1)) for i in range(num_chosen)}


def flat(result: Any) -> Tensor:
    """Everything that a transformer gives, in one row of float32 numbers."""
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    parts = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    if not parts:
        raise UnsupportedError("expected a transformer that gives tensors, got none")
    return torch.cat([x.detach().float().flatten() for x in parts])


def _copied(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


@contextmanager
def quantized(
    module: nn.Module, plan: LinearPlan, names: Sequence[str], settings: LinearSettings
) -> Iterator[None]:
    """Some layers of a model in FP8, weight-only where the plan says so; then as they were."""
    plain: dict[str, Any] = {name: module.get_submodule(name) for name in names}
    try:
        for name, layer in plain.items():
            own = plan.settings_of(name, settings)
            shards = shards_of(module, name, layer, own)
            made = Fp8Linear.from_linear(layer, own, shards=shards, name=name)
            put_linear_(module, plan.chosen[name], made)
        yield
    finally:
        for name, layer in plain.items():
            put_linear_(module, plan.chosen[name], layer)
