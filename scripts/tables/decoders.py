"""Tables about decoders: one token after a long context."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement
from octavo.measure.report.markdown import to_markdown
from octavo.measure.report.tables import Table


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
