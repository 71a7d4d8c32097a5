"""octavo advise: from a model's config, a GPU and stored records to a recipe with reasons.

Each part of a model is decided by itself: a language model's cache and linear layers, the attention
of a vision tower, and linear layers and attention of a diffusion transformer.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.measure.advise.advice import (
    Advice,
    Expectation,
    MemoryRow,
    decoder_warnings,
    record_warnings,
    step_warnings,
    tower_warnings,
)
from octavo.measure.advise.cost import DecoderPlan
from octavo.measure.advise.gpus import Gpu
from octavo.measure.advise.memory import cache_memory
from octavo.measure.advise.predict import STEP_RECIPES, Predictor
from octavo.measure.advise.shape import ModelShape, Workload
from octavo.measure.records import Measurement
from octavo.recipe import KvCacheSettings

if TYPE_CHECKING:
    from octavo.integrations.transformers.model_work import DecoderWork


# A recipe that quantizes more must be faster by this share; less is noise between machines.
MIN_GAIN = 0.01
# Share of a GPU's memory for weights and cache, as `octavo serve` has it.
MEMORY_SHARE = 0.9
SLIDING = "sliding_window"
# BF16 with the fastest attention of prompts that records have.
BASELINE = DecoderPlan(prefill_impl="fastest")
_Choice = TypeVar("_Choice")


def choose_decoder(advice: Advice, predictor: Predictor) -> None:
    """The plan that serves the workload fastest, and quantizes no more than that takes."""
    model, load = advice.model, advice.workload
    asked = _Decoder(predictor, model, load)
    plans = [BASELINE, *asked.candidates()]
    times = {plan: predictor.requests(model, plan, load).ms for plan in plans}
    with_cache = {plan: ms for plan, ms in times.items() if plan.is_kv_fp8}
    chosen = _least_changed(times)
    advice.reasons += asked.kv_reasons(plans, chosen)
    has_room = asked.num_fitting(DecoderPlan()) >= load.concurrency
    if not has_room and not chosen.is_kv_fp8 and with_cache:
        chosen = _least_changed(with_cache)
        advice.reasons.append(
            f"{load.concurrency} sequences of {load.context:,} tokens do not fit in BF16 on "
            f"{advice.gpu.name}: an FP8 cache makes room for twice as many."
        )
    advice.reasons += asked.linear_reasons(chosen)
    advice.fields |= asked.fields(chosen)
    advice.expectations += asked.expectations(chosen)
    advice.memory += asked.memory(chosen)
    advice.warnings += asked.room_warnings(chosen)
    advice.warnings += decoder_warnings(advice, predictor, plans, chosen)


def _least_changed(times: Mapping[_Choice, float]) -> _Choice:
    """The first of those that are as fast as the fastest; they come least changed first."""
    best = min(times.values())
    return next(choice for choice, ms in times.items() if ms <= best * (1 + MIN_GAIN))


@dataclass(frozen=True)
class _Decoder:
    """A language model under a workload: what plans take there, and what speaks for them."""

    predictor: Predictor
    model: ModelShape
    workload: Workload

    @property
    def work(self) -> "DecoderWork":
        assert self.model.decoder is not None
        return self.model.decoder

    def candidates(self) -> Iterator[DecoderPlan]:
        """Everything beside BF16 that octavo has kernels for on this GPU, least changed first."""
        speeds = self.predictor.speeds
        if not speeds.gpu.has_fp8:
            return
        writes = {"append_kv": "BF16 to FP8", "decode_attention": "BF16 to FP8"}
        has_kernels = speeds.has_kernels(self.work.head_dim, **writes, prefill_attention="FP8")
        caches = [(False, False)]
        if self.model.uncached is None and has_kernels:
            caches += [(True, True)] * bool(self.work.windows) + [(True, False)]
        for is_linear in (False, True) if _has_plain_linear(self.model) else (False,):
            for is_kv, skips in caches:
                if is_kv or is_linear:
                    yield DecoderPlan(is_kv, skips, is_linear, "fastest")

    def fields(self, plan: DecoderPlan) -> dict[str, Any]:
        """Those of the recipe that a plan is."""
        fields: dict[str, Any] = {}
        if plan.is_kv_fp8:
            fields["kv_cache"] = "fp8"
        if plan.skips_windows:
            fields["skip_layers"] = [SLIDING]
        if plan.is_linear_fp8:
            fields["linear"] = "fp8"
            if self.work.other_parts:
                fields["ignored_layers"] = list(self.work.other_parts)
        return fields

    def expectations(self, chosen: DecoderPlan) -> Iterator[Expectation]:
        """Times of a token, a prompt and the whole workload."""
        load, plans, predictor = self.workload, (BASELINE, chosen), self.predictor
        at = f"{load.concurrency} × {load.context:,} tokens"
        tokens = (predictor.token(self.model, plan, load) for plan in plans)
        yield Expectation(f"a token (ITL), {at}", *tokens)
        prompts = (predictor.prefill(self.model, plan, load.context) for plan in plans)
        yield Expectation(f"a prompt (TTFT), {load.context:,} tokens", *prompts)
        requests = (predictor.requests(self.model, plan, load) for plan in plans)
        what = f"{load.concurrency} × ({load.context:,} + {load.output_len:,}) tokens"
        yield Expectation(f"all of {what}", *requests, has_parts=False)

    def cache_bytes(self, plan: DecoderPlan) -> int:
        """Of one sequence."""
        settings = KvCacheSettings(scaling="unit") if plan.is_kv_fp8 else None
        skips = [SLIDING] if plan.skips_windows else []
        return cache_memory(self.work.layers, self.workload.length, settings, skips).sequence

    def weight_bytes(self, plan: DecoderPlan) -> int:
        """Of the language model and the vision tower."""
        of_tower = 0 if self.model.tower is None else self.model.tower.weight_bytes
        work = self.work
        return of_tower + (work.fp8_weight_bytes if plan.is_linear_fp8 else work.weight_bytes)

    def num_fitting(self, plan: DecoderPlan) -> int:
        """How many sequences fit beside the weights."""
        free = int(MEMORY_SHARE * self.predictor.gpu.memory_bytes) - self.weight_bytes(plan)
        return max(0, free) // self.cache_bytes(plan)

    def room_warnings(self, chosen: DecoderPlan) -> Iterator[str]:
        """Whether the workload fits with what was chosen; times are those of one that does."""
        number, gpu = self.num_fitting(chosen), self.predictor.gpu.name
        if number == 0:
            yield f"The weights and one sequence do not fit on one {gpu}: times are as if they did."
        elif number < self.workload.concurrency:
            yield (
                f"{number:,} of {self.workload.concurrency:,} sequences fit on one {gpu}, the "
                "others wait: times are as if all of them did."
            )

    def memory(self, chosen: DecoderPlan) -> Iterator[MemoryRow]:
        """Bytes of weights and cache, and how many sequences fit."""
        share = f"{100 * MEMORY_SHARE:.0f} % of {self.predictor.gpu.memory_bytes / 1e9:.0f} GB"
        sizes = (
            ("weights", self.weight_bytes, True),
            (f"KV cache of a sequence of {self.workload.length:,} tokens", self.cache_bytes, True),
            (f"such sequences that fit in {share}", self.num_fitting, False),
        )
        for what, of, is_bytes in sizes:
            yield MemoryRow(what, of(DecoderPlan()), of(chosen), is_bytes)

    def kv_reasons(self, plans: Sequence[DecoderPlan], chosen: DecoderPlan) -> Iterator[str]:
        """Why the cache is in FP8, or not."""
        load = self.workload
        share = self.predictor.token(self.model, plans[0], load).percent("keys and values")
        text = (
            f"Reading keys and values is {share} of a token's time in BF16 at "
            f"{load.concurrency} × {load.context:,} tokens"
        )
        if self.model.uncached is not None:
            yield f"{text}; octavo has no FP8 cache for the model: {self.model.uncached}."
        elif not any(plan.is_kv_fp8 for plan in plans):
            yield f"{text}; octavo has no FP8 cache for {self.predictor.gpu.name}."
        elif not chosen.is_kv_fp8:
            yield f"{text}: an FP8 cache would gain less than {100 * MIN_GAIN:.0f} % here."
        else:
            yield f"{text}; FP8 reads half of the bytes."
        if chosen.skips_windows:
            windows = " and ".join(map(str, self.work.windows))
            yield (
                f"Layers with a window of {windows} tokens are skipped: what they read does not "
                "grow with the context, FP8 gains nothing there, and BF16 keeps them exact."
            )

    def linear_reasons(self, chosen: DecoderPlan) -> Iterator[str]:
        """Why linear layers are in FP8, or not."""
        before, after = self.work.weight_bytes / 1e9, self.work.fp8_weight_bytes / 1e9
        if not self.predictor.gpu.has_fp8:
            yield _without_fp8(self.predictor)
        elif not _has_plain_linear(self.model):
            yield f"Linear layers stay as the checkpoint has them: {self.model.quantized}."
        elif not chosen.is_linear_fp8:
            yield "FP8 linear layers would gain less than 1 % here."
        else:
            yield (
                f"Linear layers in FP8: the weights take {after:.1f} GB in place of {before:.1f} "
                "GB, which tokens read, and prompts multiply at twice BF16's peak. The output head "
                "stays in BF16."
            )
            if self.work.experts is not None:
                yield "Experts in one tensor are not plain linear layers: they stay in BF16."


def _has_plain_linear(model: ModelShape) -> bool:
    """Whether a checkpoint has linear layers for FP8; MXFP4 ones have them beside experts."""
    return model.quantized in (None, "mxfp4")


def choose_other(advice: Advice, predictor: Predictor) -> None:
    """Linear layers alone, of a language model whose times octavo cannot compute."""
    assert (work := advice.model.other) is not None
    has_linear = work.fp8_weight_bytes < work.weight_bytes and _has_plain_linear(advice.model)
    is_fp8 = has_linear and predictor.gpu.has_fp8
    advice.reasons.append(
        f"Times are not predicted, and the cache stays as it is: {work.uncached}."
    )
    if is_fp8:
        advice.fields["linear"] = "fp8"
        advice.reasons.append("Linear layers in FP8 take half of their memory, which tokens read.")
    elif has_linear:
        advice.reasons.append(_without_fp8(predictor))
    after = work.fp8_weight_bytes if is_fp8 else work.weight_bytes
    advice.memory.append(MemoryRow("weights", work.weight_bytes, after))


def _without_fp8(predictor: Predictor) -> str:
    return f"{predictor.gpu.name} has no FP8 (compute capability 8.9 or newer has)."


def choose_tower(advice: Advice, predictor: Predictor) -> None:
    """Attention of a vision tower in FP8, or in BF16 by octavo's fused path."""
    model, workload = advice.model, advice.workload
    assert model.tower is not None
    case: dict[str, Any] = {"size": workload.image_size, "num_images": workload.num_images}
    names = ["bf16", "fused-bf16"]
    ops = {"quantize_qkv": "BF16 to FP8", "attention": "FP8"}
    if predictor.gpu.has_fp8 and predictor.speeds.has_kernels(model.tower.head_dim, **ops):
        names += ["dynamic", "static"]
    found = {name: predictor.tower(model, name, **case) for name in names}
    times = {name: one.ms for name, one in found.items()}
    best = min(times.values())
    is_fp8 = min(times["bf16"], times["fused-bf16"]) > best * (1 + MIN_GAIN)
    chosen = "dynamic" if is_fp8 else "fused-bf16"
    height, width = workload.image_size
    what = f"the vision tower, {workload.num_images} × {width} x {height}"
    why = "FP8 attention would gain less than 1 % over that path in BF16."
    if is_fp8:
        gain = times["fused-bf16"] / times["dynamic"]
        why = f"FP8 itself makes the tower {gain:.2f} times as fast as that path in BF16."
    elif "dynamic" not in times:
        why = f"octavo has no FP8 attention for {predictor.gpu.name}."
    advice.reasons += (
        f"Attention is {found['bf16'].percent('attention')} of the vision tower's time in BF16; "
        "octavo's path splits, rotates and casts q, k and v in one pass.",
        why,
    )
    host_ms = model.tower.depth * predictor.host_ms_per_layer
    advice.fields["vision_attention"] = "fp8" if is_fp8 else "bf16"
    advice.expectations.append(Expectation(what, found["bf16"], found[chosen]))
    advice.warnings += tower_warnings(is_fp8, times, host_ms)


def choose_step(advice: Advice, predictor: Predictor) -> None:
    """Linear layers and attention of a diffusion transformer."""
    assert (work := advice.model.step) is not None
    names = list(STEP_RECIPES) if predictor.gpu.has_fp8 else ["bf16"]
    found = {name: predictor.step(advice.model, name) for name in names}
    chosen = _least_changed({name: one.ms for name, one in found.items()})
    is_linear, is_fp8 = STEP_RECIPES[chosen]
    fields = {name: "fp8" for name, on in (("linear", is_linear), ("attention", is_fp8)) if on}
    linear, attention = map(found["bf16"].percent, ("linear layers", "attention"))
    advice.reasons.append(
        f"Of a step in BF16, linear layers are {linear} and attention {attention} ({work.about})."
    )
    if is_linear:
        kept = ", ".join(dict.fromkeys(why.partition(":")[0] for why in work.kept.values()))
        advice.reasons.append(
            f"Linear layers that stay in BF16 without being asked: {kept} "
            "(docs/reference/diffusion.md says why)."
        )
    if not predictor.gpu.has_fp8:
        advice.reasons.append(_without_fp8(predictor))
    after = work.fp8_weight_bytes if is_linear else work.weight_bytes
    advice.fields |= fields
    advice.expectations.append(Expectation("a step, compiled", found["bf16"], found[chosen]))
    advice.memory.append(MemoryRow("weights of the transformer", work.weight_bytes, after))
    advice.warnings += step_warnings(work, fields)


def advise(
    model: ModelShape,
    gpu: Gpu,
    workload: Workload,
    records: Sequence[Measurement] = (),
    *,
    leave_out: Collection[str] = (),
    served: str = "MODEL",
) -> Advice:
    """What to quantize in a model on a GPU for a workload.

    records: of kernels and of whole models, on any GPU. leave_out: names of models whose records
    do not count. served: what the model is called in commands.
    """
    predictor = Predictor(records, gpu, leave_out=leave_out, shapes=[model])
    choices = (
        (model.decoder, choose_decoder),
        (model.tower, choose_tower),
        (model.step, choose_step),
        (model.other, choose_other),
    )
    advice = Advice(model, gpu, workload, served)
    advice.warnings += [text for text in (model.note, gpu.caution) if text is not None]
    for has, choose in choices:
        if has is not None:
            choose(advice, predictor)
    advice.warnings += record_warnings(advice, predictor)
    return advice
