"""Records as a table for spreadsheets: one row for each, one column for each name."""

import csv
import io
import os
from collections.abc import Sequence

from octavo.atomic import write_atomically
from octavo.measure.records import Measurement
from octavo.measure.report.tables import all_names

_FIRST = ("op", "impl", "date", "machine", "baseline")


def to_csv(records: Sequence[Measurement]) -> str:
    """All records with all that they have; a cell without a value is empty."""
    names = [name for name in all_names(records) if name not in _FIRST]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_FIRST, *names, "command"])
    for record in records:
        writer.writerow([record.get(name) for name in (*_FIRST, *names, "command")])
    return text.getvalue()


def write_csv(records: Sequence[Measurement], path: str | os.PathLike[str]) -> None:
    """Write the file in one step: a reader sees the old one or the new one."""
    write_atomically(path, to_csv(records).encode("utf-8", "backslashreplace"))
