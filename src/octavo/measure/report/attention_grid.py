"""Attention over a grid of shapes: how many times as fast octavo's FP8 is as the fastest others."""

from collections.abc import Callable, Iterator
from html import escape

from octavo.measure.records import Measurement
from octavo.measure.report.kernels import OWN_IMPLS
from octavo.measure.report.plots import Figure, axes, heat_map
from octavo.measure.report.sections import Kind, Rows
from octavo.measure.report.tables import MISSING, Table, tokens_text

ATTENTION_GRID = "attention_grid"
Place = tuple[int, int]  # head_dim, tokens of a sequence
# Orange is slower, blue is faster; the darker, the further from 1, in print as well.
_COLORS = [[0.0, "#b35806"], [0.5, "#f7f7f7"], [1.0, "#2166ac"]]
_RIVALS: dict[str, Callable[[Measurement], bool]] = {
    "the fastest BF16": lambda record: record.case["operands"] == "BF16",
    "the fastest other FP8": lambda record: (
        record.case["operands"] == "FP8" and record.impl not in OWN_IMPLS
    ),
}


def grid_tables(records: Rows) -> Iterator[Table]:
    """A table for each kind of heads, full and causal: both ratios in each cell."""
    for panel, shapes in _panels(records).items():
        head_dims, lengths = (sorted(set(sizes)) for sizes in zip(*shapes, strict=True))
        rows = tuple(
            (str(head_dim), *(_cell(shapes.get((head_dim, length), [])) for length in lengths))
            for head_dim in head_dims
        )
        caption = f"{panel}: octavo's FP8 over {' / '.join(_RIVALS)} (×)"
        yield Table(caption=caption, header=("head_dim", *map(tokens_text, lengths)), rows=rows)


def _figures(records: Rows) -> Iterator[Figure]:
    """A heat map over the fastest BF16 and one over the fastest other FP8, where there are any."""
    for rival in _RIVALS:
        if _ratios(records, rival):
            yield _figure(records, rival)


def _figure(records: Rows, rival: str) -> Figure:
    """Panels of head_dims below each other, each with a row for its title."""
    panels = _panels(records)
    lengths = sorted({length for shapes in panels.values() for _, length in shapes})
    cells: list[list[float | None]] = []
    texts: list[list[str]] = []
    marks: dict[int, str] = {}  # of the rows that have cells
    titles = []
    for panel, shapes in panels.items():
        titles.append({"text": f"<b>{escape(panel)}</b>", "y": len(cells)})
        cells.append([None] * len(lengths))
        texts.append([""] * len(lengths))
        for head_dim in sorted({head_dim for head_dim, _ in shapes}):
            found = [_race(shapes.get((head_dim, length), []), rival) for length in lengths]
            marks[len(cells)] = str(head_dim)
            cells.append([race and race[0] for race in found])
            texts.append([race[1] if race else "" for race in found])
    trace = heat_map(
        [tokens_text(length) for length in lengths],
        range(len(cells)),
        cells,
        colors=_COLORS,
        span=(0.5, 1.5),
        title="×",
        texttemplate="%{z:.2f}",
        hovertemplate="%{text}",
    )
    layout = axes("tokens of each sequence", "head_dim")
    layout["xaxis"]["type"] = "category"
    layout["yaxis"] |= {
        "tickvals": list(marks),
        "ticktext": list(marks.values()),
        "range": [len(cells) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }
    placed = {"x": 0, "xref": "paper", "xanchor": "left", "showarrow": False}
    layout["annotations"] = [placed | title for title in titles]
    return Figure(
        caption=f"Speed of octavo's FP8 over that of {rival}; above 1, in blue, octavo is faster.",
        data=(trace | {"text": texts},),
        layout=layout,
        height_rem=8 + 3 * len(cells) // 2,
    )


def _panels(records: Rows) -> dict[str, dict[Place, list[Measurement]]]:
    """The records of each shape, by kinds of heads, full and causal."""
    found: dict[str, dict[Place, list[Measurement]]] = {}
    for record in records:
        case = record.case
        panel = f"heads {case['num_heads']}/{case['num_kv_heads']}"
        panel += ", causal" if case["causal"] else ""
        place = int(case["head_dim"]), int(case["length"])
        found.setdefault(panel, {}).setdefault(place, []).append(record)
    return found


def _race(records: Rows, rival: str) -> tuple[float, str] | None:
    """How many times as fast octavo is at one shape, and both times; None where one is missing.

    octavo is its FP8 implementation that was chosen by itself, not the fastest.
    """
    own = [record for record in records if record.case.get("is_selected")]
    others = [record for record in records if _RIVALS[rival](record)]
    if not own or not others:
        return None
    first, other = own[0], min(others, key=_ms)
    times = " against ".join(
        f"{escape(one.impl)} {one.case['operands']} {_ms(one):.3g} ms" for one in (first, other)
    )
    return _ms(other) / _ms(first), f"{first.case['shape']}: {times}"


def _ms(record: Measurement) -> float:
    return record.values["median_ms"]


def _cell(records: Rows) -> str:
    races = [_race(records, rival) for rival in _RIVALS]
    return " / ".join(f"{race[0]:.2f}" if race else MISSING for race in races)


def _ratios(records: Rows, rival: str) -> list[float]:
    shapes = [own for places in _panels(records).values() for own in places.values()]
    return [race[0] for own in shapes if (race := _race(own, rival)) is not None]


def _headline(records: Rows) -> str:
    said = []
    for rival in _RIVALS:
        if ratios := _ratios(records, rival):
            faster = sum(ratio > 1 for ratio in ratios)
            said.append(
                f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as {rival}, and faster at "
                f"{faster} of {len(ratios)} shapes"
            )
    return f"Attention in FP8 is {'; '.join(said)}." if said else ""


GRID = Kind(
    ops=(ATTENTION_GRID,),
    needs="shape operands median_ms num_heads num_kv_heads head_dim length",
    by="load_s",
    title="Attention over a grid of shapes",
    text="As many tokens at every shape, as sequences of one length; operands are quantized "
    "beforehand. octavo is the FP8 implementation that it chooses by itself. Others in FP8 may "
    "add up in one level, or give a result in FP8.",
    headline=_headline,
    figures=_figures,
    tables=grid_tables,
)
