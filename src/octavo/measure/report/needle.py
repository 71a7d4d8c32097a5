"""Needles that were found: a table by length, and a heat map for each row."""

import math
import statistics
from collections.abc import Sequence

from octavo.measure.records import Measurement
from octavo.measure.report.html import Section
from octavo.measure.report.labels import Cell
from octavo.measure.report.plots import Figure
from octavo.measure.report.tables import Table

# From lost to found: told apart without colors by their lightness, and by the numbers in them.
COLORS = [[0.0, "#7f1d1d"], [0.5, "#f2c14e"], [1.0, "#2a9d8f"]]


def needle_table(records: Sequence[Measurement]) -> Table:
    """One row for each recipe: needles found by length, over all depths, and what is recovered."""
    lengths = sorted({int(record.case["length"]) for record in records})
    names = list(dict.fromkeys(str(record.case["recipe"]) for record in records))
    first = records[0].case
    depths = len({record.case["depth"] for record in records})
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        own = [record for record in records if record.case["recipe"] == name]
        by_length = [[r for r in own if r.case["length"] == length] for length in lengths]
        shares = [_mean(some, "found_percent") for some in by_length]
        whole, base = _mean(own, "found_percent"), _mean(_first(records), "found_percent")
        assert whole is not None
        recovered = None if name == names[0] or not base else 100 * whole / base
        rows.append((name, *shares, whole, _standard_error(own), recovered))
    return Table(
        caption=f"needles found (%): {first['model']}, {first['haystack']}, depths: {depths}, "
        f"repetitions: {first['repetitions']}",
        header=("recipe", *map(tokens_text, lengths), "all", "± s.e.", "recovery (%)"),
        rows=tuple(rows),
    )


def needle_figures(records: Sequence[Measurement]) -> tuple[Figure, ...]:
    """A heat map for each row: lengths across, depths down."""
    names = list(dict.fromkeys(str(record.case["recipe"]) for record in records))
    return tuple(
        _heat_map(name, [record for record in records if record.case["recipe"] == name])
        for name in names
    )


def needle_section(records: Sequence[Measurement]) -> Section:
    """The table and the heat maps, with a sentence for each row about where needles get lost."""
    first = records[0].case
    return Section(
        title=f"Needles in a haystack: {first['model']}",
        text="Every prompt has keys with values, and asks for the value of one of them, the "
        "needle. A cell is how many needles a row finds, by the tokens of the prompt and the "
        "needle's place in it, from the start (0 %) to the end (100 %).",
        figures=needle_figures(records),
        tables=(needle_table(records),),
    )


def tokens_text(number: int) -> str:
    """A number of tokens as people say it: 8k for 8192, 1M for 1048576."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if number >= size and number % (size // 4) == 0:
            return f"{number / size:g}{unit}"
    return str(number)


def _heat_map(name: str, records: Sequence[Measurement]) -> Figure:
    lengths = sorted({int(record.case["length"]) for record in records})
    depths = sorted({float(record.case["depth"]) for record in records})
    found = {
        (int(r.case["length"]), float(r.case["depth"])): r.values["found_percent"] for r in records
    }
    cells = [[found.get((length, depth)) for length in lengths] for depth in depths]
    trace = {
        "type": "heatmap",
        "x": [tokens_text(length) for length in lengths],
        "y": [f"{100 * depth:g}" for depth in depths],
        "z": cells,
        "zmin": 0,
        "zmax": 100,
        "colorscale": COLORS,
        "colorbar": {"title": {"text": "found (%)"}},
        "texttemplate": "%{z:.0f}",
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": "%{x} tokens, depth %{y} %: %{z:.0f} % found<extra></extra>",
    }
    lost = [length for length, column in zip(lengths, zip(*cells, strict=True), strict=True)
            if any(cell is not None and cell < 50 for cell in column)]  # fmt: skip
    where = f"most are lost at {', '.join(map(tokens_text, lost))} tokens, at one depth or more"
    return Figure(
        caption=f"{name}: {where if lost else 'most are found at all lengths and depths'}",
        data=(trace,),
        layout={
            "xaxis": {"title": {"text": "tokens of the prompt"}, "type": "category"},
            "yaxis": {
                "title": {"text": "depth of the needle (%)"},
                "type": "category",
                "autorange": "reversed",
            },
            "showlegend": False,
        },
    )


def _first(records: Sequence[Measurement]) -> list[Measurement]:
    return [r for r in records if r.case["recipe"] == records[0].case["recipe"]]


def _mean(records: Sequence[Measurement], value: str) -> float | None:
    return statistics.fmean(r.values[value] for r in records) if records else None


def _standard_error(records: Sequence[Measurement]) -> float | None:
    """Of the mean over all prompts, each found or not."""
    count = sum(int(record.case["repetitions"]) for record in records)
    share = sum(record.values["num_found"] for record in records) / count
    return None if count < 2 else 100 * math.sqrt(share * (1 - share) / (count - 1))
