"""Predicted times of whole models: the cost model, and what records of whole models add to it.

Other models' records say how much longer than the sum of its parts a whole takes (power limits, the
engine between kernels); a model's own records say it best, unless they are left out.
"""

import math
import re
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from octavo.errors import ConfigError
from octavo.measure.advise.cost import (
    Cost,
    DecoderPlan,
    decode_cost,
    prefill_cost,
    step_cost,
    tower_cost,
)
from octavo.measure.advise.gpus import Gpu
from octavo.measure.advise.shape import ModelShape, Workload, named_model
from octavo.measure.advise.speeds import Speeds
from octavo.measure.records import Measurement
from octavo.measure.report import tables

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
class _Sample:
    """A whole that was measured, as a ratio to the sum of its parts."""

    model: str
    kind: str  # itl, ttft, or the recipe of a step
    ratio: float
    plan: DecoderPlan = DecoderPlan()
    length: int = 1
    batch: int = 1

    def distance(self, length: int, batch: int) -> float:
        """How far another length and batch are."""
        # A batch of another size is another regime sooner than a context of another length.
        return 2 * abs(math.log(self.batch / batch)) + abs(math.log(self.length / length))


class Predictor:
    """Predicts times on a GPU.

    leave_out: models whose own records do not count. shapes: of models that records name and that
    have no name of `shape.known_models`.
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
        self.records = newest([row for row in records if row.case.get("model") not in leave_out])
        self.speeds = Speeds(self.records, gpu)
        self._of_gpu = [row for row in self.records if row.machine.gpu == gpu.name]

    def decode(self, model: ModelShape, plan: DecoderPlan, *, context: int, batch: int) -> Cost:
        """One token of each of `batch` sequences."""
        assert model.decoder is not None
        found = decode_cost(model.decoder, self.speeds, plan, context=context, batch=batch)
        return self._corrected(found, model.name, "itl", plan, context, batch)

    def prefill(self, model: ModelShape, plan: DecoderPlan, num_tokens: int) -> Cost:
        """The first token of a prompt."""
        assert model.decoder is not None
        found = prefill_cost(model.decoder, self.speeds, plan, num_tokens=num_tokens)
        host_ms = len(model.decoder.layers) * self.host_ms_per_layer
        if found.total_ms < host_ms:
            return replace(found, factor=host_ms / found.total_ms, is_host_bound=True)
        return self._corrected(found, model.name, "ttft", plan, num_tokens, 1)

    def token(self, model: ModelShape, plan: DecoderPlan, load: Workload) -> Cost:
        """A token of each sequence of a workload, in the middle of the answers."""
        return self.decode(model, plan, context=load.middle, batch=load.concurrency)

    def requests(
        self, model: ModelShape, plan: DecoderPlan, load: Workload, num_requests: int | None = None
    ) -> Cost:
        """All requests, as many at a time as the workload has: prompts, then tokens together."""
        number = num_requests or load.concurrency
        prompt_ms = self.prefill(model, plan, load.context).ms
        tokens_ms = load.output_len * self.token(model, plan, load).ms / load.concurrency
        return Cost({"prompts": number * prompt_ms, "tokens": number * tokens_ms})

    def tower(
        self, model: ModelShape, recipe: str, *, size: tuple[int, int], num_images: int
    ) -> Cost:
        """Images through the vision tower."""
        assert model.tower is not None
        found = tower_cost(model.tower, self.speeds, recipe, size=size, num_images=num_images)
        patches = num_images * model.tower.num_patches(*size)
        wanted = ("encoder", model.name, recipe, patches)
        names = ("op", "model", "recipe", "tokens")
        own = [row for row in self._of_gpu if tuple(map(row.get, names)) == wanted]
        if not own:
            return found
        own_ms = min(row.values["median_ms"] for row in own)
        return replace(found, factor=own_ms / found.total_ms, based_on=(model.name,))

    def step(self, model: ModelShape, recipe: str) -> Cost:
        """One step of a diffusion transformer; recipe: of STEP_RECIPES."""
        if recipe not in STEP_RECIPES:
            raise ConfigError(f"expected a recipe of {', '.join(STEP_RECIPES)}; got {recipe!r}")
        # Another model's share of attention may be quite different: its records say little.
        kind = f"step {recipe}", model.name
        own = [one for one in self._samples if (one.kind, one.model) == kind]
        return _scaled(self._step_cost(model, recipe), own, 1, 1)

    def _step_cost(self, model: ModelShape, recipe: str) -> Cost:
        assert model.step is not None
        return step_cost(model.step, self.speeds, *STEP_RECIPES[recipe])

    def _corrected(
        self, found: Cost, name: str, kind: str, plan: DecoderPlan, length: int, batch: int
    ) -> Cost:
        """By samples of the model itself, else of all others, that are near enough."""
        # Each model by its own nearest plan, so that two plans are corrected by the same models:
        # one without windows has no record of skipped ones, and says of both what it is without.
        by_model: dict[str, list[_Sample]] = {}
        for one in self._samples:
            if one.kind == kind and one.distance(length, batch) <= 2 * math.log(REACH):
                by_model.setdefault(one.model, []).append(one)
        nearest = {model: _nearest_plan(rows, plan) for model, rows in by_model.items()}
        rows = nearest.get(name) or [one for rows in nearest.values() for one in rows]
        return _scaled(found, rows, length, batch)

    @cached_property
    def host_ms_per_layer(self) -> float:
        """The longest that a layer of a prompt took when prompts were short, in any record."""
        latency = [row for row in self._of_gpu if row.op == "latency"]
        # Of one prompt: several at once are no short ones, and keep the GPU busy.
        rows = [row for row in latency if row.case.get("batch_size", 1) == 1]
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
        return any(one.kind == "itl" and str(one.plan) in kin for one in self._samples)

    @cached_property
    def _samples(self) -> list[_Sample]:
        """All whole models that were measured on this GPU."""
        makers = dict.fromkeys(("latency", "throughput"), self._decoder_samples)
        makers["diffusion_step"] = self._step_samples
        return [one for row in self._of_gpu if row.op in makers for one in makers[row.op](row)]

    def _decoder_samples(self, row: Measurement) -> Iterator[_Sample]:
        name = str(row.case["model"])
        model = self._shapes.get(name) or shape_of(name)
        if model is None or model.decoder is None or not is_whole(row, model):
            return
        plan, load = plan_of(row), load_of(row)
        length, batch = load.context, load.concurrency
        token = decode_cost(model.decoder, self.speeds, plan, context=load.middle, batch=batch)
        ratio = row.values["median_itl_ms"] / token.ms
        # A token's time does not depend on who attends to prompts.
        yield _Sample(model.name, "itl", ratio, replace(plan, prefill_impl=None), length, batch)
        if row.op != "latency" or batch > 1:
            return
        prompt_ms = prefill_cost(model.decoder, self.speeds, plan, num_tokens=length).ms
        # Where the host decides, a prompt's time says nothing of the GPU.
        if prompt_ms >= self.host_ms_per_layer * len(model.decoder.layers):
            ratio = row.values["median_ttft_ms"] / prompt_ms
            yield _Sample(model.name, "ttft", ratio, plan, length)

    def _step_samples(self, row: Measurement) -> Iterator[_Sample]:
        recipe, model = str(row.case["recipe"]), step_shape(row)
        if recipe in STEP_RECIPES and model is not None and row.case.get("graphs"):
            ratio = row.values["median_ms"] / self._step_cost(model, recipe).ms
            yield _Sample(model.name, f"step {recipe}", ratio)


def _scaled(found: Cost, rows: Sequence[_Sample], length: int, batch: int) -> Cost:
    """A cost times the mean ratio of the nearest sample of each model."""
    by_distance = sorted(rows, key=lambda one: one.distance(length, batch))
    nearest = {one.model: one for one in reversed(by_distance)}
    if not nearest:
        return found
    ratio = statistics.geometric_mean(one.ratio for one in nearest.values())
    return replace(found, factor=ratio, based_on=tuple(sorted(nearest)))


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

    alike = ([row for row in rows if str(row.plan) == str(one)] for one in kin)
    found = next(filter(None, alike), [])
    is_own = plan.prefill_impl is None
    return [row for row in found if (row.plan.prefill_impl is None) == is_own] or found


# What tells one measurement of a whole model from another; the rest may change from run to run.
_CASE = (
    "op impl model row input_len output_len batch_size num_prompts max_concurrency resolution "
    "images recipe graphs compiled layers context batch"
)


def newest(records: Sequence[Measurement]) -> list[Measurement]:
    """The newest record of each measurement of a whole model; all records of kernels."""
    kernels = [row for row in records if "model" not in row.case]
    models = [row for row in records if "model" in row.case]
    return [*kernels, *tables.newest(models, *_CASE.split())]


def plan_of(row: Measurement) -> DecoderPlan:
    """How the engine ran in a record of latency or throughput."""
    impl = row.case.get("prefill_impl")
    return DecoderPlan(
        row.case.get("kv_cache_dtype") != "auto",
        "skip_layers" in row.case,
        "linear" in row.case,
        None if impl is None else str(impl),
    )


def load_of(row: Measurement) -> Workload:
    """What the engine did in a record of latency or throughput."""
    sizes = ("batch_size", "max_concurrency", "max_num_seqs")
    batch = next((size for name in sizes if (size := row.case.get(name))), 1)
    context, output_len = int(row.case["input_len"]), int(row.case["output_len"])
    return Workload(context=context, concurrency=int(batch), output_len=output_len)


@cache
def shape_of(name: str) -> ModelShape | None:
    """The shape of a model that records name, if it is known here."""
    try:
        return named_model(name)
    except ConfigError:
        return None


def step_shape(row: Measurement) -> ModelShape | None:
    """The shape that a record of a step is of."""
    name = str(row.case["model"])
    return None if shape_of(name) is None else _step_of(name, str(row.case.get("layers", "all")))


@cache
def _step_of(name: str, layers: str) -> ModelShape:
    from octavo.integrations.diffusers.full_size import named_step

    num_layers = tuple(map(int, re.findall(r"[0-9]+", layers)))  # of each kind; () is all
    return ModelShape(name, step=named_step(name, num_layers))


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
