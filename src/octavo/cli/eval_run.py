"""Run an evaluation with a progress bar, then print its table."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from octavo.cli.console import err
from octavo.cli.records import print_file
from octavo.cli.tables import print_table

if TYPE_CHECKING:
    from octavo.measure.evaluate.row_scales import Watch
    from octavo.measure.records import Measurement
    from octavo.measure.report.tables import Table

Request = TypeVar("Request")


def run_and_print(
    run: "Callable[[Request, Path | None, Watch], list[Measurement]]",
    request: Request,
    output: Path | None,
    make_table: "Callable[[list[Measurement]], Table]",
) -> "list[Measurement]":
    """The records of the request; those of a file `output` are in it already."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeLeft())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("loading", total=None)
        records = run(
            request,
            output,
            lambda what, done, total: progress.update(
                task, description=what, completed=done, total=total
            ),
        )
    print_table(make_table(records))
    print_file(output)
    return records
