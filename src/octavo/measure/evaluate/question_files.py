"""Rows of questions: from csv, JSON Lines or parquet files, a folder of them, or the hub."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.brief import brief, list_names
from octavo.calibration.rows import read_jsonl, read_parquet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import need

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
        yield from read_files(path)


def read_files(
    path: Path, columns: tuple[str, ...] = (), suffixes: tuple[str, ...] = SUFFIXES
) -> Iterator[Line]:
    """The rows of a file, or of all such files of a folder and of the folders in it.

    columns: those that every row must have, which are then all that is read of parquet; () is any.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in suffixes)
        if not files:
            raise CheckpointError(f"expected {', '.join(suffixes)} files in {path}, got none")
        for file in files:
            yield from read_files(file, columns, suffixes)
        return
    if path.suffix not in suffixes:
        raise ConfigError(f"expected a folder, or a file of {', '.join(suffixes)}, got {path.name}")
    match path.suffix:
        case ".csv":
            rows: Iterator[tuple[Any, ...]] = _read_csv(path)
        case ".jsonl":
            rows = read_jsonl(path)
        case _:
            rows = read_parquet(path, columns=columns)
    for row, where, *_ in rows:
        yield _check(row, where, columns)


def read_split(name: str, split: str, columns: tuple[str, ...] = ()) -> Iterator[Line]:
    """A split of a data set by its name, streamed from the hub or found in its cache."""
    for number, row in enumerate(_load_dataset(name, split=split), 1):
        yield _check(row, f"{name}: row {number}", columns)


def _check(row: Any, where: str, columns: tuple[str, ...]) -> Line:
    if not isinstance(row, Mapping) or not all(name in row for name in columns):
        got = list(row) if isinstance(row, Mapping) else brief(row)
        expected = ", ".join(columns) or "an object"
        raise CheckpointError(f"{where}: expected {expected}, got {got}")
    return Line(row, where)


def _read_csv(path: Path) -> Iterator[tuple[Any, str]]:
    before = csv.field_size_limit(MAX_CELL)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), 1):
                if None in row or None in row.values():
                    raise CheckpointError(
                        f"{path}: row {number}: expected a cell for each column, got others"
                    )
                yield row, f"{path}: row {number}"
    except (csv.Error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: expected a csv file in UTF-8: {error}") from None
    finally:
        csv.field_size_limit(before)


def _read_hub(name: str, subset: str | None, split: str | None) -> Iterator[Line]:
    found = _load_dataset(name, subset)
    chosen = split or ("test" if "test" in found or len(found) != 1 else next(iter(found)))
    if chosen not in found:
        raise ConfigError(
            f"{name}: expected --split, one of {list_names(list(found))}, got {chosen!r}"
        )
    for number, row in enumerate(found[chosen], 1):
        yield Line(row, f"{name}: row {number}")


def _load_dataset(name: str, *words: str | None, **options: str) -> Any:
    need(f"{name} is not a path here; loading it as a data set", "datasets")
    import datasets  # type: ignore[import-untyped]

    try:
        return datasets.load_dataset(name, *words, **options, streaming=True)
    except Exception as error:  # datasets raises whatever its network stack does
        raise UnsupportedError(
            f"expected a path or a data set that can be loaded, got {name!r}: {error}"
        ) from None


def unique_names(names: list[str]) -> list[str]:
    """The names of questions, if all have one of their own; else their numbers, from 1 on."""
    if all(names) and len(set(names)) == len(names):
        return names
    return [str(number) for number in range(1, len(names) + 1)]
