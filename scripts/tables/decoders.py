"""Tables about decoders: one token after a long context, and what FP8 costs in perplexity."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table, to_markdown
from tables.common import grouped, newest

# How a text was read, in the order of the columns: the dtype and the tokens of a pass.
READINGS = (("bf16", 4), ("bf16", 1), ("bf16", 512), ("float32", 4))
# The most tokens of a pass that is decoding: its queries are not quantized.
MAX_DECODE_LEN = 4
GRANULARITIES = {
    "unit": "scales of 1.0",
    "tensor": "static, per tensor",
    "head": "static, per head",
    "token": "per token and head",
}
CHANGES = {"rotate": "rotated", "center": "centered"}


def generate(results: Path) -> str:
    """One token of a whole decoder after a long context, by what the cache holds."""
    found = store.read(results / "generate_h200.jsonl")
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


def perplexity(results: Path) -> str:
    """How much perplexity grows with keys and values in FP8, by recipe and how a text is read."""
    names = ("model", "data", "context", "num_windows", "count")
    records = store.read(results / "perplexity_h200.jsonl")
    groups = grouped(records, lambda r: tuple(r.case[name] for name in names))
    return "\n\n".join(map(_perplexity_of, groups)) + "\n"


def _perplexity_of(records: list[Measurement]) -> str:
    """The table of one model and text."""
    latest = newest(records, lambda r: (r.case["recipe"], _reading(r)))
    cells = {
        (str(r.case["recipe"]), _reading(r)): _ratio(r)
        for r in latest
        if "perplexity_ratio" in r.values
    }
    recipes = sorted(dict.fromkeys(recipe for recipe, _ in cells), key=_recipe_order)
    readings = dict.fromkeys(reading for _, reading in cells)
    columns = [r for r in READINGS if r in readings] + [r for r in readings if r not in READINGS]
    table = Table(
        caption="",
        header=("cache", *(_reading_words(*column) for column in columns)),
        rows=tuple(
            (_recipe_words(recipe), *(cells.get((recipe, column), "") for column in columns))
            for recipe in recipes
        ),
    )
    case = records[0].case
    windows = "window" if case["num_windows"] == 1 else "windows"
    return (
        f"{case['model']} on an {records[0].machine.gpu}, {case['num_windows']} {windows} of "
        f"{case['context']} tokens of {case['data']}. Perplexity, × that of the same dtype read "
        "the same way without FP8, ± the standard error over the windows.\n\n"
        f"{to_markdown(table)}"
    )


def _reading(record: Measurement) -> tuple[str, int]:
    return str(record.case["dtype"]), int(record.case["chunk"])


def _reading_words(dtype: str, chunk: int) -> str:
    if chunk == 1:
        how = "token by token"
    else:
        how = f"{chunk} at a time" if chunk <= MAX_DECODE_LEN else f"chunks of {chunk}"
    return f"{'BF16' if dtype == 'bf16' else dtype}, {how}"


def _ratio(record: Measurement) -> str:
    ratio = record.values["perplexity_ratio"]
    error_percent = record.values.get("recovery_standard_error_percent")
    # Both are the same share of their own: they are one over the other.
    share = None if error_percent is None else error_percent / record.values["recovery_percent"]
    error = "" if share is None else f" ± {share * ratio:.4f}"
    return f"{ratio:.4f}{error}"


def _recipe_words(recipe: str) -> str:
    """Such as "fp8 head+rotate+center" in words; a recipe's file stays a file."""
    kv_cache_dtype, _, name = recipe.partition(" ")
    front, *skipped = name.split("+skip=")
    granularity, *changes = front.split("+")
    if granularity not in GRANULARITIES:
        return recipe
    words = [] if kv_cache_dtype == "fp8" else [kv_cache_dtype]
    words.append(GRANULARITIES[granularity])
    if changes:
        words.append(f"keys {' and '.join(CHANGES[change] for change in changes)}")
    if skipped:
        words.append(f"layers {', '.join(skipped)} skipped")
    return ", ".join(words)


def _recipe_order(recipe: str) -> tuple[int, int]:
    """Plain keys first, then by granularity; what has no words is last."""
    granularity, *changes = recipe.partition(" ")[2].split("+")
    known = list(GRANULARITIES)
    if granularity not in known:
        return len(CHANGES) + 1, 0
    return sum(change in CHANGES for change in changes), known.index(granularity)
