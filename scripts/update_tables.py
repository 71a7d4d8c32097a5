"""Write the tables of README.md and docs/ from the records in results/.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. With --check nothing is written,
and a table that differs from its records is an error.

    python scripts/update_tables.py [--check]
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from octavo.atomic import write_atomically
from octavo.measure import store
from octavo.measure.records import Measurement
from octavo.measure.report.markdown import to_markdown
from octavo.measure.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
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


def accumulator() -> str:
    """What one-level accumulation loses on a real GPU, and how well the model predicts it."""
    records = store.read(RESULTS / "accumulator_h200.jsonl")
    table = Table(
        caption="",
        header=(
            "keys",
            "relative error, one level",
            "relative error, two levels",
            "results where octavo's model differs",
        ),
        rows=tuple(
            (
                int(record.case["keys"]),
                f"{record.values['one_level_relative_rms']:.2g}",
                f"{record.values['two_level_relative_rms']:.2g}",
                f"{record.values['num_bits_differ']:.0f} of {record.values['num_results']:.0f}",
            )
            for record in records
        ),
    )
    return (
        f"FP8 sums of P·V on an {records[0].machine.gpu}, weights P ≥ 0 and values of mean 1, "
        "against float64. Added up in the tensor core alone (one level) long contexts fall apart; "
        f"octavo adds every tile of 128 keys in float32 (two levels).\n\n{to_markdown(table)}\n"
    )


def speeds() -> str:
    """octavo's FP8 beside the fastest BF16 and the fastest FP8 with the same accumulation."""
    records = store.read(RESULTS / "kernels_h200.jsonl")
    rows = (
        *(_tower_speed(resolution, words) for resolution, words in TOWERS),
        *(_generate_speed(context, batch, words) for context, batch, words in DECODERS),
        *(_speed(op, shape, words, records) for op, shape, words in SPEEDS),
    )
    header = ("", "octavo FP8", "fastest BF16", "fastest other FP8", "over BF16", "over other FP8")
    machine = records[0].machine
    table = Table(caption="", header=header, rows=rows)
    return (
        f"Whole models, then kernels, on an {machine.gpu}; medians, each row one run, results "
        f"checked first (torch {machine.versions['torch']}, Triton {machine.versions['triton']}). "
        "Models have random weights; the tower's BF16 is stock transformers with the fastest "
        "attention, the decoder's is octavo's BF16 pages. Operands of kernels are quantized before "
        "the clock starts. The other FP8: FlashAttention-3 with two-level "
        "accumulation, as vLLM builds it; cuDNN, whose result is rounded to FP8 as well; "
        "`torch._scaled_mm` with one scale per token and channel, which octavo itself runs where "
        f"it is the fastest.\n\n{to_markdown(table)}\n"
    )


def attention() -> str:
    """FP8 attention by head_dim, beside the others."""
    found = [r for r in store.read(RESULTS / "kernels_h200.jsonl") if r.op == "attention"]
    columns = {
        "octavo, gluon": ("gluon", "FP8"),
        "octavo, triton": ("triton", "FP8"),
        "fastest BF16": (None, "BF16"),
        "FA3 FP8, two levels": ("vllm-fa3", "FP8"),
        "FA3 FP8, one level": ("fa3-fwd", "FP8"),
        "cuDNN FP8, FP8 result": ("cudnn", "FP8"),
    }
    rows = []
    for shape in dict.fromkeys(str(r.case["shape"]) for r in found):
        of_shape = [r for r in found if r.case["shape"] == shape]
        causal = ", causal" if of_shape[0].case["causal"] else ""
        cells = [_rate(of_shape, impl, operands) for impl, operands in columns.values()]
        rows.append((f"{shape}{causal}", *cells))
    table = Table(caption="", header=("", *columns), rows=tuple(rows))
    return (
        "Milliseconds and TFLOP/s at the real head_dim, operands quantized beforehand, contenders "
        f"timed in turn on an {found[0].machine.gpu}.\n\n{to_markdown(table)}\n"
    )


def _rate(records: list[Measurement], impl: str | None, operands: str) -> str:
    """Time and rate of an implementation, or of the fastest one; empty where it took no part."""
    found = [r for r in records if r.case["operands"] == operands and impl in (None, r.impl)]
    if not found:
        return ""
    record = _fastest(found)
    return f"{record.values['median_ms']:.2f}, {record.tflops:.0f}"


def encoder() -> str:
    """Attention of a vision tower with quantization included, beside BF16, all timed in turn."""
    found = [r for r in store.read(RESULTS / "kernels_h200.jsonl") if r.op == "encoder_attention"]
    return (
        "Milliseconds from BF16 to BF16, quantization of q, k and v included, and the speed-up "
        f"over the fastest BF16, on an {found[0].machine.gpu}; calls of all of them in turn.\n\n"
        f"{to_markdown(_encoder_table(found))}\n"
    )


def load() -> str:
    """The same under load: each alone, at the clock that the power limit leaves it."""
    found = store.read(RESULTS / "kernels_load_h200.jsonl")
    seconds = found[0].case["load_s"]
    return (
        f"The same after {seconds:g} s of nothing else, with the clock in MHz that was left.\n\n"
        f"{to_markdown(_encoder_table(found))}\n"
    )


def _encoder_table(records: list[Measurement]) -> Table:
    rows = []
    for shape in dict.fromkeys(str(r.case["shape"]) for r in records):
        of_shape = [r for r in records if r.case["shape"] == shape]
        bf16 = _fastest([r for r in of_shape if r.case["operands"] == "BF16"])
        ours = {r.case["scaling"]: r for r in of_shape if r.case["operands"] == "FP8"}
        cells = [
            f"{_time_at_clock(ours[name])} ({ours[name].values['speedup']:.2f}×)"
            for name in ("static", "dynamic with history")
        ]
        rows.append((shape, *cells, f"{_time_at_clock(bf16)} ({bf16.impl})"))
    header = ("", "octavo FP8, static scales", "dynamic scales", "fastest BF16")
    return Table(caption="", header=header, rows=tuple(rows))


def _time_at_clock(record: Measurement) -> str:
    """Milliseconds, and the clock where it was read."""
    clock = record.values.get("sm_mhz")
    return f"{record.values['median_ms']:.2f}" + ("" if clock is None else f" at {clock:.0f}")


def towers() -> str:
    """Whole vision towers in FP8, beside stock transformers and ours in BF16.

    Records from before there was a path of ours in BF16 leave its cells empty.
    """
    found = [r for r in store.read(RESULTS / "encoder_h200.jsonl") if r.op == "encoder"]
    recipes = ("static", "dynamic")
    rows = []
    for case in dict.fromkeys(_request(r) for r in found):
        of_case = [r for r in found if _request(r) == case]
        stock = [r for r in of_case if r.case["recipe"] == "bf16" and r.impl != "octavo"]
        fused = [r for r in of_case if r.case["recipe"] == "fused-bf16"]
        for is_graph in dict.fromkeys(bool(r.case["graphs"]) for r in of_case):
            ours = {r.case["recipe"]: r for r in of_case if r.case["graphs"] is is_graph}
            if not ours.keys() & set(recipes):
                continue
            cells = [_speedups(ours.get(recipe)) for recipe in recipes]
            bf16 = [_named_time([r for r in fused if r.case["graphs"] is is_graph])]
            bf16.append(_named_time([r for r in stock if not r.case["graphs"]]))
            rows.append((f"{case}{', graphs' if is_graph else ''}", *cells, *bf16))
    header = ("", "FP8, static scales", "FP8, dynamic scales", "octavo BF16", "fastest stock BF16")
    table = Table(caption="", header=header, rows=tuple(rows))
    return (
        "Milliseconds of a whole vision tower, and the speed-up over stock transformers without "
        "graphs and over octavo's own path in BF16 (graphs against graphs), on an "
        f"{found[0].machine.gpu}.\n\n{to_markdown(table)}\n"
    )


def _request(record: Measurement) -> str:
    case = record.case
    return f"{case['model']}, {case['images']} × {case['resolution']}"


def _speedups(record: Measurement | None) -> str:
    if record is None:
        return ""
    over = [record.values.get(name) for name in ("speedup", "fused_speedup")]
    factors = ", ".join(f"{x:.2f}×" for x in over if x is not None)
    return f"{record.values['median_ms']:.1f}" + (f" ({factors})" if factors else "")


def _named_time(records: list[Measurement]) -> str:
    if not records:
        return ""
    record = _fastest(records)
    return f"{record.values['median_ms']:.1f} ({record.impl})"


def chartqa() -> str:
    """What FP8 does to the chart reader's answers."""
    found = store.read(RESULTS / "chartqa_cpu.jsonl")
    rows = []
    for record in found:
        values = record.values
        scores = ("relaxed_accuracy", "anywhere_accuracy", "exact_match")
        cells = [f"{values[f'{name}_percent']:.1f}" for name in scores]
        interval = ""
        if "difference_points" in values:
            low, high = (values[f"difference_{end}_points"] for end in ("low", "high"))
            interval = f"{values['difference_points']:+.1f} ({low:+.1f} to {high:+.1f})"
        rows.append((str(record.case["recipe"]), *cells, interval))
    header = ("", "relaxed accuracy", "anywhere accuracy", "exact match", "points, 95 % interval")
    table = Table(caption="", header=header, rows=tuple(rows))
    return (
        f"Percent of {found[0].case['num_questions']} held-out questions; static scales are those "
        "of charts with other colors, sizes and backgrounds. By the reference ops on a CPU.\n\n"
        f"{to_markdown(table)}\n"
    )


def structures() -> str:
    """What the inside of Hopper's kernel was tried to be, and how long each took."""
    records = store.read(RESULTS / "attention_structures_h200.jsonl")
    columns = [(head_dim, 8192, False) for head_dim in (64, 72, 96, 128)] + [(128, 32768, True)]
    rows = []
    for structure in dict.fromkeys(str(r.case["structure"]) for r in records):
        if structure.count(";") > 1:
            continue
        of_it = [r for r in records if r.case["structure"] == structure]
        cells = []
        for column in columns:
            case = ("head_dim", "length", "causal")
            found = [r for r in of_it if tuple(r.case[key] for key in case) == column]
            cells.append(f"{_fastest(found).values['median_ms']:.3f}" if found else "")
        rows.append((structure, *cells))
    header = ("", "64", "72", "96", "128", "128, causal, 32k, heads 32/8")
    table = Table(caption="", header=header, rows=tuple(rows))
    return (
        "Milliseconds by head_dim, 8192 tokens and 16 heads, best settings of each, timed alone on "
        f"an {records[0].machine.gpu}.\n\n{to_markdown(table)}\n"
    )


def decode() -> str:
    """Paged decoding, FP8 and BF16, beside FlashAttention-3."""
    found = [r for r in store.read(RESULTS / "kernels_h200.jsonl") if r.op == "decode_attention"]
    columns = [(i, o) for o in ("FP8", "BF16") for i in ("gluon", "triton", "vllm-fa3")]
    rows = []
    for shape in dict.fromkeys(str(r.case["shape"]) for r in found):
        of_shape = {(r.impl, r.case["operands"]): r for r in found if r.case["shape"] == shape}
        times = [f"{1e3 * of_shape[key].values['median_ms']:.1f}" for key in columns]
        rows.append((shape, *times, f"{of_shape['gluon', 'FP8'].gb_per_s:,.0f}"))
    header = ("", *(f"{impl} {operands}" for impl, operands in columns), "GB/s, gluon FP8")
    table = Table(caption="", header=header, rows=tuple(rows))
    return f"Microseconds on an {found[0].machine.gpu}.\n\n{to_markdown(table)}\n"


def _speed(op: str, shape: str, words: str, records: list[Measurement]) -> tuple[str, ...]:
    found = [r for r in records if (r.op, r.case["shape"]) == (op, shape)]
    if op == "scaled_mm":  # what a linear layer does
        found = [r for r in found if r.case["scales"] in ("token by channel", "none")]
    in_fp8 = [r for r in found if r.case["operands"] == "FP8" and r.case.get("levels") != 1]
    ours = _fastest([r for r in in_fp8 if r.impl in SELECTED])
    bf16 = _fastest([r for r in found if r.case["operands"] == "BF16"])
    other = _fastest([r for r in in_fp8 if r.impl not in OURS])
    own = "octavo's " if bf16.impl in ("gluon", "triton") else ""
    return (
        words,
        _time(ours),
        f"{_time(bf16)} ({own}{bf16.impl})",
        f"{_time(other)} ({other.impl})",
        *(f"{x.values['median_ms'] / ours.values['median_ms']:.2f}×" for x in (bf16, other)),
    )


def _tower_speed(resolution: str, words: str) -> tuple[str, ...]:
    """A whole vision tower with static scales, by graphs or not, over the fastest stock one."""
    records = store.read(RESULTS / "encoder_h200.jsonl")
    of_size = [r for r in records if r.case["resolution"] == resolution]
    ours = _fastest([r for r in of_size if r.case["recipe"] == "static"])
    stock = _fastest([r for r in of_size if r.case["recipe"] == "bf16" and not r.case["graphs"]])
    return _whole(words, ours, stock, stock.impl)


def _generate_speed(context: int, batch: int, words: str) -> tuple[str, ...]:
    """One token of a whole decoder with static scales, over BF16 pages."""
    records = store.read(RESULTS / "generate_h200.jsonl")
    found = [r for r in records if (r.case["context"], r.case["batch"]) == (context, batch)]
    ours, bf16 = (
        _fastest([r for r in found if r.case["recipe"] == recipe]) for recipe in ("fp8", "bf16")
    )
    return _whole(words, ours, bf16, "octavo's")


def _whole(words: str, ours: Measurement, bf16: Measurement, who: str) -> tuple[str, ...]:
    ratio = bf16.values["median_ms"] / ours.values["median_ms"]
    return words, _time(ours), f"{_time(bf16)} ({who})", "", f"{ratio:.2f}×", ""


def generate() -> str:
    """One token of a whole decoder after a long context, by what the cache holds."""
    found = store.read(RESULTS / "generate_h200.jsonl")
    recipes = list(dict.fromkeys(str(r.case["recipe"]) for r in found))
    rows = []
    for context, batch in dict.fromkeys((r.case["context"], r.case["batch"]) for r in found):
        times = {
            r.case["recipe"]: f"{r.values['median_ms']:.2f} ({r.values['speedup']:.2f}×)"
            for r in found
            if (r.case["context"], r.case["batch"]) == (context, batch)
        }
        cells = (times.get(recipe, "") for recipe in recipes)
        rows.append((f"{batch} × {int(context) // 1024}k", *cells))
    table = Table(caption="", header=("", *recipes), rows=tuple(rows))
    ratios = {r.case["recipe"]: r.values["cache_ratio"] for r in found}
    return (
        f"Milliseconds of one token of a decoder shaped like {found[0].case['model']}, random "
        f"weights, CUDA graphs, on an {found[0].machine.gpu}, and the speed-up over BF16 pages. "
        f"The cache takes {ratios['fp8']:.3f} of BF16's bytes with static scales, "
        f"{ratios['fp8-token']:.3f} with those of each token.\n\n{to_markdown(table)}\n\n"
        f"{_break_even(found)}\n"
    )


def _break_even(records: list[Measurement]) -> str:
    """What a token costs by the length of one sequence, and where FP8 begins to gain."""
    fits = {}
    for recipe in ("bf16", "fp8"):
        of_one = [r for r in records if (r.case["recipe"], r.case["batch"]) == (recipe, 1)]
        (x0, y0), (x1, y1) = sorted((float(r.case["context"]), _ms(r)) for r in of_one)
        slope = (y1 - y0) / (x1 - x0)
        fits[recipe] = (y0 - slope * x0, slope)
    (bf16, per_token), (fp8, fp8_per_token) = fits["bf16"], fits["fp8"]
    if not (fp8 < bf16 and fp8_per_token < per_token):
        raise ValueError(f"the text is about FP8 that is never slower, got {fits}")
    share = 0.05
    length = (share * bf16 - (bf16 - fp8)) / (per_token - fp8_per_token - share * per_token)
    return (
        f"One sequence: BF16 takes {bf16:.2f} ms and {1024e3 * per_token:.1f} µs for each 1024 "
        f"tokens in the cache, FP8 {fp8:.2f} ms and {1024e3 * fp8_per_token:.1f} µs. FP8 is slower "
        f"at no length; a gain of {share:.0%} takes {length / 1024:.0f}k tokens."
    )


def _ms(record: Measurement) -> float:
    return record.values["median_ms"]


def _fastest(records: list[Measurement]) -> Measurement:
    return min(records, key=lambda record: record.values["median_ms"])


def _time(record: Measurement) -> str:
    ms = record.values["median_ms"]
    if ms >= 10:
        return f"{ms:.3g} ms" if ms < 1000 else f"{ms:.0f} ms"
    return f"{ms:.2f} ms" if ms >= 1 else f"{1e3 * ms:.3g} µs"


TABLES: dict[str, Callable[[], str]] = {
    "accumulator": accumulator,
    "attention": attention,
    "chartqa": chartqa,
    "decode": decode,
    "encoder": encoder,
    "generate": generate,
    "load": load,
    "speeds": speeds,
    "structures": structures,
    "towers": towers,
}
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def fill(text: str) -> str:
    """The text with every table made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)


def main(arguments: list[str]) -> int:
    """Write the files, or with --check compare them."""
    changed = {path: fill(path.read_text(encoding="utf-8")) for path in FILES}
    changed = {path: text for path, text in changed.items() if text != path.read_text("utf-8")}
    if "--check" not in arguments:
        for path, text in changed.items():
            write_atomically(path, text.encode())
        return 0
    for path in changed:
        print(f"{path.name} differs from its records; do: python scripts/update_tables.py")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
