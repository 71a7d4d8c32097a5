"""What FP8 does to single layers: rounding errors, static scales, and which layers matter."""

import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from octavo.measure.records import Measurement
from octavo.measure.report.plots import Figure, bars, lines, name_bars
from octavo.measure.report.sections import Kind, Rows, dots
from octavo.measure.report.tables import Cell, Table, grouped, newest, pivot

_TENSORS = ("q", "k", "v")
# Value of a record -> head of its three columns, caption and title of its plot.
_STATISTICS = {
    "amax": ("amax", "Largest absolute value of each tensor", "amax (absolute value)"),
    "headroom": (
        "headroom ×",
        "How many times larger a value may be before it saturates",
        "headroom (×)",
    ),
    "sqnr_db": (
        "SQNR dB",
        "Signal to quantization noise of what was seen; higher is better",
        "SQNR (dB)",
    ),
}
# Of all layers of a kind: value of a record -> which of them the table shows.
_EXTREMES: Mapping[str, Callable[..., float | None]] = {
    "amax": max,
    "lowest_amax": min,
    "spread": max,
    "headroom": min,
    "sqnr_db": min,
}
_NUM_BARS = 12  # layers of the plot of sensitivity, the largest errors


def average(records: Rows, over: str) -> list[Measurement]:
    """One row for all records that differ only in the case `over`, with the mean of each value."""
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for record in records:
        case = {name: value for name, value in record.case.items() if name != over}
        key = record.op, record.impl, *case.items()
        groups.setdefault(key, []).append(replace(record, case=case))
    return [
        replace(
            own[0], values={n: statistics.fmean(r.values[n] for r in own) for n in own[0].values}
        )
        for own in groups.values()
    ]


def _with_case(record: Measurement, name: str, text: str) -> Measurement:
    return replace(record, case={**record.case, name: text})


def _table_of(caption: str, row: str, column: str, value: str) -> Callable[[Rows], list[Table]]:
    return lambda rows: [pivot(rows, caption=caption, row=row, column=column, value=value)]


def _choices(records: Rows) -> Rows:
    """The means over layers, each with its format and granularity in words."""
    rows = average(newest(records, "layer", "tensor", "format", "granularity"), over="layer")
    return [
        _with_case(row, "choice", f"{row.get('format')} per {row.get('granularity')}")
        for row in rows
    ]


QUANTIZATION = Kind(
    ops=("quantize_error",),
    needs="layer tensor format granularity sqnr_db",
    rows=_choices,
    title="Queries, keys and values in 8 bits: {model}",
    text="Signal to quantization noise in dB, the mean over the captured layers; 6 dB more means "
    "half the error. e4m3 has one more bit of mantissa than e5m2. Finer scales help only as far as "
    "a few large values set the scale of many small ones.",
    figures=dots(
        "sqnr_db",
        caption="SQNR of each tensor, by format and granularity; higher is better",
        title="SQNR (dB)",
        name="tensor",
        series=lambda row: str(row.case["choice"]),
    ),
    tables=_table_of("SQNR in dB by format and granularity", "choice", "tensor", "sqnr_db"),
)


def _error_lines(rows: Rows, **about: Any) -> list[Figure]:
    return [lines(rows, y="relative_rms", y_title="relative RMS error (1 = the result)", **about)]


def _errors_by_layer(what: str) -> Callable[[Rows], list[Table]]:
    caption = f"{what}: relative RMS error against float64, by layer"
    return _table_of(caption, "recipe", "layer", "relative_rms")


ATTENTION = Kind(
    ops=("attention_error",),
    needs="layer recipe relative_rms",
    rows="layer recipe",
    title="Attention in FP8, layer by layer: {model}",
    text="Relative error of causal attention against float64, layer by layer: q, k, v and P in FP8 "
    "with two-level accumulation, beside BF16.",
    figures=partial(
        _error_lines,
        x="layer",
        x_title="layer (number)",
        series="recipe",
        caption="Relative RMS error of each layer, against float64; lower is better",
    ),
    tables=_errors_by_layer("Attention"),
)


def _bytes_per_token(rows: Rows) -> str:
    means = {str(r.get("recipe")): r.values for r in average(rows, over="layer")}
    return ", ".join(f"{name} {round(x['bytes_per_token'])}" for name, x in means.items())


DECODING = Kind(
    ops=("decode_error",),
    needs="layer recipe relative_rms bytes_per_token",
    rows="layer recipe",
    title="Decoding over an FP8 KV cache: {model}",
    text=lambda rows: (
        "The newest tokens attend to pages in FP8; q and P stay unquantized, so all of the error "
        f"is the storage's. Bytes per token and layer: {_bytes_per_token(rows)}."
    ),
    tables=_errors_by_layer("Decoding over pages"),
)


def _needles_headline(rows: Rows) -> str:
    one_level = [row for row in rows if row.case["accumulation"] == "one-level"]
    lost = [int(row.case["length"]) for row in one_level if row.case["needle"] == "lost"]
    if not lost:
        return ""
    return f"A needle among {min(lost):,} keys is lost with one-level accumulation."


ACCUMULATION = Kind(
    ops=("accumulation_error",),
    needs="length accumulation relative_rms is_found",
    by="",
    rows=lambda records: [
        _with_case(record, "needle", "found" if record.get("is_found") else "lost")
        for record in newest(records, "length", "accumulation")
    ],
    title="Why accumulation has two levels",
    text="Hopper's FP8 matrix instruction adds with 14 bits. This model of it agrees bit for bit "
    "with an H200. A needle lies in the middle of a haystack whose values cancel: with one level "
    "the haystack's sum stands still, never cancels, and buries the needle.",
    headline=_needles_headline,
    figures=partial(
        _error_lines,
        x="length",
        x_title="keys (number)",
        series="accumulation",
        caption="Relative error against float64, by number of keys; lower is better",
        is_log=True,
    ),
    tables=_table_of(
        "Is the needle found, by the number of keys?", "accumulation", "length", "needle"
    ),
)
LEVELS = Kind(
    ops=("attention_levels",),
    needs="shape causal value_mean promote_every median_ms relative_rms",
    by="",
    rows="impl shape causal value_mean promote_every",
    title="Levels of accumulation",
    text="FP8 attention whose sums of P·V move from the tensor core to float32 after so many tiles "
    "of keys; none is one level. Sums over values of mean 0 stay small; those over values of mean "
    "1 grow with every key.",
    caption="Time and relative error against float64; selected is what runs unasked",
    columns="shape causal value_mean promote_every impl is_selected median_ms relative_rms",
)
ERRORS = (QUANTIZATION, ATTENTION, DECODING, ACCUMULATION, LEVELS)


CALIBRATION = Kind(
    ops=("calibrate",),
    needs="layer tensor amax headroom sqnr_db",
    by="command",
    rows="layer tensor",
    title="Static scales, layer by layer",
    text="Headroom is 448 · scale / amax: below 1 the largest values seen saturate, as observers "
    "that clip intend. SQNR is that of e4m3 with the saved scales, margin included, on the values "
    "that were seen; 6 dB more means half the error.",
    figures=lambda rows: [
        bars(short, caption=caption, x="layer", y=value, series="tensor", y_title=title)
        for short in [_with_short_names(rows)]
        for value, (_, caption, title) in _STATISTICS.items()
    ],
    tables=lambda rows: [calibration_table(rows)],
)
PIPELINE = Kind(
    ops=("calibrate_pipeline",),
    needs="group tensor amax headroom",
    by="command",
    rows="layer tensor",
    title="Static scales of a pipeline, by kind of layer",
    text="Headroom is 448 · scale / amax: below 1 the largest values seen saturate.",
    tables=lambda rows: [pipeline_table(rows)],
)


def calibration_table(records: Rows) -> Table:
    """One row per layer: amax, headroom and SQNR of its q, k and v."""
    layers: dict[str, dict[str, Measurement]] = {}
    for record in records:
        layers.setdefault(str(record.get("layer")), {})[str(record.get("tensor"))] = record
    rows = []
    for layer, tensors in layers.items():
        found = [tensors.get(tensor) for tensor in _TENSORS]
        cells = [None if r is None else r.get(value) for value in _STATISTICS for r in found]
        num_passes = max(int(r.values["num_passes"]) for r in tensors.values())
        num_nonfinite = sum(int(r.values["num_nonfinite"]) for r in tensors.values())
        rows.append((layer, *cells, num_passes, num_nonfinite))
    heads = (f"{tensor} {head}" for head, *_ in _STATISTICS.values() for tensor in _TENSORS)
    header = ("layer", *heads, "passes", "not finite")
    return Table(caption="What calibration saw", header=header, rows=tuple(rows))


def _with_short_names(records: Rows) -> list[Measurement]:
    """The records with only those parts of the layers' names that tell them apart."""
    names = [str(record.get("layer")).split(".") for record in records]
    num_first = len(os.path.commonprefix(names))
    num_last = len(os.path.commonprefix([name[num_first:][::-1] for name in names]))
    short = [".".join(name[num_first : len(name) - num_last]) or "0" for name in names]
    return [_with_case(record, "layer", name) for record, name in zip(records, short, strict=True)]


def pipeline_table(records: Rows) -> Table:
    """One row for each kind of layer and tensor: the extremes of all layers of that kind."""
    rows: list[tuple[Cell, ...]] = []
    for (_, group, tensor), own in grouped(records, "group", "tensor").items():
        # Of the sizes that only some layers have, those that are there.
        values = {name: [r.values[name] for r in own if name in r.values] for name in _EXTREMES}
        extremes = (of(values[name], default=None) for name, of in _EXTREMES.items())
        num_passes = min(int(record.values["num_passes"]) for record in own)
        rows.append((str(group), str(tensor), len(own), *extremes, num_passes))
    return Table(
        caption="What calibration saw, by kind of layer; spread: the highest amax of a step over "
        "the lowest, in one layer",
        header=("layer", "tensor", "layers", "amax", "lowest", "spread ×")
        + ("headroom ×", "SQNR dB", "passes"),
        rows=tuple(rows),
    )


def _alone(rows: Rows) -> Rows:
    return [row for row in rows if row.op == "sensitivity"]


def _sensitivity_text(rows: Rows) -> str:
    whole = [row for row in rows if row.op != "sensitivity"]
    said = [f"Together, {r.case['layer']}: {100 * r.values['error']:.2f} %." for r in whole]
    return (
        "Each row's layers alone in FP8, all others as they were: the relative error of the "
        f"transformer's result, over the steps. {' '.join(said)}"
    )


def _sensitivity_figures(rows: Rows) -> Iterable[Figure]:
    if shown := _alone(rows)[:_NUM_BARS]:
        names = [str(row.case["layer"]) for row in shown]
        # Without what all names begin with.
        start = os.path.commonprefix(names).rpartition(".")[0] if len(names) > 1 else ""
        short = (name.removeprefix(f"{start}.") for name in names)
        errors = (100 * row.values["error"] for row in shown)
        yield name_bars(
            dict(zip(short, errors, strict=True)),
            caption="Error of the result when these layers alone are FP8, the "
            f"{len(shown)} largest; lower is better.",
            value_title="relative error (%)",
        )


SENSITIVITY = Kind(
    ops=("sensitivity", "sensitivity_of_all"),
    needs="layer error",
    by="model by",
    # Single layers by their error, the largest first, and then what all have together.
    rows=lambda records: sorted(
        newest(records, "op", "layer"), key=lambda r: (r.op != "sensitivity", -r.values["error"])
    ),
    title="Sensitivity of layers: {model}, by {by}",
    text=_sensitivity_text,
    headline=lambda rows: "".join(
        f"{row.case['model']}: {row.case['layer']} alone in FP8 has the largest error, "
        f"{100 * row.values['error']:.1f} %."
        for row in _alone(rows)[:1]
    ),
    figures=_sensitivity_figures,
    tables=lambda rows: [sensitivity_table(rows)] if _alone(rows) else [],
)


def sensitivity_table(records: Rows, num_rows: int | None = None) -> Table:
    """One row per layer, kind or block, the largest error first; num_rows: not more of them."""
    rows = _alone(records)
    shown = rows[:num_rows]
    more = f"; the first {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
    return Table(
        caption=f"Error of the transformer's result when these alone are FP8{more}",
        header=("layer", "layers", "error %", "worst step %", "weights %", "kept", "proposed"),
        rows=tuple(
            (
                str(record.get("layer")),
                int(record.values["num_layers"]),
                *(100 * record.values[x] for x in ("error", "worst_error", "weight_share")),
                "weight-only" if record.get("is_weight_only") else str(record.get("kept")),
                "yes" if record.get("is_proposed") else "",
            )
            for record in shown
        ),
    )
