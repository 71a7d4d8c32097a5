"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

RecordsFile = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Append the records to this JSON Lines file."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the records as JSON Lines instead of a table.")
]
