"""Tables about vision encoders: their attention, whole towers, and a chart reader's answers."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table, to_markdown
from tables.common import fastest


def encoder(results: Path) -> str:
    """Attention of a vision tower with quantization included, beside BF16, all timed in turn."""
    found = [r for r in store.read(results / "kernels_h200.jsonl") if r.op == "encoder_attention"]
    return (
        "Milliseconds from BF16 to BF16, quantization of q, k and v included, and the speed-up "
        f"over the fastest BF16, on an {found[0].machine.gpu}; calls of all of them in turn.\n\n"
        f"{to_markdown(_encoder_table(found))}\n"
    )


def load(results: Path) -> str:
    """The same under load: each alone, at the clock that the power limit leaves it."""
    found = store.read(results / "kernels_load_h200.jsonl")
    seconds = found[0].case["load_s"]
    return (
        f"The same after {seconds:g} s of nothing else, with the clock in MHz that was left.\n\n"
        f"{to_markdown(_encoder_table(found))}\n"
    )


def _encoder_table(records: list[Measurement]) -> Table:
    rows = []
    for shape in dict.fromkeys(str(r.case["shape"]) for r in records):
        of_shape = [r for r in records if r.case["shape"] == shape]
        bf16 = fastest([r for r in of_shape if r.case["operands"] == "BF16"])
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


def towers(results: Path) -> str:
    """Whole vision towers in FP8, beside stock transformers and ours in BF16.

    Records from before there was a path of ours in BF16 leave its cells empty.
    """
    found = [r for r in store.read(results / "encoder_h200.jsonl") if r.op == "encoder"]
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
    record = fastest(records)
    return f"{record.values['median_ms']:.1f} ({record.impl})"


def chartqa(results: Path) -> str:
    """What FP8 does to the chart reader's answers."""
    found = store.read(results / "chartqa_cpu.jsonl")
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
