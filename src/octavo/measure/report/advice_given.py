"""Advice for a GPU as a section of a page: what to quantize there, what to expect, and why."""

from collections.abc import Sequence

from octavo.measure.records import Measurement
from octavo.measure.report.html import Section
from octavo.measure.report.select import grouped, newest
from octavo.measure.report.tables import Table

_UNITS = ("ms", "bytes", "count")


def given_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each model, GPU and workload that advice was asked for."""
    names = ("model", "gpu", "context", "concurrency")
    return [_section(newest(own, "what")) for own in grouped(records, *names).values()]


def _section(rows: Sequence[Measurement]) -> Section:
    case = rows[0].case
    workload = f"{case.get('concurrency', 1)} × {int(case['context']):,} tokens"
    faster = [
        f"{row.case['what']} {row.values['speedup']:.2f} times as fast"
        for row in rows
        if "speedup" in row.values
    ]
    parts = [
        "Nothing here was measured on this machine: octavo advise computes it from the sizes of "
        "the model and what is known of the GPU.",
        *_lines(case.get("reasons")),
        *(f"{row.case['what']}: {row.case['note']}." for row in rows if "note" in row.case),
    ]
    if case.get("warnings"):
        parts.append(f"Mind: {' '.join(_lines(case['warnings']))}")
    if "serve" in case:
        parts.append(f"To serve it: {case['serve']}")
    return Section(
        title=f"Advice: {case['model']} on {case['gpu']}, {workload}",
        text="\n\n".join(parts),
        headline=f"Advice for {case['model']} on {case['gpu']}, {workload}: {'; '.join(faster)}."
        if faster
        else "",
        tables=(
            Table(
                caption="What to expect of the recipe",
                header=("what", "BF16", "recipe", "speed-up (×)"),
                rows=tuple(map(_row, rows)),
            ),
            Table(
                caption="The recipe (recipe.toml)",
                header=("setting", "value"),
                rows=tuple(_settings(str(case["recipe"]))),
            ),
        ),
    )


def _row(record: Measurement) -> tuple[str | float | None, ...]:
    values = record.values
    unit = next((unit for unit in _UNITS if f"before_{unit}" in values), None)
    if unit is None:
        return (str(record.case["what"]), None, None, None)
    pair = (_text(values[f"{which}_{unit}"], unit) for which in ("before", "after"))
    return (str(record.case["what"]), *pair, values.get("speedup"))


def _text(number: float, unit: str) -> str:
    if unit == "count":
        return f"{number:,.0f}"
    if unit == "bytes":
        return f"{number / 1e9:,.2f} GB"
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.2f} ms"


def _lines(text: object) -> list[str]:
    return [line for line in str(text or "").splitlines() if line]


def _settings(recipe: str) -> list[tuple[str, str]]:
    """A recipe's TOML as pairs of a dotted name and a value."""
    import tomllib

    try:
        return list(_flat(tomllib.loads(recipe))) or [("nothing is quantized", "")]
    except tomllib.TOMLDecodeError:  # of a record that somebody wrote by hand
        return [("recipe", recipe)]


def _flat(table: dict[str, object], start: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            found += _flat(value, f"{start}{name}.")
        else:
            found.append((f"{start}{name}", str(value)))
    return found
