"""Whole models and kernels in FP8 beside the fastest others: all of them, and README's eight."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table, to_markdown
from tables.common import fastest

OURS = ("gluon", "triton", "selected", "torch")
# Of those, what `select` runs for the rows of SPEEDS.
SELECTED = ("gluon", "selected")
# What users run: the op, its case in the records, and what it is in words.
SPEEDS = (
    ("attention", "1x8192 heads 16/16 head_dim 72", "ViT attention, 8192 tokens, head_dim 72"),
    ("attention", "1x8192 heads 16/16 head_dim 128", "DiT attention, 8192 tokens, head_dim 128"),
    ("attention", "1x32768 heads 32/8 head_dim 128", "causal prefill, 32k tokens, heads 32/8"),
    ("decode_attention", "1x32768 heads 32/8 head_dim 128 page 64", "decode, 1 × 32k tokens"),
    ("decode_attention", "8x32768 heads 32/8 head_dim 128 page 64", "decode, 8 × 32k tokens"),
    ("decode_attention", "8x131072 heads 32/8 head_dim 128 page 64", "decode, 8 × 128k tokens"),
    ("scaled_mm", "4608x12288x3072", "linear layer, 4608 × 3072 → 12288"),
    ("scaled_mm", "16x28672x4096", "linear layer, 16 × 4096 → 28672"),
)
# Whole models: of the encoder's records the resolution, of generate's the context and the batch.
TOWERS = (("fullhd", "vision tower of Qwen3-VL-30B-A3B, 3 FullHD images"), ("4k", "3 4K images"))
DECODERS = (
    (131072, 1, "Llama-3.1-8B-shaped decoder, one token after 1 × 128k"),
    (32768, 8, "8 × 32k"),
)
# Of throughput's records the model and the row, and what the load was.
LOADS = (
    ("llama-3.1-8b", "fp8", "the same shape, 48 requests of 20k + 2k tokens, 8 at once"),
    ("llama-3.1-8b", "fp8+linear", "the same with FP8 linear layers"),
)
# Of a diffusion step's records the model and the recipe, by CUDA graphs.
STEPS = (
    ("flux.1-dev", "linear", "FLUX.1-dev-shaped transformer, a step at 1024 × 1024, FP8 linear"),
    ("flux.1-dev", "linear-static+attention-static", "the same with FP8 attention, static scales"),
    ("wan2.2-14b", "linear+attention", "Wan2.2-14B-shaped block, 75,600 tokens"),
)
# README's rows: a row of the table above, what it is in words, and its footnote.
SUMMARY = (
    (TOWERS[0][1], "Qwen3-VL-30B-A3B vision tower, 3 FullHD images", "¹"),
    (TOWERS[1][1], "the same, 3 4K images", "¹"),
    (DECODERS[0][2], "Llama-3.1-8B-shaped decoder, one token after 128k", "²"),
    (DECODERS[1][2], "the same, 8 sequences of 32k", "²"),
    (LOADS[1][2], "its engine, 48 requests of 20k + 2k tokens, 8 at once, FP8 linear layers", "³"),
    (STEPS[1][2], "FLUX.1-dev-shaped transformer, a step at 1024 × 1024", "⁴"),
    (STEPS[2][2], "Wan2.2-14B-shaped block, 75,600 tokens", "⁴"),
    ("decode, 8 × 128k tokens", "decode attention alone, 8 × 128k tokens", "⁵"),
)


def speeds(results: Path) -> str:
    """octavo's FP8 beside the fastest BF16 and the fastest FP8 with the same accumulation."""
    header = ("", "octavo FP8", "fastest BF16", "fastest other FP8", "over BF16", "over other FP8")
    machine = store.read(results / "kernels_h200.jsonl")[0].machine
    table = Table(caption="", header=header, rows=_all_rows(results))
    return (
        f"Whole models, then kernels, on an {machine.gpu}; medians, each row one run, results "
        f"checked first (torch {machine.versions['torch']}, Triton {machine.versions['triton']}). "
        "Models have random weights. The tower's BF16 is stock transformers with the fastest "
        "attention, the decoder's is octavo's BF16 pages, the engine's also has the fastest "
        "attention in prompts, and a diffusion step's is compiled and replayed from CUDA graphs. "
        "Operands of kernels are quantized before the clock starts. The other FP8: "
        "FlashAttention-3 with two-level accumulation, as vLLM builds it; cuDNN, whose result is "
        "also rounded to FP8; `torch._scaled_mm` with one scale per token and channel, which "
        f"octavo itself runs where it is the fastest.\n\n{to_markdown(table)}\n"
    )


def summary(results: Path) -> str:
    """At most eight rows for README, with their footnotes."""
    rows = {row[0]: row for row in _all_rows(results)}
    machine = store.read(results / "kernels_h200.jsonl")[0].machine
    picked = tuple(
        (words + note, rows[name][2], rows[name][1], rows[name][4]) for name, words, note in SUMMARY
    )
    other = rows[SUMMARY[-1][0]]
    table = Table(caption="", header=("", "fastest BF16", "octavo FP8", "speed-up"), rows=picked)
    return (
        f"On an {machine.gpu} (torch {machine.versions['torch']}, Triton "
        f"{machine.versions['triton']}); medians, checked against BF16 or float64 before they are "
        f"timed. Models have random weights.\n\n{to_markdown(table)}\n\n"
        "¹ Attention in FP8 with static scales. BF16 is stock transformers with the fastest "
        "attention installed.  \n"
        "² KV cache in FP8 with static scales, replayed from CUDA graphs. BF16 is octavo's own "
        "paged cache.  \n"
        "³ Output tokens per second, compiled. BF16 has FlashAttention-3 in prompts.  \n"
        "⁴ Linear layers and attention in FP8, FLUX.1 with static scales, replayed from CUDA "
        "graphs. BF16 is diffusers, compiled, with FlashAttention-3 and, where they help, "
        "graphs.  \n"
        f"⁵ The fastest other FP8 takes {other[3]}.\n"
    )


def _all_rows(results: Path) -> tuple[tuple[str, ...], ...]:
    records = store.read(results / "kernels_h200.jsonl")
    towers = store.read(results / "encoder_h200.jsonl")
    decoders = store.read(results / "generate_h200.jsonl")
    loads = store.read(results / "throughput_h200.jsonl")
    steps = store.read(results / "diffusion_h200.jsonl")
    return (
        *(_tower_speed(towers, resolution, words) for resolution, words in TOWERS),
        *(_generate_speed(decoders, context, batch, words) for context, batch, words in DECODERS),
        *(_load_speed(loads, model, row, words) for model, row, words in LOADS),
        *(_step_speed(steps, model, recipe, words) for model, recipe, words in STEPS),
        *(_speed(op, shape, words, records) for op, shape, words in SPEEDS),
    )


def _speed(op: str, shape: str, words: str, records: list[Measurement]) -> tuple[str, ...]:
    found = [r for r in records if (r.op, r.case["shape"]) == (op, shape)]
    if op == "scaled_mm":  # what a linear layer does
        found = [r for r in found if r.case["scales"] in ("token by channel", "none")]
    in_fp8 = [r for r in found if r.case["operands"] == "FP8" and r.case.get("levels") != 1]
    ours = fastest([r for r in in_fp8 if r.impl in SELECTED])
    bf16 = fastest([r for r in found if r.case["operands"] == "BF16"])
    other = fastest([r for r in in_fp8 if r.impl not in OURS])
    own = "octavo's " if bf16.impl in ("gluon", "triton") else ""
    return (
        words,
        _time(ours),
        f"{_time(bf16)} ({own}{bf16.impl})",
        f"{_time(other)} ({other.impl})",
        *(f"{x.values['median_ms'] / ours.values['median_ms']:.2f}×" for x in (bf16, other)),
    )


def _tower_speed(records: list[Measurement], resolution: str, words: str) -> tuple[str, ...]:
    """A whole vision tower with static scales, by graphs or not, over the fastest stock one."""
    of_size = [r for r in records if r.case["resolution"] == resolution]
    ours = fastest([r for r in of_size if r.case["recipe"] == "static"])
    stock = fastest([r for r in of_size if r.case["recipe"] == "bf16" and not r.case["graphs"]])
    return _whole(words, ours, stock, stock.impl)


def _generate_speed(
    records: list[Measurement], context: int, batch: int, words: str
) -> tuple[str, ...]:
    """One token of a whole decoder with static scales, over BF16 pages."""
    found = [r for r in records if (r.case["context"], r.case["batch"]) == (context, batch)]
    ours, bf16 = (
        fastest([r for r in found if r.case["recipe"] == recipe]) for recipe in ("fp8", "bf16")
    )
    return _whole(words, ours, bf16, "octavo's")


def _load_speed(records: list[Measurement], model: str, row: str, words: str) -> tuple[str, ...]:
    """The newest record of a row beside the first row of its run."""
    of_model = [r for r in records if r.case["model"] == model]
    index = max(i for i, r in enumerate(of_model) if r.case["row"] == row)
    ours = of_model[index]
    bf16 = next(r for r in reversed(of_model[:index]) if r.baseline is None)
    fast, slow = (r.values["output_throughput"] for r in (ours, bf16))
    who = bf16.case.get("prefill_impl", "octavo's")
    told = (f"{fast:.0f} tokens/s", f"{slow:.0f} tokens/s ({who})")
    return words, *told, "", f"{fast / slow:.2f}×", ""


def _step_speed(records: list[Measurement], model: str, recipe: str, words: str) -> tuple[str, ...]:
    """The newest step by CUDA graphs beside the BF16 of its run."""
    found = [
        r
        for r in records
        if (r.case["model"], r.case["recipe"], r.case["graphs"]) == (model, recipe, True)
    ]
    ours = max(found, key=lambda r: r.date)
    # In the same run as the baseline that the speed-up is over.
    bf16 = next(
        r
        for r in records
        if (r.case["model"], r.case["recipe"], r.command) == (model, "bf16", ours.command)
        and r.values["speedup"] == 1
    )
    return _whole(words, ours, bf16, str(bf16.case["attention"]).removesuffix(" BF16"))


def _whole(words: str, ours: Measurement, bf16: Measurement, who: str) -> tuple[str, ...]:
    ratio = bf16.values["median_ms"] / ours.values["median_ms"]
    return words, _time(ours), f"{_time(bf16)} ({who})", "", f"{ratio:.2f}×", ""


def _time(record: Measurement) -> str:
    ms = record.values["median_ms"]
    if ms >= 10:
        return f"{ms:.3g} ms" if ms < 1000 else f"{ms:.0f} ms"
    return f"{ms:.2f} ms" if ms >= 1 else f"{1e3 * ms:.3g} µs"
