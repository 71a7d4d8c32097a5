"""What calibration saw in each layer, as a table and as a section of a page."""

import os
from collections.abc import Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.html import Section
from octavo.measure.report.plots import bars
from octavo.measure.report.points import titled
from octavo.measure.report.tables import Table

_TENSORS = ("q", "k", "v")
# Value of a record -> head of its three columns.
_COLUMNS = {"amax": "amax", "headroom": "headroom ×", "sqnr_db": "SQNR dB"}


def calibration_table(records: Sequence[Measurement]) -> Table:
    """One row per layer: amax, headroom and SQNR of its q, k and v."""
    layers: dict[object, dict[object, Measurement]] = {}
    for record in records:
        layers.setdefault(record.get("layer"), {})[record.get("tensor")] = record
    heads = [f"{tensor} {head}" for head in _COLUMNS.values() for tensor in _TENSORS]
    rows = []
    for layer, tensors in layers.items():
        cells = [
            tensors[tensor].get(value) if tensor in tensors else None
            for value in _COLUMNS
            for tensor in _TENSORS
        ]
        num_passes = max(int(r.values["num_passes"]) for r in tensors.values())
        num_nonfinite = sum(int(r.values["num_nonfinite"]) for r in tensors.values())
        rows.append((str(layer), *cells, num_passes, num_nonfinite))
    return Table(
        caption="What calibration saw",
        header=("layer", *heads, "passes", "not finite"),
        rows=tuple(rows),
    )


def pipeline_table(records: Sequence[Measurement]) -> Table:
    """One row for each kind of layer and tensor: the extremes of all layers of that kind."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for record in records:
        key = str(record.get("group")), str(record.get("tensor"))
        groups.setdefault(key, []).append(record)
    rows = []
    for (group, tensor), members in groups.items():
        values = [record.values for record in members]
        lowest = [x["lowest_amax"] for x in values if "lowest_amax" in x]
        spread = [x["spread"] for x in values if "spread" in x]
        rows.append(
            (
                *(group, tensor, len(members)),
                max(x["amax"] for x in values),
                min(lowest) if lowest else None,
                max(spread) if spread else None,
                min(x["headroom"] for x in values),
                min(x["sqnr_db"] for x in values),
                int(min(x["num_passes"] for x in values)),
            )
        )
    return Table(
        caption="What calibration saw, by kind of layer; spread: the highest amax of a step over "
        "the lowest, in one layer",
        header=("layer", "tensor", "layers", "amax", "lowest", "spread ×")
        + ("headroom ×", "SQNR dB", "passes"),
        rows=tuple(rows),
    )


def calibration_section(records: Sequence[Measurement]) -> Section:
    """The table, with a plot of each of its three numbers over the layers."""
    captions = {
        "amax": ("Largest absolute value of each tensor", "amax (absolute value)"),
        "headroom": ("How many times larger a value may be before it saturates", "headroom (×)"),
        "sqnr_db": (
            "Signal to quantization noise of what was seen; higher is better",
            "SQNR (dB)",
        ),
    }
    return Section(
        title="Static scales, layer by layer",
        text="Headroom is 448 · scale / amax: below 1 the largest values seen saturate, as "
        "observers that clip intend. SQNR is that of e4m3 with the saved scales, margin included, "
        "on the values that were seen; 6 dB more means half the error.",
        figures=tuple(
            titled(
                bars(
                    _with_short_names(records), caption=caption, x="layer", y=value, series="tensor"
                ),
                "layer",
                title,
            )
            for value, (caption, title) in captions.items()
        ),
        tables=(calibration_table(records),),
    )


def _with_short_names(records: Sequence[Measurement]) -> list[Measurement]:
    """The records with only those parts of the layers' names that tell them apart."""
    names = [str(record.get("layer")).split(".") for record in records]
    num_first = len(os.path.commonprefix(names))
    num_last = len(os.path.commonprefix([name[num_first:][::-1] for name in names]))
    short = [".".join(name[num_first : len(name) - num_last]) or "0" for name in names]
    return [
        replace(record, case={**record.case, "layer": name})
        for record, name in zip(records, short, strict=True)
    ]
