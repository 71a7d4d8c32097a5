"""What FP8 does to single layers: rounding errors, static scales, and which layers matter."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.html import Rows, Section
from octavo.measure.report.plots import Point, bars, lines, name_bars, points, titled
from octavo.measure.report.tables import Table, grouped, newest, pivot

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
_RELATIVE_ERROR = "relative RMS error (1 = the result)"
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
_NUM_BARS = 12  # layers of the plot of sensitivity, the largest errors


def error_sections(records: Rows) -> list[Section]:
    """A section for each machine, model and kind of error of one attention layer's numbers."""
    makers: dict[str, Callable[[Rows], Section]] = {
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


def average(records: Rows, over: str) -> list[Measurement]:
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


def _with_case(record: Measurement, name: str, text: str) -> Measurement:
    return replace(record, case={**record.case, name: text})


def _quantization(records: Rows) -> Section:
    rows = [
        _with_case(row, "choice", f"{row.get('format')} per {row.get('granularity')}")
        for row in average(records, over="layer")
    ]
    series: dict[str, list[Point]] = {}
    for row in rows:
        point = Point(str(row.case["tensor"]), row.values["sqnr_db"])
        series.setdefault(str(row.case["choice"]), []).append(point)
    figure = points(
        series,
        caption="SQNR of each tensor, by format and granularity; higher is better",
        value_title="SQNR (dB)",
    )
    caption = "SQNR in dB by format and granularity"
    return Section(
        title="Queries, keys and values in 8 bits",
        text="Signal to quantization noise in dB, the mean over the captured layers; 6 dB more "
        "means half the error. e4m3 has one more bit of mantissa than e5m2. Finer scales help "
        "only as far as a few large values set the scale of many small ones.",
        figures=(figure,),
        tables=(pivot(rows, caption=caption, row="choice", column="tensor", value="sqnr_db"),),
    )


def _attention(records: Rows) -> Section:
    caption = "Relative RMS error of each layer, against float64; lower is better"
    figure = lines(records, caption=caption, x="layer", y="relative_rms", series="recipe")
    return Section(
        title="Attention in FP8, layer by layer",
        text="Relative error of causal attention against float64, layer by layer: q, k, v and P "
        "in FP8 with two-level accumulation, beside BF16.",
        figures=(titled(figure, "layer (number)", _RELATIVE_ERROR),),
        tables=(_errors_by_layer(records, "Attention"),),
    )


def _decoding(records: Rows) -> Section:
    sizes = average(records, over="layer")
    per_token = {str(r.get("recipe")): round(r.values["bytes_per_token"]) for r in sizes}
    bytes_text = ", ".join(f"{recipe} {size}" for recipe, size in per_token.items())
    return Section(
        title="Decoding over an FP8 KV cache",
        text="The newest tokens attend to pages in FP8; q and P stay unquantized, so all of the "
        f"error is the storage's. Bytes per token and layer: {bytes_text}.",
        tables=(_errors_by_layer(records, "Decoding over pages"),),
    )


def _errors_by_layer(rows: Rows, what: str) -> Table:
    caption = f"{what}: relative RMS error against float64, by layer"
    return pivot(rows, caption=caption, row="recipe", column="layer", value="relative_rms")


def _accumulation(records: Rows) -> Section:
    found = [
        _with_case(record, "needle", "found" if record.get("is_found") else "lost")
        for record in records
    ]
    lost = sorted(
        int(r.case["length"])
        for r in found
        if (r.case["accumulation"], r.case["needle"]) == ("one-level", "lost")
    )
    figure = lines(
        records,
        caption="Relative error against float64, by number of keys; lower is better",
        x="length",
        y="relative_rms",
        series="accumulation",
        log_x=True,
        log_y=True,
    )
    caption = "Is the needle found, by the number of keys?"
    return Section(
        title="Why accumulation has two levels",
        text="Hopper's FP8 matrix instruction adds with 14 bits. This model of it agrees bit for "
        "bit with an H200. A needle lies in the middle of a haystack whose values cancel: with "
        "one level the haystack's sum stands still, never cancels, and buries the needle.",
        headline=f"A needle among {lost[0]:,} keys is lost with one-level accumulation."
        if lost
        else "",
        figures=(titled(figure, "keys (number)", _RELATIVE_ERROR),),
        tables=(
            pivot(found, caption=caption, row="accumulation", column="length", value="needle"),
        ),
    )


def calibration_sections(records: Rows) -> list[Section]:
    """One section for each command of `octavo calibrate`."""
    commands = grouped(records, "command").values()
    return [calibration_section(newest(own, "layer", "tensor")) for own in commands]


def calibration_section(records: Rows) -> Section:
    """What calibration saw in each layer as a table, and a plot of each of its three numbers."""
    short = _with_short_names(records)
    return Section(
        title="Static scales, layer by layer",
        text="Headroom is 448 · scale / amax: below 1 the largest values seen saturate, as "
        "observers that clip intend. SQNR is that of e4m3 with the saved scales, margin included, "
        "on the values that were seen; 6 dB more means half the error.",
        figures=tuple(
            titled(bars(short, caption=said, x="layer", y=value, series="tensor"), "layer", title)
            for value, (_, said, title) in _STATISTICS.items()
        ),
        tables=(calibration_table(records),),
    )


def calibration_table(records: Rows) -> Table:
    """One row per layer: amax, headroom and SQNR of its q, k and v."""
    layers: dict[object, dict[object, Measurement]] = {}
    for record in records:
        layers.setdefault(record.get("layer"), {})[record.get("tensor")] = record
    heads = [f"{tensor} {head}" for head, *_ in _STATISTICS.values() for tensor in _TENSORS]
    rows = []
    for layer, tensors in layers.items():
        cells = [
            tensors[tensor].get(value) if tensor in tensors else None
            for value in _STATISTICS
            for tensor in _TENSORS
        ]
        num_passes = max(int(r.values["num_passes"]) for r in tensors.values())
        num_nonfinite = sum(int(r.values["num_nonfinite"]) for r in tensors.values())
        rows.append((str(layer), *cells, num_passes, num_nonfinite))
    header = ("layer", *heads, "passes", "not finite")
    return Table(caption="What calibration saw", header=header, rows=tuple(rows))


def _with_short_names(records: Rows) -> list[Measurement]:
    """The records with only those parts of the layers' names that tell them apart."""
    names = [str(record.get("layer")).split(".") for record in records]
    num_first = len(os.path.commonprefix(names))
    num_last = len(os.path.commonprefix([name[num_first:][::-1] for name in names]))
    short = [".".join(name[num_first : len(name) - num_last]) or "0" for name in names]
    return [_with_case(record, "layer", name) for record, name in zip(records, short, strict=True)]


def pipeline_sections(records: Rows) -> list[Section]:
    """One section for each command of `octavo calibrate --pipeline`."""
    return [
        Section(
            title="Static scales of a pipeline, by kind of layer",
            text="Headroom is 448 · scale / amax: below 1 the largest values seen saturate.",
            tables=(pipeline_table(newest(own, "layer", "tensor")),),
        )
        for own in grouped(records, "command").values()
    ]


def pipeline_table(records: Rows) -> Table:
    """One row for each kind of layer and tensor: the extremes of all layers of that kind."""
    groups: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for record in records:
        key = str(record.get("group")), str(record.get("tensor"))
        groups.setdefault(key, []).append(record.values)

    def all_of(values: Sequence[Mapping[str, float]], name: str) -> list[float]:
        return [x[name] for x in values if name in x]

    rows = tuple(
        (
            *(group, tensor, len(values), max(all_of(values, "amax"))),
            min(all_of(values, "lowest_amax"), default=None),
            max(all_of(values, "spread"), default=None),
            *(min(all_of(values, "headroom")), min(all_of(values, "sqnr_db"))),
            int(min(all_of(values, "num_passes"))),
        )
        for (group, tensor), values in groups.items()
    )
    return Table(
        caption="What calibration saw, by kind of layer; spread: the highest amax of a step over "
        "the lowest, in one layer",
        header=("layer", "tensor", "layers", "amax", "lowest", "spread ×")
        + ("headroom ×", "SQNR dB", "passes"),
        rows=rows,
    )


def sensitivity_sections(records: Rows) -> list[Section]:
    """A section for each machine, model and way to group layers of `--sensitivity`."""
    sections = []
    for (machine, model, by), own in grouped(records, "model", "by").items():
        rows = newest([row for row in own if row.op == "sensitivity"], "layer")
        rows.sort(key=lambda row: row.values["error"], reverse=True)
        whole = newest([row for row in own if row.op == "sensitivity_of_all"], "layer")
        said = [f"Together, {r.case['layer']}: {100 * r.values['error']:.2f} %." for r in whole]
        section = Section(
            title=f"Sensitivity of layers: {model}, by {by}, {machine}",
            text="Each row's layers alone in FP8, all others as they were: the relative error of "
            "the transformer's result, over the steps. " + " ".join(said),
        )
        if rows:
            shown = rows[:_NUM_BARS]
            caption = (
                f"Error of the result when these layers alone are FP8, the {len(shown)} largest; "
                "lower is better."
            )
            section = replace(
                section,
                headline=f"{model}: {rows[0].case['layer']} alone in FP8 has the largest error, "
                f"{100 * rows[0].values['error']:.1f} %.",
                figures=(
                    name_bars(_errors(shown), caption=caption, value_title="relative error (%)"),
                ),
                tables=(sensitivity_table(rows),),
            )
        sections.append(section)
    return sections


def _errors(rows: Rows) -> dict[str, float]:
    """The errors by the names of layers, without what all names begin with."""
    names = [str(row.case["layer"]) for row in rows]
    start = os.path.commonprefix(names).rpartition(".")[0] if len(names) > 1 else ""
    errors = (100 * row.values["error"] for row in rows)
    return dict(zip((name.removeprefix(f"{start}.") for name in names), errors, strict=True))


def sensitivity_table(records: Rows, num_rows: int | None = None) -> Table:
    """One row per layer, kind or block, the largest error first; num_rows: not more of them."""
    rows = [record for record in records if record.op == "sensitivity"]
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
