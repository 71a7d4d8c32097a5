"""Rows of questions: from csv, JSON Lines or parquet files, a folder of them, or the hub.

Questions about charts have the form of HuggingFaceM4/ChartQA: the columns image, query and label, a
list of accepted answers. They are read from a parquet or JSON Lines file, from a folder of either
(of a clone of the data set: its root, or data in it), or by its name from the `datasets` hub. Where
there are splits, it is the one for tests. In JSON Lines, image is a path relative to the file.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from octavo.brief import brief, list_names
from octavo.calibration.data import read_image
from octavo.calibration.rows import Row, made_of, read_jsonl, read_parquet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import need
from octavo.measure.evaluate.requests import GENERATED

T = TypeVar("T")
SUFFIXES = (".csv", ".jsonl", ".parquet")
# Cells of a csv file may be whole solutions.
MAX_CELL = 10_000_000


def read_questions(
    make: Callable[[Row], T],
    data: str,
    subset: str | None = None,
    split: str | None = None,
    *,
    limit: int | None = None,
    columns: tuple[str, ...] = (),
    suffixes: tuple[str, ...] = SUFFIXES,
    find_files: Callable[[Path], list[Path]] | None = None,
) -> list[T]:
    """What `make` makes of the rows of a file, of all files of a folder, or of a hub's data set.

    Rows are objects; a CheckpointError of `make` gets the place of its row. subset, split: of a
    data set of the hub. Without a split it is the only one, or "test". limit: rows after it are not
    read. columns: those that every row must have, which are then all that is read of parquet; () is
    any. find_files: those of a folder; left out, all that are in it and in its folders.
    CheckpointError if there are no rows.
    """
    path = Path(data)
    if not path.exists():
        rows = _read_hub(data, subset, split)
    elif subset is not None or split is not None:
        raise ConfigError(f"--subset and --split are for data sets of the hub, {data} is a path")
    else:
        files = [path]
        if path.is_dir() and find_files is not None:
            files = find_files(path)
        elif path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in suffixes)
            if not files:
                raise CheckpointError(f"expected {', '.join(suffixes)} files in {path}, got none")
        rows = chain.from_iterable(_read_file(file, columns, suffixes) for file in files)

    def checked(row: Row) -> T:
        is_object = isinstance(row.content, Mapping)
        if is_object and all(name in row.content for name in columns):
            return make(row)
        got = list(row.content) if is_object else brief(row.content)
        raise CheckpointError(f"expected {', '.join(columns) or 'an object'}, got {got}")

    found = list(made_of(islice(rows, limit), checked))
    if not found:
        raise CheckpointError(f"expected questions in {data}, got none")
    return found


def _read_file(path: Path, columns: tuple[str, ...], suffixes: tuple[str, ...]) -> Iterator[Row]:
    if path.suffix not in suffixes:
        raise ConfigError(f"expected a folder, or a file of {', '.join(suffixes)}, got {path.name}")
    match path.suffix:
        case ".csv":
            return _read_csv(path)
        case ".jsonl":
            return read_jsonl(path)
    return read_parquet(path, columns=columns)


def _read_csv(path: Path) -> Iterator[Row]:
    before = csv.field_size_limit(MAX_CELL)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for number, cells in enumerate(csv.DictReader(file, strict=True), 1):
                if None in cells or None in cells.values():
                    raise CheckpointError(
                        f"{path}: row {number}: expected a cell for each column, got others"
                    )
                yield Row(cells, f"{path}: row {number}", path.parent)
    except (csv.Error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: expected a csv file in UTF-8: {error}") from None
    finally:
        csv.field_size_limit(before)


def _read_hub(name: str, subset: str | None, split: str | None) -> Iterator[Row]:
    need(f"{name} is not a path here; loading it as a data set", "datasets")
    import datasets  # type: ignore[import-untyped]

    try:
        found = datasets.load_dataset(name, subset, streaming=True)
    except Exception as error:  # datasets raises whatever its network stack does
        raise UnsupportedError(
            f"expected a path or a data set that can be loaded, got {name!r}: {error}"
        ) from None
    chosen = split or ("test" if "test" in found or len(found) != 1 else next(iter(found)))
    if chosen not in found:
        raise ConfigError(
            f"{name}: expected --split, one of {list_names(list(found))}, got {chosen!r}"
        )
    for number, content in enumerate(found[chosen], 1):
        yield Row(content, f"{name}: row {number}")


CHART_COLUMNS = ("image", "query", "label")
CHART_SUFFIXES = (".jsonl", ".parquet")
OTHER_SPLITS = frozenset({"dev", "train", "val", "valid", "validation"})


@dataclass(frozen=True)
class ChartQuestion:
    """A question about an image, and the answers that count as right, the first one above all."""

    image: Any  # a pillow image
    text: str
    answers: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.answers or not all(map(_is_text, self.answers)):
            raise CheckpointError(f"expected answers in label, got {brief(self.answers)}")
        if not _is_text(self.text):
            raise CheckpointError(f"expected a question in query, got {brief(self.text)}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def load_chart_questions(
    data: str, num_questions: int, generate: Callable[[int], list[ChartQuestion]]
) -> list[ChartQuestion]:
    """The first questions of `data`: "generated", a path, or the name of a data set.

    generate: makes so many questions.
    """
    if data == GENERATED:
        return generate(num_questions)
    return read_questions(
        _chart_question,
        data,
        limit=num_questions,
        columns=CHART_COLUMNS,
        suffixes=CHART_SUFFIXES,
        find_files=_files_of_test_split,
    )


def _files_of_test_split(folder: Path) -> list[Path]:
    """The files of a folder, or of data in it; only those for tests if their names are of splits.

    Such a name is train-00000-of-00003.parquet.
    """
    places = [place for place in (folder, folder / "data") if place.is_dir()]
    found = (sorted(f for f in place.iterdir() if f.suffix in CHART_SUFFIXES) for place in places)
    files = next(filter(None, found), None)
    if files is None:
        raise CheckpointError(
            f"expected *.parquet or *.jsonl files in {folder} or its data, got none"
        )
    splits = {file: re.split(r"[-_.]", file.name)[0].lower() for file in files}
    if OTHER_SPLITS.isdisjoint(splits.values()):
        return files
    chosen = [file for file in files if splits[file] == "test"]
    if not chosen:
        names = ", ".join(file.name for file in files[:3])
        raise CheckpointError(
            f"expected files of the test split (test-*.parquet) in {files[0].parent}, got {names}: "
            "name the file to read"
        )
    return chosen


def _chart_question(row: Row) -> ChartQuestion:
    from PIL.Image import Image

    image, query, label = (row.content[name] for name in CHART_COLUMNS)
    if not isinstance(image, Image):
        image = read_image(image, row.folder)
    return ChartQuestion(image, query, (label,) if isinstance(label, str) else tuple(label or ()))
