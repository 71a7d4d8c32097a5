"""Rows of `octavo bench latency`: the records of one command each, their fits, and comparisons.

Fits are made here again from the records of lengths, so that records from before fits had
intervals are shown like new ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.measure.fit import (
    BreakEven,
    Line,
    Quadratic,
    break_even,
    curve_break_even,
    fit_itl,
    fit_ttft,
)
from octavo.measure.records import Measurement

# Records of one section have these in common: the model, the engine and the batch.
SAME = (
    *("model", "dtype", "layers", "compile", "cuda_graphs", "page_size", "max_num_batched_tokens"),
    *("batch_size", "output_len"),
)


@dataclass(frozen=True)
class Row:
    """The records of a row by length, its fits, and the row that it is compared with."""

    name: str
    records: tuple[Measurement, ...]
    baseline: "Row | None" = None

    @property
    def lengths(self) -> list[int]:
        """The inputs' tokens, shortest first."""
        return [int(record.case["input_len"]) for record in self.records]

    @property
    def line(self) -> Line | None:
        """ITL over the context; None with one length."""
        return fit_itl(self.records) if len(self.records) > 1 else None

    @property
    def curve(self) -> Quadratic | None:
        """TTFT over the input; None with two lengths."""
        return fit_ttft(self.records) if len(self.records) > 2 else None

    def values(self, name: str) -> list[float]:
        """One value of each length."""
        return [record.values[name] for record in self.records]


def rows_of(records: Sequence[Measurement]) -> list[Row]:
    """The rows of a model, an engine and a batch.

    A row is that of one command, the one with the most lengths and of those the newest; of records
    of the same length the newest counts. It is compared with the other row of the same command, if
    there is one.
    """
    runs: dict[tuple[str, str], dict[int, Measurement]] = {}
    for record in records:
        run = runs.setdefault((str(record.case["row"]), record.command), {})
        length = int(record.case["input_len"])
        if length not in run or record.date >= run[length].date:
            run[length] = record
    # Another command may have measured at another time, with other settings: no row mixes two.
    chosen: dict[str, tuple[Measurement, ...]] = {}
    for (name, _), run in runs.items():
        own = tuple(run[length] for length in sorted(run))
        if name not in chosen or _rank(own) >= _rank(chosen[name]):
            chosen[name] = own
    found = []
    for name, own in chosen.items():
        first = own[0].baseline or ""
        run = runs.get((first, own[0].command), {})
        others = tuple(run[length] for length in sorted(run)) or chosen.get(first)
        found.append(Row(name, own, Row(first, others) if others else None))
    return found


def _rank(records: Sequence[Measurement]) -> tuple[int, str]:
    return len(records), max(record.date for record in records)


def itl_crossings(rows: Sequence[Row]) -> list[tuple[Row, Row, BreakEven]]:
    """Of each row that is compared: the row it is compared with, and where their lines cross."""
    return [
        (row, first, break_even(row.line, first.line))
        for row in rows
        if (first := row.baseline) is not None and row.line is not None and first.line is not None
    ]


def ttft_crossings(rows: Sequence[Row]) -> list[tuple[Row, Row, BreakEven]]:
    """The same of the curves of TTFT, between the lengths that both rows have."""
    return [
        (row, first, curve_break_even(row.curve, first.curve))
        for row in rows
        if (first := row.baseline) is not None and row.curve is not None and first.curve is not None
    ]
