"""What the demonstration measured, in one table."""

from collections.abc import Callable, Sequence

from octavo.measure.records import Measurement
from octavo.measure.report.quality import needle_table
from octavo.measure.report.tables import Table

# What was measured, of which model, unquantized, with what in FP8, and what came out.
Line = tuple[str, str, str, str, str]


def summary_table(records: Sequence[Measurement]) -> Table:
    """A row for each recipe in FP8 beside the one that it is compared with."""
    makers: dict[str, Callable[[Sequence[Measurement]], list[Line]]] = {
        "chartqa": _charts,
        "perplexity": _perplexity,
        "needle": _needle,
        "texts": _texts,
        "images": _images,
        "accumulation_error": _accumulation,
        "advice": _advice,
    }
    rows: list[Line] = []
    for op, make in makers.items():
        own = [record for record in records if record.op == op]
        rows += make(own) if own else []
    return Table(
        caption="What was measured",
        header=("what", "model", "unquantized", "FP8", "result"),
        rows=tuple(rows),
    )


def _pairs(records: Sequence[Measurement]) -> list[tuple[Measurement, Measurement]]:
    """Each record that is compared with another, and that one."""
    firsts = {record.case["recipe"]: record for record in records if record.baseline is None}
    return [(firsts[record.baseline], record) for record in records if record.baseline is not None]


def _charts(records: Sequence[Measurement]) -> list[Line]:
    value = "relaxed_accuracy_percent"
    return [
        (
            f"{own.case['num_questions']} questions about charts, right",
            str(own.case["model"]),
            f"{first.values[value]:.1f} %",
            str(own.case["recipe"]),
            f"{own.values[value]:.1f} %",
        )
        for first, own in _pairs(records)
    ]


def _perplexity(records: Sequence[Measurement]) -> list[Line]:
    return [
        (
            "perplexity of a text",
            str(own.case["model"]),
            f"{first.values['perplexity']:.3f}",
            str(own.case["recipe"]),
            f"{own.values['perplexity']:.3f}, recovers {own.values['recovery_percent']:.1f} %",
        )
        for first, own in _pairs(records)
    ]


def _needle(records: Sequence[Measurement]) -> list[Line]:
    longest = max(int(record.case["length"]) for record in records)
    first, *others = needle_table(records).rows
    count = sum(int(r.case["repetitions"]) for r in records if r.case["recipe"] == first[0])
    return [
        (
            f"{count} needles in up to {longest:,} tokens, found",
            str(records[0].case["model"]),
            f"{first[-3]:.0f} %",
            str(other[0]),
            f"{other[-3]:.0f} %",
        )
        for other in others
    ]


def _texts(records: Sequence[Measurement]) -> list[Line]:
    return [
        (
            "an answer, by the token",
            str(own.case["model"]),
            f"{first.values['num_tokens']:.0f} tokens",
            str(own.case["recipe"]),
            f"the same for {own.values['num_same_tokens']:.0f} of {own.values['num_tokens']:.0f}",
        )
        for first, own in _pairs(records)
    ]


def _images(records: Sequence[Measurement]) -> list[Line]:
    return [
        (
            f"{record.case['num_pictures']} images, PSNR",
            str(record.case["model"]),
            str(record.baseline),
            str(record.case["row"]),
            f"{record.values['psnr_db']:.1f} dB, the worst {record.values['worst_psnr_db']:.1f} dB",
        )
        for record in records
        if record.baseline is not None
    ]


def _accumulation(records: Sequence[Measurement]) -> list[Line]:
    longest = max(int(record.case["length"]) for record in records)
    return [
        (
            f"a needle among {longest:,} keys",
            "one head of attention",
            "",
            f"{record.case['accumulation']} accumulation",
            "found" if record.values["is_found"] else "lost",
        )
        for record in records
        if record.case["length"] == longest
    ]


def _advice(records: Sequence[Measurement]) -> list[Line]:
    return [
        (
            f"predicted: {record.case['what']}",
            f"{record.case['model']}, {record.case['gpu']}",
            f"{record.values['before_ms']:,.1f} ms",
            "the recipe advised",
            f"{record.values['after_ms']:,.1f} ms, {record.values['speedup']:.2f} times as fast",
        )
        for record in records
        if "speedup" in record.values
    ]
