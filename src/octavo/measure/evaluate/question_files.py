"""Rows of questions: from csv, JSON Lines or parquet files, a folder of them, or the hub."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError, ConfigError, UnsupportedError

SUFFIXES = (".csv", ".jsonl", ".parquet")
# Cells of a csv file may be whole solutions.
MAX_CELL = 10_000_000


class Line(NamedTuple):
    """A row of a data set by the names of its columns, and where it stands."""

    row: Mapping[str, Any]
    where: str


def read_lines(data: str, subset: str | None = None, split: str | None = None) -> Iterator[Line]:
    """The rows of a path, or of a data set of the hub by its name.

    subset, split: of a data set of the hub. Without a split it is the only one, or "test".
    """
    path = Path(data)
    if not path.exists():
        yield from _read_hub(data, subset, split)
    elif subset is not None or split is not None:
        raise ConfigError(f"--subset and --split are for data sets of the hub, {data} is a path")
    else:
        yield from _read_path(path)


def _read_path(path: Path) -> Iterator[Line]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise CheckpointError(f"expected {', '.join(SUFFIXES)} files in {path}, got none")
        for file in files:
            yield from _read_path(file)
        return
    match path.suffix:
        case ".csv":
            rows: Iterator[Line] = _read_csv(path)
        case ".jsonl":
            rows = _read_json_lines(path)
        case ".parquet":
            rows = _read_parquet(path)
        case _:
            raise ConfigError(
                f"expected a folder, or a file of {', '.join(SUFFIXES)}, got {path.name}"
            )
    yield from rows


def _read_csv(path: Path) -> Iterator[Line]:
    before = csv.field_size_limit(MAX_CELL)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), 1):
                if None in row or None in row.values():
                    raise CheckpointError(
                        f"{path}: row {number}: expected a cell for each column, got others"
                    )
                yield Line(row, f"{path}: row {number}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: expected a csv file in UTF-8: {error}") from None
    finally:
        csv.field_size_limit(before)


def _read_json_lines(path: Path) -> Iterator[Line]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                raise CheckpointError(f"{where}: expected JSON: {error}") from None
            if not isinstance(row, dict):
                raise CheckpointError(f"{where}: expected an object, got {brief(row)}")
            yield Line(row, where)


def _read_parquet(path: Path) -> Iterator[Line]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise UnsupportedError(
            "reading parquet needs pyarrow, not installed here: pip install 'octavo[data]'"
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise CheckpointError(f"{path}: expected a parquet file: {error}") from None
    with file:
        number = 0
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                number += 1
                yield Line(row, f"{path}: row {number}")


def _read_hub(name: str, subset: str | None, split: str | None) -> Iterator[Line]:
    """A data set by its name, streamed from the hub or found in its cache."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise UnsupportedError(
            f"{name} is no path here, and loading it as a data set needs datasets: "
            "pip install 'octavo[data]'"
        ) from None
    try:
        found: Any = datasets.load_dataset(name, subset, streaming=True)
    except Exception as error:  # datasets raises whatever its network stack does
        raise UnsupportedError(
            f"expected a path or a data set that can be loaded, got {name!r}: {error}"
        ) from None
    chosen = split or ("test" if "test" in found or len(found) != 1 else next(iter(found)))
    if chosen not in found:
        raise ConfigError(
            f"{name}: expected --split, one of {list_names(list(found))}, got {chosen!r}"
        )
    for number, row in enumerate(found[chosen], 1):
        yield Line(row, f"{name}: row {number}")


def unique_names(names: list[str]) -> list[str]:
    """The names of questions, if all have one of their own; else their numbers, from 1 on."""
    if all(names) and len(set(names)) == len(names):
        return names
    return [str(number) for number in range(1, len(names) + 1)]
