"""Advice as data and as text: a recipe, what to expect of it, why, and what may go wrong."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.measure.advise.cost import Cost, DecoderPlan
from octavo.measure.advise.gpus import Gpu
from octavo.measure.advise.predict import Predictor
from octavo.measure.advise.shape import ModelShape, Workload
from octavo.measure.report.tables import Table
from octavo.recipe import Bf16Settings, Recipe

if TYPE_CHECKING:
    from octavo.integrations.diffusers.full_size import StepWork

# A prompt's attention at this head_dim and above has no kernel with a producer warp of its own.
LARGE_HEAD_DIM = 256
# A window up to this size reads too little for FP8 to matter.
SMALL_WINDOW = 4096
MIN_RECOVERY_PERCENT = 95.0
MAX_CONTEXT = 2**20
# Share of a transformer's weights from which on those of modulation are worth a word.
MIN_MODULATION = 0.05


@dataclass(frozen=True)
class Expectation:
    """A time in BF16 and with the recipe; has_parts: whether its parts are worth a line."""

    what: str
    before: Cost
    after: Cost
    has_parts: bool = field(default=True, kw_only=True)

    @property
    def note(self) -> str:
        """Why there is no speed-up to be said; "" where there is one."""
        is_bound = self.before.is_host_bound or self.after.is_host_bound
        return "launches on the host take longer than the GPU: FP8 does not help" * is_bound

    @property
    def speedup(self) -> float | None:
        """How many times as fast; None if a note says why not."""
        return None if self.note else self.before.ms / self.after.ms

    @property
    def based_on(self) -> list[str]:
        """The models whose records both were corrected by."""
        return sorted({*self.before.based_on, *self.after.based_on})

    @property
    def parts(self) -> tuple[dict[str, float], ...]:
        """The milliseconds of both by part."""
        has_parts = self.has_parts and not self.note
        return tuple(one.parts_ms if has_parts else {} for one in (self.before, self.after))


@dataclass(frozen=True)
class MemoryRow:
    """Bytes, or sequences that fit, in BF16 and with the recipe."""

    what: str
    before: int
    after: int
    is_bytes: bool = True


@dataclass
class Advice:
    """What to quantize in a model on a GPU for a workload; each part of the model adds to it.

    served: the model's name in commands. fields: those of the recipe.
    """

    model: ModelShape
    gpu: Gpu
    workload: Workload
    served: str
    fields: dict[str, Any] = field(default_factory=dict)
    expectations: list[Expectation] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        """What is quantized, and how."""
        return Recipe(**self.fields)

    @property
    def command(self) -> str | None:
        """The command that serves the model with this recipe; of videos, the one that makes one.

        None if octavo has no such command for the model.
        """
        is_omni = self.model.step is not None
        if self.model.refused is None:
            return serve_command(self.served, self.recipe, is_omni=is_omni)
        if not is_omni:
            return None
        words = ["octavo", "image", "--model", self.served, "--prompt", "PROMPT"]
        return shlex.join([*words, *_flags(self.recipe)])

    def to_json(self) -> str:
        """All of it as one JSON object."""
        document = {
            "model": self.model.name,
            "parts": self.model.parts,
            "gpu": self.gpu.key,
            "workload": asdict(self.workload),
            "recipe": json.loads(self.recipe.to_json()),
            "command": self.command,
            "refused": self.model.refused,
            "expectations": [
                {
                    "what": one.what,
                    "before_ms": one.before.ms,
                    "after_ms": one.after.ms,
                    "before": one.parts[0],
                    "after": one.parts[1],
                    "based_on": one.based_on,
                    "note": one.note,
                    "speedup": one.speedup,
                }
                for one in self.expectations
            ],
            "memory": [asdict(row) for row in self.memory],
            "reasons": self.reasons,
            "warnings": self.warnings,
        }
        return json.dumps(document, indent=2)


def serve_command(model: str, recipe: Recipe, *, is_omni: bool = False) -> str:
    """`octavo serve` with the flags that fill this recipe, or with its file where none would."""
    words = ["octavo", "serve", model, *(["--omni"] if is_omni else [])]
    if isinstance(recipe.vision_attention, Bf16Settings):
        return shlex.join([*words, "--recipe", "recipe.toml"])
    return shlex.join([*words, *_flags(recipe)])


def _flags(recipe: Recipe) -> Iterator[str]:
    """The flags that fill a recipe."""
    flags = (
        (recipe.kv_cache, "--kv-cache-dtype", recipe.skip_layers),
        (recipe.vision_attention, "--mm-encoder-attn-dtype", ()),
        (recipe.linear, "--quantization", recipe.ignored_layers),
        (recipe.attention, "--attention", ()),
    )
    of_patterns = {"--quantization": "--ignored-layers"}
    for settings, flag, patterns in flags:
        if settings is not None:
            yield from (flag, "fp8")
            for pattern in patterns:
                yield from (of_patterns.get(flag, f"{flag}-skip-layers"), pattern)


def _ms(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _tables(advice: Advice) -> Iterator[Table]:
    """Times and memory, before and after."""
    if advice.expectations:
        predicted = " (predicted: octavo was never run on this GPU)" if advice.gpu.caution else ""
        yield Table(
            caption=f"What to expect, in milliseconds{predicted}",
            header=("what", "BF16", "recipe", "speed-up"),
            rows=tuple(
                (one.what, _ms(one.before.ms), _ms(one.after.ms))
                + ("not predicted" if one.speedup is None else f"{one.speedup:.2f}×",)
                for one in advice.expectations
            ),
        )
    if advice.memory:
        rows = []
        for row in advice.memory:
            sizes = (row.before, row.after)
            cells = (f"{n / 1e9:,.2f} GB" if row.is_bytes else f"{n:,}" for n in sizes)
            rows.append((row.what, *cells))
        yield Table(caption="Memory", header=("what", "BF16", "recipe"), rows=tuple(rows))


def _sentences(advice: Advice) -> Iterator[str]:
    """Why, and what to mind, one line each; headings stand alone."""
    yield "Why"
    yield from (f"- {text}" for text in advice.reasons)
    for one in advice.expectations:
        before, after = (
            ", ".join(f"{name} {_ms(ms)}" for name, ms in parts.items()) for parts in one.parts
        )
        if before:
            same = "the same" if before == after else after
            yield f"- {one.what} is {before} ms in BF16, with the recipe {same}."
    yield from (f"- {one.what}: {one.note}." for one in advice.expectations if one.note)
    sources = sorted({name for one in advice.expectations for name in one.based_on})
    if sources:
        yield f"- Times are corrected by records of whole models: {', '.join(sources)}."
    if advice.warnings:
        yield from ("", "Mind", *(f"- {text}" for text in advice.warnings))


def how_to_run(advice: Advice) -> list[str]:
    """The command that serves the model; where octavo cannot, why, and what can."""
    model, command = advice.model, advice.command
    lines = [] if command is None else [command]
    if model.refused is None:
        return lines
    lines.insert(0, f"octavo serve cannot run this model: {model.refused}.")
    if command is not None:
        return lines
    has_images = model.tower is not None or model.unknown_tower is not None
    kind = "AutoModelForImageTextToText" if has_images else "AutoModelForCausalLM"
    lines += [
        "It runs in transformers:",
        f"    model = {kind}.from_pretrained({advice.served!r}, dtype='bfloat16', "
        "device_map='cuda')",
    ]
    if advice.recipe.settings():
        lines.append("    octavo.apply_(model, octavo.Recipe.load('recipe.toml'))")
    return [*lines, f"To serve it, try vLLM: vllm serve {shlex.quote(advice.served)}"]


def recipe_text(advice: Advice) -> str:
    """The recipe as TOML; a comment where it is empty."""
    if not advice.recipe.settings():
        return "# nothing is quantized\n"
    return advice.recipe.to_toml()


def told(advice: Advice) -> Iterator[str | Table]:
    """All of it, as `octavo advise` prints it: lines and tables."""
    load, ceilings = advice.workload, advice.gpu.ceilings
    asked = f"{advice.model.name} ({advice.model.parts}) on {advice.gpu.name}"
    if advice.model.step is None:
        asked += f", {load.concurrency} × {load.context:,} tokens"
    rates = f"{ceilings.gb_per_s:,.0f} GB/s, {ceilings.bf16_tflops:,.0f} TFLOP/s in BF16"
    rates += f" and {ceilings.fp8_tflops:,.0f} in FP8" if ceilings.fp8_tflops else ""
    yield f"{asked}\n{rates}: {ceilings.source}"
    yield from _tables(advice)
    yield from _sentences(advice)
    yield "\nRecipe (recipe.toml)"
    yield recipe_text(advice)
    yield from how_to_run(advice)


def decoder_warnings(
    advice: Advice, predictor: Predictor, plans: Sequence[DecoderPlan], chosen: DecoderPlan
) -> Iterator[str]:
    """Warnings about a language model; plans: all that can run on this GPU, BF16 first."""
    model, workload, first = advice.model, advice.workload, plans[0]
    assert (work := model.decoder) is not None
    if work.max_length is not None and workload.length > work.max_length:
        yield f"The model was made for {work.max_length:,} tokens, fewer than {workload.length:,}."
    if any(plan.is_kv_fp8 for plan in plans):
        yield from _break_even(advice, predictor, first)
    if work.experts is not None:
        yield "Experts are counted as bytes and flops alone: no model with experts has a record."
    if chosen.is_linear_fp8 and not predictor.has_record(chosen):
        yield (
            "No record of a whole model has FP8 linear layers like these: what they gain is what "
            "kernels gain alone. --measure says more."
        )
    if not chosen.is_kv_fp8:
        return
    if work.head_dim >= LARGE_HEAD_DIM:
        before, after = (
            predictor.prefill(model, plan, workload.context).ms
            for plan in (first, DecoderPlan(is_kv_fp8=True))
        )
        yield (
            f"head_dim {work.head_dim}: prompts are attended to by a plain kernel in FP8, expected "
            f"to take {after / before:.2f} of BF16's time. Measure prompts before you serve long "
            "ones (octavo bench latency)."
        )
    small = [window for window in work.windows if window <= SMALL_WINDOW]
    if small and not chosen.skips_windows:
        yield f"Windows of {small[0]} tokens gain nothing from FP8: skip sliding_window."
    if not work.has_qk_norm:
        yield (
            "The model does not normalise queries and keys (no QK norm): some keys may be far "
            "beyond 448, where scales of 1.0 cut them off. octavo doctor MODEL --kv finds them."
        )
    yield (
        "Scales of the cache are the checkpoint's, and 1.0 where it has none: uncalibrated. "
        "octavo calibrate MODEL --kv --data TEXT finds them."
    )


def _break_even(advice: Advice, predictor: Predictor, first: DecoderPlan) -> Iterator[str]:
    """Whether an FP8 cache pays at this context, and from which one on it does."""
    model, workload, batch = advice.model, advice.workload, advice.workload.concurrency
    assert model.decoder is not None
    plans = (first, DecoderPlan(is_kv_fp8=True, skips_windows=bool(model.decoder.windows)))

    def pays(context: int) -> bool:
        before, after = (predictor.decode(model, p, context=context, batch=batch).ms for p in plans)
        return before / after >= 1.01

    if pays(workload.context):
        return
    lengths = (2**power for power in range(8, MAX_CONTEXT.bit_length()))
    context = next(filter(pays, lengths), None)
    if context is None:
        yield "No context is long enough for an FP8 cache to save 1 % of a token's time."
    elif context > workload.context:
        yield (
            f"The context is below break-even: an FP8 cache saves 1 % of a token's time from "
            f"about {context:,} tokens on at {batch} at once. What it saves here is memory."
        )


def tower_warnings(is_fp8: bool, times: Mapping[str, float], host_ms: float) -> Iterator[str]:
    """Warnings about a vision tower; times: by recipe; host_ms: what launching all of it takes."""
    if not is_fp8:
        return
    gain = times["dynamic"] / times["static"]
    yield (
        "Dynamic scales follow the images; static ones need no pass over them, run in CUDA graphs "
        f"and are expected to be {gain:.2f} times as fast. octavo calibrate MODEL --data IMAGES "
        "finds them."
    )
    if times["dynamic"] < host_ms:
        yield (
            f"So few patches are bound by launches on the host (about {host_ms:.0f} ms) unless "
            "they run in CUDA graphs: without them FP8 may be slower than BF16."
        )


def step_warnings(work: "StepWork", fields: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about a diffusion transformer; fields: those of the recipe for it."""
    if not fields:
        return
    yield "Times are those of compiled blocks: without torch.compile, quantizing inputs costs more."
    if "linear" in fields:
        yield (
            "Scales are dynamic here. Static ones need no amax of each token, and in compiled "
            "blocks cost next to nothing: octavo calibrate --pipeline."
        )
        yield from _modulation(work)
    for why in [why for why in work.kept.values() if "vllm-omni" in why][:1]:
        yield f'{why[0].upper()}{why[1:]}; included_layers = ["img_mlp"] quantizes it as well.'
    yield "See what FP8 does to pictures before you serve it: octavo eval images."


def _modulation(work: "StepWork") -> Iterator[str]:
    """Layers that see one token hold weights that FP8 alone would halve."""
    found = [x for x in work.linear if work.kept.get(x.name, "").startswith("modulation")]
    num_bytes = sum(2 * one.num_weights for one in found)
    if num_bytes < MIN_MODULATION * work.weight_bytes:
        return
    names = dict.fromkeys(re.sub(r"^.*?\.[0-9]+\.|(\.[0-9]+)+$", "", one.name) for one in found)
    patterns = ", ".join(f'"{name}"' for name in names)
    yield (
        f"Modulation stays in BF16 and takes {num_bytes / 1e9:.1f} GB: weight_only_layers = "
        f"[{patterns}] in the recipe halves that, and leaves its input as it is."
    )


def record_warnings(advice: Advice, predictor: Predictor) -> Iterator[str]:
    """What stored records say of this model's quality, and how sure the times are."""
    model, speeds = advice.model, predictor.speeds
    if model.unknown_tower is not None:
        yield f"The vision tower stays as it is, its cost is not known: {model.unknown_tower}."
    if model.quantized is not None:
        yield (
            f"The checkpoint is quantized already ({model.quantized}): times and bytes here are of "
            "the same model in BF16."
        )
    if not speeds.has_records:
        yield (
            "No records of kernels were found: times are from stated shares of the GPU's "
            "ceilings. --results FOLDER names records, --measure makes some."
        )
    elif speeds.is_borrowed:
        yield (
            f"There are no records of kernels on {advice.gpu.name}: times take the shares of the "
            f"ceilings that they reach on {speeds.source.name}. octavo bench kernels on one makes "
            "some."
        )
    if not advice.fields:
        return
    rows = [row for row in predictor.records if row.case.get("model") == model.name]
    rated = [row for row in rows if "recovery_percent" in row.values]
    low = [row for row in rated if row.values["recovery_percent"] < MIN_RECOVERY_PERCENT]
    if low:
        worst = min(low, key=lambda row: row.values["recovery_percent"])
        yield (
            f"A record of {worst.op} has a recovery of {worst.values['recovery_percent']:.1f} % "
            f"({worst.case.get('recipe', worst.impl)}), under {MIN_RECOVERY_PERCENT:.0f} %: "
            "calibrate, use a finer granularity, or skip layers."
        )
    elif model.step is None and not rated:
        yield (
            "Quality is not measured for this model: octavo eval says the recovery; under "
            f"{MIN_RECOVERY_PERCENT:.0f} %, calibrate or skip layers."
        )
