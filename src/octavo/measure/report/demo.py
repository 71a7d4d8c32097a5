"""The demonstration's records as sections of a page."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.html import Section
from octavo.measure.report.plots import bars, lines
from octavo.measure.report.tables import Table, pivot


def demo_sections(records: Sequence[Measurement]) -> list[Section]:
    """What the demonstration measured, with a table and a plot for each question."""
    return [
        _quantization(records),
        _attention(records),
        _decoding(records),
        _accumulation(records),
    ]


def average(records: Sequence[Measurement], over: str) -> list[Measurement]:
    """One row for all records that differ only in the case `over`, with the mean of each value."""
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for record in records:
        rest = {name: value for name, value in record.case.items() if name != over}
        groups.setdefault((record.op, record.impl, *rest.items()), []).append(record)
    return [
        replace(
            group[0],
            case={name: value for name, value in group[0].case.items() if name != over},
            values={
                name: statistics.fmean(record.values[name] for record in group)
                for name in group[0].values
            },
        )
        for group in groups.values()
    ]


def _quantization(records: Sequence[Measurement]) -> Section:
    rows = average([r for r in records if r.op == "quantize"], over="layer")
    labelled = [
        replace(r, case={**r.case, "choice": f"{r.get('format')} per {r.get('granularity')}"})
        for r in rows
    ]
    return Section(
        title="Queries, keys and values in 8 bits",
        text="Signal to quantization noise in dB, the mean over the captured layers; 6 dB more "
        "means half the error. e4m3 has one more bit of mantissa than e5m2. Finer scales help "
        "only as far as a few large values set the scale of many small ones.",
        figures=(
            bars(
                labelled,
                caption="SQNR of each tensor; higher is better",
                x="tensor",
                y="sqnr_db",
                series="choice",
            ),
        ),
        tables=(
            pivot(
                labelled,
                caption="SQNR in dB by format and granularity",
                row="choice",
                column="tensor",
                value="sqnr_db",
            ),
        ),
    )


def _attention(records: Sequence[Measurement]) -> Section:
    rows = [r for r in records if r.op == "attention" and r.get("recipe")]
    return Section(
        title="Attention in FP8",
        text="Relative error of causal attention against float64, layer by layer: q, k, v and P "
        "in FP8 with two-level accumulation, beside BF16.",
        figures=(
            bars(
                rows,
                caption="Relative RMS error; lower is better",
                x="layer",
                y="relative_rms",
                series="recipe",
            ),
        ),
        tables=(_errors_by_layer(rows),),
    )


def _decoding(records: Sequence[Measurement]) -> Section:
    rows = [r for r in records if r.op == "decode_attention"]
    sizes = average(rows, over="layer")
    per_token = {str(r.get("recipe")): round(r.values["bytes_per_token"]) for r in sizes}
    bytes_text = ", ".join(f"{recipe} {size}" for recipe, size in per_token.items())
    return Section(
        title="Decoding over an FP8 KV cache",
        text="The newest tokens attend to pages in FP8; q and P stay unquantized, so all of the "
        f"error is the storage's. Bytes per token and layer: {bytes_text}.",
        tables=(_errors_by_layer(rows),),
    )


def _errors_by_layer(rows: Sequence[Measurement]) -> Table:
    return pivot(
        rows,
        caption="Relative RMS error by layer",
        row="recipe",
        column="layer",
        value="relative_rms",
    )


def _accumulation(records: Sequence[Measurement]) -> Section:
    rows = [r for r in records if r.get("accumulation")]
    found = [
        replace(r, case={**r.case, "needle": "found" if r.get("is_found") else "lost"})
        for r in rows
    ]
    return Section(
        title="Why accumulation has two levels",
        text="Hopper's FP8 matrix instruction adds with 14 bits. This model of it agrees bit for "
        "bit with an H200. A needle lies in the middle of a haystack whose values cancel: with "
        "one level the haystack's sum stands still, never cancels, and buries the needle.",
        figures=(
            lines(
                rows,
                caption="Relative error against float64, by context length; lower is better",
                x="length",
                y="relative_rms",
                series="accumulation",
                log_x=True,
                log_y=True,
            ),
        ),
        tables=(
            pivot(
                found,
                caption="Is the needle found?",
                row="accumulation",
                column="length",
                value="needle",
            ),
        ),
    )
