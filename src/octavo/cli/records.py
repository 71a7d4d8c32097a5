"""What a command measures: a bar meanwhile, then records on stdout or in a file, and documents."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import Progress

from octavo.cli.console import err, out
from octavo.cli.options import check_folder, row_file
from octavo.cli.tables import print_objections, print_table

if TYPE_CHECKING:
    from octavo.measure.bench.benchmark import Objection
    from octavo.measure.records import Measurement


# Seconds between two drawings of a bar: a millisecond each is then lost in what is measured.
EVERY_S = 2.0


class StillProgress(Progress):
    """A bar that no thread draws: one would take turns with the Python that is measured."""

    def __init__(self) -> None:
        super().__init__(console=err, auto_refresh=False)
        self._drawn_s = 0.0

    def step(self, task: Any, description: str) -> None:
        """One more of a task's parts is done, or begins; drawn now and then."""
        now = time.monotonic()
        is_due = now - self._drawn_s > EVERY_S
        self.update(task, advance=1, description=description, refresh=is_due)
        if is_due:
            self._drawn_s = now


def print_json(records: "Iterable[Measurement]") -> None:
    """Print the records as JSON Lines: --json."""
    for record in records:
        typer.echo(record.to_json())


def print_file(output: Path | None) -> None:
    """Say which file the records are in, if there is one: --output."""
    if output is not None:
        out.print(f"Records: {output}", soft_wrap=True)


class Collected:
    """Records as they come: each is appended to the file of --output at once, if there is one."""

    def __init__(self, output: Path | None) -> None:
        check_folder(output)
        self.output = output
        self.records: list[Measurement] = []
        self.objections: list[Objection] = []

    def keep(
        self, records: "Sequence[Measurement]", objections: "Iterable[Objection]" = ()
    ) -> None:
        """Take the records of a part that is done, and who could not take part in it."""
        from octavo.measure import store

        self.records += records
        self.objections += objections
        if self.output is not None:
            store.append(self.output, records)

    def print_tables(self, key: str, columns: Sequence[str], caption: str) -> None:
        """A table for each value of a case's key; caption: with the first case's fields."""
        from octavo.measure.report.tables import from_records

        for value in dict.fromkeys(record.case[key] for record in self.records):
            found = [record for record in self.records if record.case[key] == value]
            text = caption.format(baseline=found[0].baseline, **found[0].case)
            print_table(from_records(found, caption=text, columns=columns))
        print_objections(self.objections)
        print_file(self.output)


def write_result(path: Path, document: Mapping[str, Any], *, indent: int = 4) -> None:
    """Write a document of JSON, such as vLLM's file of a run, and say where it is."""
    from octavo.atomic import write_atomically

    text = json.dumps(document, indent=indent, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())
    err.print(f"Result: {path}", soft_wrap=True)


def write_results(
    path: Path,
    documents: Mapping[Any, Mapping[str, Any]],
    *,
    is_several: bool,
) -> None:
    """Write a document to the path; of several, each to a file with its words in the name."""
    for words, document in documents.items():
        write_result(row_file(path, *words) if is_several else path, document)
