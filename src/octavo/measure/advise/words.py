"""Advice as text for a terminal: tables, and sentences under headings."""

import shlex

from octavo.measure.advise.advice import Advice, Expectation
from octavo.measure.report.tables import Table


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
