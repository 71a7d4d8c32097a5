"""Advice: a recipe, what to expect of it, reasons and warnings; as data, as text, as records."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from octavo.measure.advise.gpus import Gpu
from octavo.measure.advise.shape import Workload
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.measure.report.tables import Table
from octavo.recipe import Bf16Settings, Recipe


@dataclass(frozen=True)
class Expectation:
    """A time in BF16 and with the recipe, in milliseconds.

    before, after: its parts. based_on: models whose records it was corrected by. note: why there is
    no speed-up to be said; "" where there is one.
    """

    what: str
    before_ms: float
    after_ms: float
    before: dict[str, float]
    after: dict[str, float]
    based_on: tuple[str, ...] = ()
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times as fast; None if a note says why not."""
        return None if self.note else self.before_ms / self.after_ms


@dataclass(frozen=True)
class MemoryRow:
    """Bytes, or sequences that fit, in BF16 and with the recipe."""

    what: str
    before: int
    after: int
    is_bytes: bool = True


@dataclass(frozen=True)
class Part:
    """What was decided for one part of a model: fields of a recipe, and why."""

    fields: dict[str, Any]
    expectations: tuple[Expectation, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """What to quantize in a model on a GPU for a workload; served: its name in commands.

    refused: why `octavo serve` does not run the model; None if it does. has_images: whether the
    model has a vision tower.
    """

    model: str
    served: str
    parts: str
    gpu: Gpu
    workload: Workload
    recipe: Recipe
    is_omni: bool
    expectations: tuple[Expectation, ...]
    memory: tuple[MemoryRow, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    refused: str | None = None
    has_images: bool = False

    @property
    def command(self) -> str | None:
        """The command that serves the model with this recipe; of videos, the one that makes one.

        None if octavo has no such command for the model.
        """
        if self.refused is None:
            return serve_command(self.served, self.recipe, is_omni=self.is_omni)
        if not self.is_omni:
            return None
        words = ["octavo", "image", "--model", self.served, "--prompt", "PROMPT"]
        return shlex.join([*words, *_step_flags(self.recipe)])

    def to_json(self) -> str:
        """All of it as one JSON object."""
        expectations = [asdict(e) | {"speedup": e.speedup} for e in self.expectations]
        document = {
            "model": self.model,
            "parts": self.parts,
            "gpu": self.gpu.key,
            "workload": asdict(self.workload),
            "recipe": json.loads(self.recipe.to_json()),
            "command": self.command,
            "refused": self.refused,
            "expectations": expectations,
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
    if recipe.kv_cache is not None:
        words += ["--kv-cache-dtype", "fp8"]
        for pattern in recipe.skip_layers:
            words += ["--kv-cache-dtype-skip-layers", pattern]
    if recipe.vision_attention is not None:
        words += ["--mm-encoder-attn-dtype", "fp8"]
    return shlex.join([*words, *_step_flags(recipe)])


def _step_flags(recipe: Recipe) -> list[str]:
    """The flags that `octavo serve` and `octavo image` share."""
    words = []
    if recipe.linear is not None:
        words += ["--quantization", "fp8"]
        for pattern in recipe.ignored_layers:
            words += ["--ignored-layers", pattern]
    if recipe.attention is not None:
        words += ["--attention", "fp8"]
    return words


def title(advice: Advice) -> str:
    """What was asked."""
    workload, ceilings = advice.workload, advice.gpu.ceilings
    fp8 = ceilings.fp8_tflops
    rates = f"{ceilings.gb_per_s:,.0f} GB/s, {ceilings.bf16_tflops:,.0f} TFLOP/s in BF16"
    rates += f" and {fp8:,.0f} in FP8" if fp8 else ""
    asked = f"{advice.model} ({advice.parts}) on {advice.gpu.name}"
    if not advice.is_omni:
        asked += f", {workload.concurrency} × {workload.context:,} tokens"
    return f"{asked}\n{rates}: {ceilings.source}"


def expectation_table(advice: Advice) -> Table:
    """Times before and after."""
    return Table(
        caption="What to expect, in milliseconds"
        + (" (predicted: octavo was never run on this GPU)" if advice.gpu.caution else ""),
        header=("what", "BF16", "recipe", "speed-up"),
        rows=tuple(_row(one) for one in advice.expectations),
    )


def _row(one: Expectation) -> tuple[str, ...]:
    speedup = "not predicted" if one.speedup is None else f"{one.speedup:.2f}×"
    return (one.what, _ms(one.before_ms), _ms(one.after_ms), speedup)


def _parts(one: Expectation) -> str:
    """What the times are made of."""
    before, after = (
        ", ".join(f"{name} {_ms(ms)}" for name, ms in parts.items())
        for parts in (one.before, one.after)
    )
    same = "the same" if before == after else after
    return f"{one.what} is {before} ms in BF16, with the recipe {same}."


def _ms(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def memory_table(advice: Advice) -> Table:
    """Memory before and after."""
    return Table(
        caption="Memory",
        header=("what", "BF16", "recipe"),
        rows=tuple(
            (row.what, _amount(row.before, row.is_bytes), _amount(row.after, row.is_bytes))
            for row in advice.memory
        ),
    )


def _amount(number: int, is_bytes: bool) -> str:
    return f"{number / 1e9:,.2f} GB" if is_bytes else f"{number:,}"


def sentences(advice: Advice) -> list[str]:
    """Why, and what to mind, one line each; headings stand alone."""
    lines = ["Why", *(f"- {text}" for text in advice.reasons)]
    lines += [f"- {_parts(one)}" for one in advice.expectations if one.before]
    lines += [f"- {one.what}: {one.note}." for one in advice.expectations if one.note]
    sources = sorted({name for one in advice.expectations for name in one.based_on})
    if sources:
        names = ", ".join(sources)
        lines.append(f"- Times are corrected by records of whole models: {names}.")
    if advice.warnings:
        lines += ["", "Mind", *(f"- {text}" for text in advice.warnings)]
    return lines


def how_to_run(advice: Advice) -> list[str]:
    """The command that serves the model; where octavo cannot, why, and what can."""
    if advice.refused is None:
        assert advice.command is not None
        return [advice.command]
    lines = [f"octavo serve cannot run this model: {advice.refused}."]
    if advice.command is not None:
        return [*lines, advice.command]
    kind = "AutoModelForImageTextToText" if advice.has_images else "AutoModelForCausalLM"
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
    yield title(advice)
    if advice.expectations:
        yield expectation_table(advice)
    if advice.memory:
        yield memory_table(advice)
    yield from sentences(advice)
    yield "\nRecipe (recipe.toml)"
    yield recipe_text(advice)
    yield from how_to_run(advice)


def advice_records(advice: Advice, command: str) -> list[Measurement]:
    """What to expect of the recipe beside BF16, each row with the recipe, the reasons and why.

    The machine is this one, which only computed; the GPU that the advice is for is in the case.
    """
    workload = advice.workload
    about: dict[str, Scalar] = {
        "model": advice.model,
        "gpu": advice.gpu.name,
        "context": workload.context,
        "concurrency": workload.concurrency,
        "output_len": workload.output_len,
        "recipe": recipe_text(advice),
        "serve": "\n".join(how_to_run(advice)),
        "reasons": "\n".join(advice.reasons),
        "warnings": "\n".join(advice.warnings),
    }
    machine = Machine.current()

    def row(what: str, values: Mapping[str, float], note: str = "") -> Measurement:
        case = {**about, "what": what, **({"note": note} if note else {})}
        return Measurement(
            op="advice",
            impl="predicted",
            case=case,
            values=values,
            machine=machine,
            command=command,
        )

    records = []
    for one in advice.expectations:
        values = {"before_ms": one.before_ms, "after_ms": one.after_ms}
        if one.speedup is not None:
            values["speedup"] = one.speedup
        records.append(row(one.what, values, one.note))
    for size in advice.memory:
        unit = "bytes" if size.is_bytes else "count"
        records.append(row(size.what, {f"before_{unit}": size.before, f"after_{unit}": size.after}))
    return records
