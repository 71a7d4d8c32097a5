"""Prompts to calibrate on, in a fixed order, and the rows of files and data sets they come from."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import need

Prompt = TypeVar("Prompt")

ROW_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class PromptData(Generic[Prompt]):
    """Prompts, opened when they are asked for.

    name: what was asked for. fingerprint: other data has another one. num_prompts: how many there
    are; None where only the end will tell. read: the prompts from this one on, always in the same
    order, so that a run that was interrupted can go on with the next one.
    """

    name: str
    fingerprint: str
    num_prompts: int | None
    read: Callable[[int], Iterator[Prompt]]

    def prompts(self, num_prompts: int, *, start: int = 0) -> Iterator[Prompt]:
        """The first `num_prompts`, or as many as there are, without the first `start`."""
        return islice(self.read(start), max(0, num_prompts - start))


@dataclass(frozen=True)
class Row:
    """One row: its content, where it stands, and the folder that its paths are relative to."""

    content: Any
    where: str
    folder: Path | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of a file or a data set. fingerprint: other rows have another one."""

    fingerprint: str
    read: Callable[[int], Iterator[Row]]  # the rows from this one on


def batches(prompts: Iterator[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """The prompts in lists of `batch_size`; the last may be shorter."""
    if batch_size < 1:
        raise ConfigError(f"expected a batch_size from 1 on, got {batch_size}")
    while batch := list(islice(prompts, batch_size)):
        yield batch


def is_path(data: str) -> bool:
    """Whether a text can only be the path of something here, not a data set's name."""
    looks_like_one = data.startswith((".", "/", "~")) or data.count("/") > 1
    return not data or looks_like_one or Path(data).exists()


def open_file(path: Path, what: str) -> Rows:
    """The rows of a .jsonl or .parquet file of `what`, in words: images, texts."""
    if not path.is_file():
        raise ConfigError(f"expected a file of {what}, got none at {path}")
    if path.suffix == ".jsonl":
        return Rows(file_fingerprint(path), partial(_read_jsonl, path))
    read = _open_rows(str(path), path.parent, what, "parquet", data_files=str(path), split="train")
    return Rows(file_fingerprint(path), read)


def open_dataset(name: str, what: str, *, split: str, subset: str | None) -> Rows:
    """The rows of a data set of `what`, by its name on the hub."""
    fingerprint = f"{name} {subset or 'default'} {split}"
    return Rows(fingerprint, _open_rows(name, None, what, name, subset, split=split))


def file_fingerprint(path: Path) -> str:
    """A file by its place and size: those of its content would take as long as reading it."""
    return f"{path.resolve()} {path.stat().st_size}"


def listing_digest(paths: Sequence[Path]) -> str:
    """Files of one folder by their names and sizes."""
    listing = "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _read_jsonl(path: Path, start: int) -> Iterator[Row]:
    with open(path, "rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in islice(lines, start, None):
            where = f"{path}, line {number}"
            try:
                content = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{where}: expected JSON: {error}") from None
            yield Row(content, where, path.parent)


def _open_rows(
    name: str, folder: Path | None, what: str, *args: str | None, **kwargs: str
) -> Callable[[int], Iterator[Row]]:
    """The rows of a data set; opened now, so that one that is not there is noticed at once."""
    datasets = _datasets()
    with _reading(name, what):
        rows = datasets.load_dataset(*args, streaming=True, **kwargs)
        # Undecoded: a damaged image is then ours to name.
        rows = rows.decode(False) if rows.features else rows

    def read(start: int) -> Iterator[Row]:
        with _reading(name, what):
            for number, content in enumerate(rows.skip(start), start):
                yield Row(content, f"{name}, row {number}", folder)

    return read


@contextmanager
def _reading(name: str, what: str) -> Iterator[None]:
    """Whatever a data set raises on the way, with its name."""
    try:
        yield
    except (CheckpointError, ConfigError, UnsupportedError):
        raise
    except (ConnectionError, FileNotFoundError) as error:
        raise ConfigError(
            f"expected the data set {name}, which cannot be reached from here ({brief(str(error))})"
            f"; give a folder of {what}, or a .jsonl or .parquet file"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name}: expected a data set of {what}: {error}") from error
    except Exception as error:  # pyarrow's and the hub's own kinds share no base with ours
        raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error


def _datasets() -> Any:
    need("reading data sets and .parquet files", "datasets")
    import datasets  # type: ignore[import-untyped]

    return datasets
