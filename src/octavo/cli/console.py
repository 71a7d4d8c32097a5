"""What commands print: text, tables, progress bars and records; and how an error ends a command.

Exit codes: 0 good, 1 failed, 2 wrong usage, 130 interrupted.
"""

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from octavo.cli.options import check_file, row_file
from octavo.errors import OctavoError
from octavo.extras import explain_missing

if TYPE_CHECKING:
    from octavo.measure.bench.benchmark import Objection
    from octavo.measure.records import Measurement
    from octavo.measure.report.sections import Section
    from octavo.measure.report.tables import Table

# Texts come from files and errors too: no [markup], :emoji: or guessed colours in them.
out = Console(markup=False, emoji=False, highlight=False)
err = Console(markup=False, emoji=False, highlight=False, stderr=True)

CASES = "cases"  # stands for the columns of all cases
_LONG = 30  # cells beyond this many characters may be folded
TIMED_S = 2.0  # between two drawings of a bar over timed code, each of which takes a millisecond
_WIDE = 160  # columns of a file or a pipe, which have no edge to fold at


def print_error(message: str) -> None:
    """Print one readable paragraph on stderr; control characters are shown as codes."""
    err.print(Text.assemble(("error: ", "bold red"), _printable(message)), soft_wrap=True)


@contextmanager
def errors_reported(*, is_debug: bool) -> Iterator[None]:
    """Turn what a command raises into a paragraph and an exit code; debugging adds a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print_error("interrupted")
        raise typer.Exit(130) from None
    except Exception as error:
        # Wrong usage and exits carry the code that the process ends with.
        is_typers = isinstance(error, typer.Abort) or hasattr(error, "exit_code")
        if is_typers or isinstance(error, BrokenPipeError):
            raise
        if is_debug:
            err.print(Text(_printable(traceback.format_exc())), soft_wrap=True)
        print_error(_explain(error))
        raise typer.Exit(1) from None


def _explain(error: Exception) -> str:
    if message := explain_missing("this command", error):
        return message
    match error:
        case OctavoError():
            return str(error)
        case OSError(strerror=str(reason), filename=str(path)):
            return f"{reason}: {path}"
        case OSError():
            return str(error)
    return (
        f"{type(error).__name__}: {error}\n"
        "This is a bug in octavo. `octavo --debug ...` shows where it happened; please report it."
    )


def _printable(text: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


@contextmanager
def progress_bar(
    title: str, total: int | None = None, *, every_s: float | None = None, is_quiet: bool = False
) -> "Iterator[Callable[..., None]]":
    """Show a progress bar on stderr inside; yields `move(what=None, done=None, total=None)`.

    Without `done`, one more part is done. every_s: draw only in `move`, at most this often, for
    code that is timed: the thread that otherwise draws would compete with it for the interpreter.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    is_drawn = every_s is None
    with Progress(*columns, console=err, auto_refresh=is_drawn, disable=is_quiet) as progress:
        task = progress.add_task(title, total=total)
        drawn_s = -math.inf

        def move(
            what: str | None = None, done: int | None = None, total: int | None = None
        ) -> None:
            nonlocal drawn_s
            is_due = every_s is not None and time.monotonic() - drawn_s >= every_s
            progress.update(
                task,
                description=what,
                completed=done,
                advance=1 if done is None else None,
                total=total,
                refresh=is_due,
            )
            drawn_s = time.monotonic() if is_due else drawn_s

        yield move


def print_table(table: "Table") -> None:
    """Print a table: numbers to the right, text to the left, long text folded."""
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(title=table.caption, title_justify="left", box=box.SIMPLE)
    texts = table.texts()
    for index, head in enumerate(table.header):
        longest = max((len(row[index]) for row in texts), default=0)
        justify = "right" if table.numeric[index] else "left"
        shown.add_column(head, justify=justify, overflow="fold", no_wrap=longest <= _LONG)  # type: ignore[arg-type]
    for row in texts:
        shown.add_row(*map(Text, row))
    console = out if out.is_terminal else Console(file=out.file, width=_WIDE)
    console.print(shown)


def print_parts(parts: "Iterable[str | Table]", style: str | None = None) -> None:
    """Print lines, in a style, and tables as they come."""
    for part in parts:
        if isinstance(part, str):
            out.print(part, style=style, soft_wrap=True)
        else:
            print_table(part)


def print_verdicts(records: "Sequence[Measurement]") -> None:
    """Print whether to use FP8 by these records, for each model and workload among them."""
    from octavo.measure.report.evidence import make_verdicts
    from octavo.measure.report.verdict import RATING_STYLES, verdict_lines

    for rating, text in verdict_lines(make_verdicts(records)):
        out.print(text, style=rating and RATING_STYLES[rating], soft_wrap=True)


def print_json(records: "Iterable[Measurement]") -> None:
    """Print the records as JSON Lines: --json."""
    for record in records:
        typer.echo(record.to_json())


def print_file(output: Path | None) -> None:
    """Say which file the records are in, if there is one: --output."""
    if output is not None:
        out.print(f"Records: {output}", soft_wrap=True)


def write_plots(
    path: Path, sections: "Sequence[Section]", records: "Sequence[Measurement]", title: str
) -> None:
    """Write a page with the plots of some records, and say where it is: --plot."""
    from octavo.measure.report.html import write_report

    machines = [record.machine for record in records]
    commands = [record.command for record in records]
    write_report(sections, path, title=title, machines=machines, commands=commands)
    err.print(f"Plots: {path}", soft_wrap=True)


class Collected:
    """Records as they come: each is appended to the file of --output at once, if there is one.

    before: records that are in the file already.
    """

    def __init__(self, output: Path | None, before: "Iterable[Measurement]" = ()) -> None:
        check_file(output)
        self.output = output
        self.records: list[Measurement] = [*before]
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
        """Print a table for each value of a field, and who could not take part and why.

        columns: CASES stands for all that cases have. caption: with the first record's fields.
        """
        from octavo.measure.report.attention_grid import ATTENTION_GRID, grid_tables
        from octavo.measure.report.tables import Table, from_records

        for value in dict.fromkeys(record.get(key) for record in self.records):
            found = [record for record in self.records if record.get(key) == value]
            if value == ATTENTION_GRID:
                print_parts(grid_tables(found))
                continue
            cases = dict.fromkeys(name for record in found for name in record.case)
            names = [one for name in columns for one in (cases if name == CASES else (name,))]
            text = caption.format(**{**vars(found[0]), **found[0].case})
            print_table(from_records(found, caption=text, columns=names))
        if rows := dict.fromkeys((o.op, o.name, o.operands, o.reason) for o in self.objections):
            header = ("op", "impl", "operands", "why not")
            print_table(Table(caption="Not measured here", header=header, rows=tuple(rows)))
        print_file(self.output)


def write_result(path: Path, document: Mapping[str, Any], *, indent: int = 4) -> None:
    """Write a document of JSON, such as vLLM's file of a run, and say where it is."""
    from octavo.atomic import write_atomically

    text = json.dumps(document, indent=indent, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())
    err.print(f"Result: {path}", soft_wrap=True)


def write_results(
    path: Path, documents: Mapping[Any, Mapping[str, Any]], *, is_several: bool
) -> None:
    """Write a document to the path; of several, each to a file with its words in the name."""
    for words, document in documents.items():
        write_result(row_file(path, *words) if is_several else path, document)
