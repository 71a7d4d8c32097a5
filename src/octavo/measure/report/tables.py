"""Tables made from measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.measure.records import Measurement
from octavo.measure.report.labels import Cell, format_column, is_number, label


@dataclass(frozen=True, kw_only=True)
class Table:
    """A caption, the heads of the columns, and rows of cells; None is a cell without a value."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ConfigError(f"every row of {self.caption!r} must have {len(self.header)} cells")

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column, whether it holds numbers."""
        return tuple(
            any(map(is_number, column)) and all(c is None or is_number(c) for c in column)
            for column in self._columns()
        )

    def texts(self) -> list[tuple[str, ...]]:
        """The rows as text, numbers formatted column by column."""
        return list(zip(*map(format_column, self._columns()), strict=True))

    def _columns(self) -> list[tuple[Cell, ...]]:
        return [tuple(row[index] for row in self.rows) for index in range(len(self.header))]


def from_records(
    records: Sequence[Measurement], *, caption: str, columns: Sequence[str] = ()
) -> Table:
    """One row per record; `columns` are names of fields, cases or values (all, if left out)."""
    names = list(columns) or all_names(records)
    return Table(
        caption=caption,
        header=tuple(map(label, names)),
        rows=tuple(tuple(record.get(name) for name in names) for record in records),
    )


def pivot(
    records: Sequence[Measurement], *, caption: str, row: str, column: str, value: str
) -> Table:
    """One row per value of `row`, one column per value of `column`, `value` in the cells."""
    cells: dict[tuple[Cell, Cell], Cell] = {}
    for record in records:
        place = record.get(row), record.get(column)
        if place in cells:
            raise ConfigError(f"two records for {row}={place[0]!r}, {column}={place[1]!r}")
        cells[place] = record.get(value)
    across = list(dict.fromkeys(place[1] for place in cells))
    down = list(dict.fromkeys(place[0] for place in cells))
    return Table(
        caption=caption,
        header=(label(row), *format_column(across)),
        rows=tuple((name, *(cells.get((name, head)) for head in across)) for name in down),
    )


def all_names(records: Sequence[Measurement]) -> list[str]:
    """`op`, `impl`, then every case and every value of the records, in the order of appearance."""
    cases = dict.fromkeys(name for record in records for name in record.case)
    values = dict.fromkeys(name for record in records for name in record.values)
    return list(dict.fromkeys(["op", "impl", *cases, *values]))
