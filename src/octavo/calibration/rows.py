"""Rows of .jsonl and .parquet files and of data sets on the hub, from any one of them on."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import need

T = TypeVar("T")
ROW_SUFFIXES = (".jsonl", ".parquet")
# Rows of parquet in memory at once: a chat of a million tokens has megabytes.
BATCH_SIZE = 16


class Row(NamedTuple):
    """One row: its content, where it stands, and the folder that its paths are relative to."""

    content: Any
    where: str
    folder: Path | None = None


class Rows(NamedTuple):
    """The rows of a file or a data set. fingerprint: other rows have another one."""

    fingerprint: str
    read: Callable[[int], Iterator[Row]]  # the rows from this one on


def is_path(data: str) -> bool:
    """Whether a text can only be the path of something here, not a data set's name."""
    looks_like_one = data.startswith((".", "/", "~")) or data.count("/") > 1
    return not data or looks_like_one or Path(data).exists()


def open_file(path: Path, what: str) -> Rows:
    """The rows of a .jsonl or .parquet file of `what`, in words: images, texts."""
    if not path.is_file():
        raise ConfigError(f"expected a file of {what}, got none at {path}")
    read = read_jsonl if path.suffix == ".jsonl" else read_parquet
    return Rows(file_fingerprint(path), partial(read, path))


def open_dataset(name: str, what: str, *, split: str, subset: str | None) -> Rows:
    """The rows of a data set of `what` by its name on the hub; opened now, to notice if it is not
    there.
    """
    need("reading data sets", "datasets")
    import datasets  # type: ignore[import-untyped]

    with _reading(name, what):
        rows = datasets.load_dataset(name, subset, split=split, streaming=True)
        # Undecoded: a damaged image is then ours to name.
        rows = rows.decode(False) if rows.features else rows

    def read(start: int) -> Iterator[Row]:
        with _reading(name, what):
            for number, content in enumerate(rows.skip(start), start + 1):
                yield Row(content, f"{name}: row {number}")

    return Rows(f"{name} {subset or 'default'} {split}", read)


@contextmanager
def _reading(name: str, what: str) -> Iterator[None]:
    """Inside, whatever a data set raises is an error of ours with its name."""
    try:
        yield
    except (CheckpointError, ConfigError, UnsupportedError):
        raise
    except (ConnectionError, FileNotFoundError) as error:
        raise ConfigError(
            f"expected the data set {name}, which cannot be reached from here ({brief(str(error))})"
            f"; give a folder of {what}, or a .jsonl or .parquet file"
        ) from error
    except Exception as error:  # pyarrow's and the hub's own kinds share no base with ours
        raise CheckpointError(
            f"{name}: expected a data set of {what}: {type(error).__name__}: {error}"
        ) from error


def read_jsonl(path: Path, start: int = 0) -> Iterator[Row]:
    """The rows of a JSON Lines file; blank lines are none."""
    with open(path, "rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in islice(lines, start, None):
            where = f"{path}:{number}"
            yield Row(parse_json(line, where), where, path.parent)


def made_of(rows: Iterator[Row], make: Callable[[Row], T]) -> Iterator[T]:
    """What `make` makes of each row; its errors get the place of their row."""
    for row in rows:
        try:
            made = make(row)
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{row.where}: {error}") from None
        yield made


def parse_json(text: str | bytes, where: str) -> Any:
    """What the JSON says; CheckpointError names where it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise CheckpointError(f"{where}: expected JSON: {error}") from None


def read_parquet(path: Path, start: int = 0, columns: tuple[str, ...] = ()) -> Iterator[Row]:
    """The rows of a parquet file; columns: all that is read, and must be there; () is any."""
    need("reading parquet", "pyarrow")
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if missing := [name for name in columns if name not in file.schema_arrow.names]:
                raise CheckpointError(f"{path}: expected columns {columns}, got no {missing}")
            number = 0
            for batch in file.iter_batches(batch_size=BATCH_SIZE, columns=list(columns) or None):
                rows = batch.slice(max(0, start - number)).to_pylist()
                number += batch.num_rows
                for place, content in enumerate(rows, number - len(rows) + 1):
                    yield Row(content, f"{path}: row {place}", path.parent)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise CheckpointError(f"{path}: expected a parquet file: {error}") from None


def file_fingerprint(path: Path) -> str:
    """A file by its place and size: those of its content would take as long as reading it."""
    return f"{path.resolve()} {path.stat().st_size}"


def listing_digest(paths: Sequence[Path]) -> str:
    """Files of one folder by their names and sizes."""
    listing = "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:16]
