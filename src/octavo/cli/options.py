"""Options that several commands share."""

import re
from pathlib import Path
from typing import Annotated

import typer

from octavo.errors import ConfigError

RecordsFile = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Append the records to this JSON Lines file."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the records as JSON Lines instead of a table.")
]


def _read_strictly(context: typer.Context, strict: bool) -> bool:
    if strict:
        from octavo.calibration.scale_file import strict_reading

        context.with_resource(strict_reading())  # until the command ends
    return strict


Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        callback=_read_strictly,
        help="Refuse scale files with anything that octavo does not write. Left out, what vLLM's "
        "loader tolerates is a warning.",
    ),
]


def check_folder(path: Path | None) -> None:
    """Raise ConfigError if a file could not be written there, before anything has run for it."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"expected an existing folder for {path}, got none")
    if path.is_dir():
        raise ConfigError(f"expected the path of a file, got the folder {path}")


def row_file(path: Path, *words: str | int) -> Path:
    """The path with words before its ending, for a file of each row: v.json, v-fp8-256.json."""
    names = [re.sub(r"[^\w.+=-]", "_", str(word)) for word in words]
    return path.with_name("-".join([path.stem, *names]) + path.suffix)


def split_names(text: str) -> list[str]:
    """Names with commas between, in lower case, each once."""
    return list(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
