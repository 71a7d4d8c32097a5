"""What FP8 does to the numbers of one attention layer, as sections of a page.

Records of four ops: the rounding of q, k and v, attention, decoding over pages, and accumulation.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.html import Section
from octavo.measure.report.plots import Figure, lines
from octavo.measure.report.points import Point, points, titles
from octavo.measure.report.select import grouped, newest
from octavo.measure.report.tables import Table, pivot

# Op -> what its records are told apart by, and the values that they have.
CASES: dict[str, tuple[str, ...]] = {
    "quantize_error": ("layer", "tensor", "format", "granularity"),
    "attention_error": ("layer", "recipe"),
    "decode_error": ("layer", "recipe"),
    "accumulation_error": ("length", "accumulation"),
}
VALUES: dict[str, tuple[str, ...]] = {
    "quantize_error": ("sqnr_db",),
    "attention_error": ("relative_rms",),
    "decode_error": ("relative_rms", "bytes_per_token"),
    "accumulation_error": ("relative_rms", "is_found"),
}


def error_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine, model and kind of error."""
    makers: dict[str, Callable[[Sequence[Measurement]], Section]] = {
        "quantize_error": _quantization,
        "attention_error": _attention,
        "decode_error": _decoding,
        "accumulation_error": _accumulation,
    }
    sections = []
    for (machine, kind, model), own in grouped(records, "op", "model").items():
        op = str(kind)
        section = makers[op](newest(own, *CASES[op]))
        name = f"{model}, {machine}" if model is not None else str(machine)
        sections.append(replace(section, title=f"{section.title}: {name}"))
    return sections


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
    rows = average(records, over="layer")
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
            points(
                _series(labelled),
                caption="SQNR of each tensor, by format and granularity; higher is better",
                value_title="SQNR (dB)",
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


def _series(records: Sequence[Measurement]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for record in records:
        point = Point(str(record.case["tensor"]), record.values["sqnr_db"])
        found.setdefault(str(record.case["choice"]), []).append(point)
    return found


def _titled(figure: Figure, x_title: str) -> Figure:
    """The figure of relative errors with titles that say the units."""
    layout = dict(figure.layout)
    for axis, title in titles(x_title, "relative RMS error (1 = the result)").items():
        layout[axis] = {**layout[axis], **title}
    return replace(figure, layout=layout)


def _attention(records: Sequence[Measurement]) -> Section:
    return Section(
        title="Attention in FP8, layer by layer",
        text="Relative error of causal attention against float64, layer by layer: q, k, v and P "
        "in FP8 with two-level accumulation, beside BF16.",
        figures=(
            _titled(
                lines(
                    records,
                    caption="Relative RMS error of each layer, against float64; lower is better",
                    x="layer",
                    y="relative_rms",
                    series="recipe",
                ),
                "layer (number)",
            ),
        ),
        tables=(_errors_by_layer(records, "Attention"),),
    )


def _decoding(records: Sequence[Measurement]) -> Section:
    sizes = average(records, over="layer")
    per_token = {str(r.get("recipe")): round(r.values["bytes_per_token"]) for r in sizes}
    bytes_text = ", ".join(f"{recipe} {size}" for recipe, size in per_token.items())
    return Section(
        title="Decoding over an FP8 KV cache",
        text="The newest tokens attend to pages in FP8; q and P stay unquantized, so all of the "
        f"error is the storage's. Bytes per token and layer: {bytes_text}.",
        tables=(_errors_by_layer(records, "Decoding over pages"),),
    )


def _errors_by_layer(rows: Sequence[Measurement], what: str) -> Table:
    return pivot(
        rows,
        caption=f"{what}: relative RMS error against float64, by layer",
        row="recipe",
        column="layer",
        value="relative_rms",
    )


def _accumulation(records: Sequence[Measurement]) -> Section:
    found = [
        replace(r, case={**r.case, "needle": "found" if r.get("is_found") else "lost"})
        for r in records
    ]
    lost = sorted(
        int(r.case["length"])
        for r in found
        if (r.case["accumulation"], r.case["needle"]) == ("one-level", "lost")
    )
    return Section(
        title="Why accumulation has two levels",
        text="Hopper's FP8 matrix instruction adds with 14 bits. This model of it agrees bit for "
        "bit with an H200. A needle lies in the middle of a haystack whose values cancel: with "
        "one level the haystack's sum stands still, never cancels, and buries the needle.",
        headline=f"A needle among {lost[0]:,} keys is lost with one-level accumulation."
        if lost
        else "",
        figures=(
            _titled(
                lines(
                    records,
                    caption="Relative error against float64, by number of keys; lower is better",
                    x="length",
                    y="relative_rms",
                    series="accumulation",
                    log_x=True,
                    log_y=True,
                ),
                "keys (number)",
            ),
        ),
        tables=(
            pivot(
                found,
                caption="Is the needle found, by the number of keys?",
                row="accumulation",
                column="length",
                value="needle",
            ),
        ),
    )
