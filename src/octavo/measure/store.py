"""Append and read measurements, and other JSON Lines: one row per line, never rewritten.

A row reaches the file in one write under a lock, so appenders in different processes do not mix.
What a crash can leave is a last line without its end: reading skips it with a warning, and the next
append removes it.
"""

import fcntl
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from io import RawIOBase
from pathlib import Path
from typing import Generic, TypeVar

from octavo.atomic import sync_folder
from octavo.errors import CheckpointError, ConfigError
from octavo.measure.records import Measurement

Row = TypeVar("Row")


@dataclass(frozen=True)
class RowFormat(Generic[Row]):
    """How a row is read from its line, and the bytes that every line begins with.

    parse raises CheckpointError if a line is no row.
    """

    parse: Callable[[str], Row]
    start: bytes


MEASUREMENTS = RowFormat(Measurement.from_json, start=b'{"schema": ')


class TornLineWarning(UserWarning):
    """The last line of a file has no end: its writer was stopped in the middle."""


def shipped() -> Path:
    """The folder of the records that come with octavo: in the package, or in its checkout."""
    package = Path(str(files("octavo")))
    own = package / "results"
    return package.parents[1] / "results" if package.parent.name == "src" else own


def append(path: str | os.PathLike[str], rows: Iterable[Measurement]) -> None:
    """Add rows at the end of the file, on disk when this returns; makes the file if there is none.

    Raises ConfigError if its folder does not exist, CheckpointError if the last line is no row.
    """
    append_lines(path, [row.to_json() for row in rows], MEASUREMENTS)


def append_lines(path: str | os.PathLike[str], rows: Iterable[str], format: RowFormat[Row]) -> None:
    """Add rows, which are lines of JSON already, as `append` does."""
    lines = [row.encode("ascii") + b"\n" for row in rows]
    check_folder(path)
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        _repair_end(file, path, format)
        for line in lines:
            _write_whole(file, line)
        os.fsync(file.fileno())
    sync_folder(Path(path).parent)


def check_folder(path: str | os.PathLike[str] | None) -> None:
    """Raise ConfigError if `append` could not make this file; None is no file."""
    if path is not None and not (folder := Path(path).parent).is_dir():
        raise ConfigError(f"expected an existing folder for {os.fspath(path)}; create {folder}")


def read(path: str | os.PathLike[str]) -> list[Measurement]:
    """The rows of a file, or of all *.jsonl files of a folder in the order of their names."""
    place = Path(path)
    if not place.exists():
        raise CheckpointError(f"expected a file or folder of measurements, found none at {place}")
    files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    if not files:
        raise CheckpointError(f"expected *.jsonl files in the folder {path}, found none")
    return [row for file in files for row in read_lines(file, MEASUREMENTS)]


def read_lines(path: Path, format: RowFormat[Row]) -> list[Row]:
    """The rows of one file; a last line without its end is skipped with a warning."""
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # waits for a row that is being written
        *lines, end = file.read().split(b"\n")
    numbered = enumerate(lines, 1)
    rows = [_parse(line, path, number, format) for number, line in numbered if line.strip()]
    if end.strip() and (last := _parse_end(end, path, len(lines) + 1, format)) is not None:
        rows.append(last)
    return rows


def _parse(line: bytes, path: str | os.PathLike[str], number: int, format: RowFormat[Row]) -> Row:
    try:
        return format.parse(line.decode("utf-8"))
    except (CheckpointError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{os.fspath(path)}:{number}: {error}") from error


def _parse_end(
    end: bytes, path: str | os.PathLike[str], number: int, format: RowFormat[Row]
) -> Row | None:
    """The row after the last newline; None, with a warning, where it is the beginning of one."""
    try:
        return _parse(end, path, number, format)
    except CheckpointError:
        # A file that grew before its data arrived ends in zeros.
        start = end.rstrip(b"\0")[: len(format.start)]
        if not format.start.startswith(start):
            raise
    warnings.warn(
        f"{os.fspath(path)}:{number}: the last line is incomplete, its writer was stopped; skipped",
        TornLineWarning,
        stacklevel=4,
    )
    return None


def _repair_end(file: RawIOBase, path: str | os.PathLike[str], format: RowFormat[Row]) -> None:
    """Let the file end in a newline: complete the last row, or remove what a crash left of it."""
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.readall()
    start = content.rfind(b"\n") + 1
    if _parse_end(content[start:], path, content.count(b"\n") + 1, format) is None:
        file.truncate(start)
    else:
        _write_whole(file, b"\n")


def _write_whole(file: RawIOBase, line: bytes) -> None:
    """Write all of `line`, in one piece where the disk lets us, or nothing of it."""
    before = file.seek(0, os.SEEK_END)
    try:
        while line:
            line = line[file.write(line) or 0 :]
    except BaseException:
        file.truncate(before)
        raise
