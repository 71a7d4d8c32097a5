"""Records of a command that has run: as JSON Lines on stdout, or where they are."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from octavo.cli.console import out

if TYPE_CHECKING:
    from octavo.measure.records import Measurement


def print_json(records: "Iterable[Measurement]") -> None:
    """Print the records as JSON Lines: --json."""
    for record in records:
        typer.echo(record.to_json())


def print_file(output: Path | None) -> None:
    """Say which file the records are in, if there is one: --output."""
    if output is not None:
        out.print(f"Records: {output}", soft_wrap=True)
