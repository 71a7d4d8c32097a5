"""Predicted times of whole models: the cost model, and what records of whole models add to it.

Other models' records say how much longer than the sum of its parts a whole takes (power limits, the
engine between kernels); a model's own records say it best, unless they are left out.
"""

import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from octavo.errors import ConfigError
from octavo.measure.advise import cost
from octavo.measure.advise.cost import Cost, DecoderPlan
from octavo.measure.advise.gpus import Gpu
from octavo.measure.advise.shape import ModelShape, named_model
from octavo.measure.advise.speeds import Speeds
from octavo.measure.records import Measurement

Shapes = Mapping[str, ModelShape]
# Milliseconds that the host takes for a layer of a prompt's pass, where no record says it.
HOST_MS_PER_LAYER = 2.0
# How far another length or batch may be for its record to say something, as a factor.
REACH = 8.0
# (is linear FP8, is attention FP8) of the recipes of `octavo bench diffusion`.
STEP_RECIPES = {
    "bf16": (False, False),
    "linear": (True, False),
    "attention": (False, True),
    "linear+attention": (True, True),
}


@dataclass(frozen=True)
class Prediction:
    """Milliseconds, what they are made of, and how many times their sum that is.

    is_host_bound: whether the host cannot launch as fast as the GPU would run: then ms is about
    the host's time, and comparing two such times says nothing. based_on: models whose records gave
    the factor.
    """

    cost: Cost
    factor: float = 1.0
    based_on: tuple[str, ...] = ()
    is_host_bound: bool = False

    @property
    def ms(self) -> float:
        """The time that is expected."""
        return self.cost.total_ms * self.factor


@dataclass(frozen=True)
class _Sample:
    """A whole that was measured, beside the sum of its parts."""

    model: str
    kind: str  # itl, ttft, or the recipe of a step
    plan: str
    length: int
    batch: int
    ratio: float
    is_peer: bool = False  # that BF16 prompts have another's attention


class Predictor:
    """Predicts times on a GPU.

    leave_out: models whose own records do not count. shapes: of models that records name and that
    have no name of `model_shape.known_models`.
    """

    def __init__(
        self,
        records: Sequence[Measurement],
        gpu: Gpu,
        *,
        leave_out: Collection[str] = (),
        shapes: Sequence[ModelShape] = (),
    ) -> None:
        self.gpu = gpu
        self._shapes = {shape.name: shape for shape in shapes}
        counted = [row for row in records if row.case.get("model") not in leave_out]
        self.records = newest(counted)
        self.speeds = Speeds(self.records, gpu)
        self._of_gpu = [row for row in self.records if row.machine.gpu == gpu.name]
        self._samples: list[_Sample] | None = None

    def decode(
        self, model: ModelShape, plan: DecoderPlan, *, context: int, batch: int
    ) -> Prediction:
        """One token of each of `batch` sequences."""
        assert model.decoder is not None
        found = cost.decode_cost(model.decoder, self.speeds, plan, context=context, batch=batch)
        return self._corrected(found, model.name, "itl", plan, context, batch)

    def prefill(self, model: ModelShape, plan: DecoderPlan, num_tokens: int) -> Prediction:
        """The first token of a prompt."""
        assert model.decoder is not None
        found = cost.prefill_cost(model.decoder, self.speeds, plan, num_tokens=num_tokens)
        host_ms = len(model.decoder.layers) * self.host_ms_per_layer()
        if found.total_ms < host_ms:
            return Prediction(found, host_ms / found.total_ms, is_host_bound=True)
        return self._corrected(found, model.name, "ttft", plan, num_tokens, 1)

    def duration_s(
        self,
        model: ModelShape,
        plan: DecoderPlan,
        *,
        context: int,
        output_len: int,
        batch: int,
        num_requests: int,
    ) -> float:
        """Seconds of so many requests, `batch` at a time: prompts, and then tokens together."""
        prompt_ms = self.prefill(model, plan, context).ms
        middle = context + output_len // 2
        token_ms = self.decode(model, plan, context=middle, batch=batch).ms
        return num_requests * (prompt_ms + output_len * token_ms / batch) / 1e3

    def tower(
        self, model: ModelShape, recipe: str, *, size: tuple[int, int], num_images: int
    ) -> Prediction:
        """Images through the vision tower."""
        assert model.tower is not None
        found = cost.tower_cost(model.tower, self.speeds, recipe, size=size, num_images=num_images)
        patches = num_images * model.tower.num_patches(*size)
        own = [
            row.values["median_ms"]
            for row in self._of_gpu
            if row.op == "encoder"
            and row.case["model"] == model.name
            and row.case["recipe"] == recipe
            and row.values.get("tokens") == patches
        ]
        if not own:
            return Prediction(found)
        return Prediction(found, min(own) / found.total_ms, (model.name,))

    def step(self, model: ModelShape, recipe: str) -> Prediction:
        """One step of a diffusion transformer; recipe: of STEP_RECIPES."""
        if recipe not in STEP_RECIPES:
            raise ConfigError(f"expected a recipe of {', '.join(STEP_RECIPES)}; got {recipe!r}")
        assert model.step is not None
        is_linear, is_fp8 = STEP_RECIPES[recipe]
        found = cost.step_cost(model.step, self.speeds, is_linear_fp8=is_linear, is_fp8=is_fp8)
        # Another model's share of attention may be quite different: its records say little.
        rows = [
            one
            for one in self._all_samples()
            if one.kind == f"step {recipe}" and one.model == model.name
        ]
        return self._scaled(found, model.name, rows, 1, 1)

    def _corrected(
        self, found: Cost, name: str, kind: str, plan: DecoderPlan, length: int, batch: int
    ) -> Prediction:
        # Each model by its own nearest plan, so that two plans are corrected by the same models:
        # one without windows has no record of skipped ones, and says of both what it is without.
        by_model: dict[str, list[_Sample]] = {}
        for one in self._all_samples():
            if one.kind == kind and _distance(one, length, batch) <= 2 * math.log(REACH):
                by_model.setdefault(one.model, []).append(one)
        rows = [one for rows in by_model.values() for one in _nearest_plan(rows, plan)]
        return self._scaled(found, name, rows, length, batch)

    @staticmethod
    def _scaled(
        found: Cost, name: str, rows: Sequence[_Sample], length: int, batch: int
    ) -> Prediction:
        """By the nearest sample of the model itself, else of every other model that has one."""
        own = [one for one in rows if one.model == name]
        nearest: dict[str, _Sample] = {}
        for one in own or rows:
            best = nearest.setdefault(one.model, one)
            if _distance(one, length, batch) < _distance(best, length, batch):
                nearest[one.model] = one
        if not nearest:
            return Prediction(found)
        ratio = statistics.geometric_mean(one.ratio for one in nearest.values())
        return Prediction(found, ratio, tuple(sorted(nearest)))

    def host_ms_per_layer(self) -> float:
        """The longest that a layer of a prompt took when prompts were short, in any record."""
        # Of one prompt: several at once are no short ones, and keep the GPU busy.
        rows = [
            row
            for row in self._of_gpu
            if row.op == "latency" and row.case.get("batch_size", 1) == 1
        ]
        shortest = min((int(row.case["input_len"]) for row in rows), default=0)
        found = [
            row.values["median_ttft_ms"] / float(row.case["layers"])
            for row in rows
            if row.case["input_len"] == shortest and "layers" in row.case and shortest <= 1024
        ]
        return max(found, default=HOST_MS_PER_LAYER)

    def has_record(self, plan: DecoderPlan) -> bool:
        """Whether any model was measured with linear layers and cache as in this plan."""
        kin = {str(replace(plan, skips_windows=skips)) for skips in (False, True)}
        return any(one.kind == "itl" and one.plan in kin for one in self._all_samples())

    def _all_samples(self) -> list[_Sample]:
        if self._samples is None:
            self._samples = [
                one
                for row in self._of_gpu
                if (make := _SAMPLERS.get(row.op)) is not None
                for one in make(row, self._shapes, self.speeds, self.host_ms_per_layer())
            ]
        return self._samples


# What tells one measurement of a whole model from another; the rest may change from run to run.
_CASE = (
    *("model", "row", "input_len", "output_len", "batch_size", "num_prompts", "max_concurrency"),
    *("resolution", "images", "recipe", "graphs", "compiled", "layers", "context", "batch"),
)


def newest(records: Sequence[Measurement]) -> list[Measurement]:
    """The newest record of each measurement of a whole model; all records of kernels."""
    found: dict[object, Measurement] = {}
    for index, row in enumerate(records):
        case = tuple(row.case.get(name) for name in _CASE)
        key: object = (row.op, row.impl, row.machine.gpu, case) if "model" in row.case else index
        if key not in found or row.date >= found[key].date:
            found[key] = row
    return list(found.values())


def plan_of(row: Measurement) -> DecoderPlan:
    """How the engine ran in a record of latency or throughput."""
    impl = row.case.get("prefill_impl")
    return DecoderPlan(
        row.case.get("kv_cache_dtype") != "auto",
        "skip_layers" in row.case,
        "linear" in row.case,
        None if impl is None else str(impl),
    )


@cache
def shape_of(name: str) -> ModelShape | None:
    """The shape of a model that records name, if it is known here."""
    try:
        return named_model(name)
    except ConfigError:
        return None


@cache
def shape_of_step(name: str, num_layers: tuple[int, ...]) -> ModelShape:
    """A diffusion transformer with so many blocks of each kind; () is all."""
    from octavo.integrations.diffusers.step_work import named_step

    return ModelShape(name, step=named_step(name, num_layers))


def step_shape(row: Measurement) -> ModelShape | None:
    """The shape that a record of a step is of."""
    name, layers = str(row.case["model"]), row.case.get("layers", "all")
    if shape_of(name) is None:
        return None
    return shape_of_step(name, tuple(map(int, re.findall(r"[0-9]+", str(layers)))))


def _latency_samples(
    row: Measurement, shapes: Shapes, speeds: Speeds, host_ms_per_layer: float
) -> list[_Sample]:
    name = str(row.case["model"])
    model = shapes[name] if name in shapes else shape_of(name)
    if model is None or model.decoder is None or not is_whole(row, model):
        return []
    plan, length = plan_of(row), int(row.case["input_len"])
    batch = int(row.case.get("batch_size") or row.case.get("max_concurrency") or 1)
    middle = length + int(row.case["output_len"]) // 2
    token = cost.decode_cost(model.decoder, speeds, plan, context=middle, batch=batch)
    of_token = row.values["median_itl_ms"] / token.total_ms
    samples = [_Sample(model.name, "itl", str(plan), length, batch, of_token)]
    if row.op == "latency" and batch == 1:
        prompt = cost.prefill_cost(model.decoder, speeds, plan, num_tokens=length)
        of_prompt = row.values["median_ttft_ms"] / prompt.total_ms
        # Where the host decides, a prompt's time says nothing of the GPU.
        if prompt.total_ms >= host_ms_per_layer * len(model.decoder.layers):
            is_peer = plan.prefill_impl is not None
            samples.append(_Sample(model.name, "ttft", str(plan), length, 1, of_prompt, is_peer))
    return samples


def is_whole(row: Measurement, model: ModelShape) -> bool:
    """Whether a record is of all layers of a model, quantized in a way that plans know.

    Scales of each token in a cache, and linear layers with activations in BF16, are others.
    """
    assert model.decoder is not None
    return (
        row.case.get("layers", len(model.decoder.layers)) == len(model.decoder.layers)
        and row.case.get("granularity") != "token"
        and "activation token" in str(row.case.get("linear", "activation token"))
    )


def _step_samples(
    row: Measurement, shapes: Shapes, speeds: Speeds, host_ms_per_layer: float
) -> list[_Sample]:
    recipe, model = str(row.case["recipe"]), step_shape(row)
    if recipe not in STEP_RECIPES or model is None or not row.case.get("graphs"):
        return []
    assert model.step is not None
    is_linear, is_fp8 = STEP_RECIPES[recipe]
    found = cost.step_cost(model.step, speeds, is_linear_fp8=is_linear, is_fp8=is_fp8)
    ratio = row.values["median_ms"] / found.total_ms
    return [_Sample(model.name, f"step {recipe}", recipe, 1, 1, ratio)]


_SAMPLERS: dict[str, Callable[[Measurement, Shapes, Speeds, float], list[_Sample]]] = {
    "latency": _latency_samples,
    "throughput": _latency_samples,
    "diffusion_step": _step_samples,
}


def _distance(sample: _Sample, length: int, batch: int) -> float:
    # A batch of another size is another regime sooner than a context of another length.
    of_batch = abs(math.log(sample.batch / batch))
    return 2 * of_batch + abs(math.log(sample.length / length))


def _nearest_plan(rows: Sequence[_Sample], plan: DecoderPlan) -> list[_Sample]:
    """Those of the same plan, else of one that differs in less and less that matters."""
    kin = [
        plan,
        replace(plan, skips_windows=False),
        replace(plan, skips_windows=plan.is_kv_fp8),
        replace(plan, is_linear_fp8=False),
        replace(plan, is_linear_fp8=False, skips_windows=False),
        DecoderPlan(),
    ]
    for one in kin:
        found = [row for row in rows if row.plan == str(one)]
        if found:
            alike = [row for row in found if row.is_peer == (plan.prefill_impl is not None)]
            return alike or found
    return []
