"""Rows of questions: from csv, JSON Lines or parquet files, a folder of them, or the hub.

Questions about charts have the form of HuggingFaceM4/ChartQA: the columns image, query and label, a
list of accepted answers. They are read from a parquet or JSON Lines file, from a folder of either
(of a clone of the data set: its root, or data in it), or by its name from the `datasets` hub. Where
there are splits, it is always the one for tests. In JSON Lines, image is a path relative to the
file.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from octavo.brief import brief, list_names
from octavo.calibration.rows import read_jsonl, read_parquet
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import need
from octavo.measure.evaluate.requests import GENERATED

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
    if num_questions < 1:
        raise ConfigError(f"expected one question or more, got {num_questions}")
    if data == GENERATED:
        return generate(num_questions)
    questions = list(islice(_read_charts(data), num_questions))
    if not questions:
        raise CheckpointError(f"expected questions in {data}, got none")
    return questions


def _read_charts(data: str) -> Iterator[ChartQuestion]:
    path = Path(data)
    if not path.exists():
        for line in read_split(data, "test", CHART_COLUMNS):
            yield _chart_question(line, Path())
        return
    for file in _find_files(path) if path.is_dir() else [path]:
        for line in read_files(file, CHART_COLUMNS, CHART_SUFFIXES):
            yield _chart_question(line, file.parent)


def _find_files(folder: Path) -> list[Path]:
    """The files of a folder, or of data in it; of those of several splits, the ones for tests."""
    for place in (folder, folder / "data"):
        if place.is_dir():
            files = sorted(file for file in place.iterdir() if file.suffix in CHART_SUFFIXES)
            if files:
                return _of_test_split(files)
    raise CheckpointError(f"expected *.parquet or *.jsonl files in {folder} or its data, got none")


def _of_test_split(files: list[Path]) -> list[Path]:
    """All files, unless their names are of splits, as in train-00000-of-00003.parquet."""
    splits = [re.split(r"[-_.]", file.name)[0].lower() for file in files]
    if not set(splits) & OTHER_SPLITS:
        return files
    found = [file for file, split in zip(files, splits, strict=True) if split == "test"]
    if not found:
        names = ", ".join(file.name for file in files[:3])
        raise CheckpointError(
            f"expected files of the test split (test-*.parquet) in {files[0].parent}, got {names}: "
            "name the file to read"
        )
    return found


def _chart_question(line: Line, folder: Path) -> ChartQuestion:
    row, where = line
    label = row["label"]
    answers = (label,) if isinstance(label, str) else tuple(label or ())
    try:
        return ChartQuestion(_image(row["image"], folder), row["query"], answers)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _image(value: Any, folder: Path) -> Any:
    """A pillow image out of one, its bytes, the `datasets` form of them, or a path."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, Image.Image):
        return value
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    try:
        if isinstance(value, bytes):
            return Image.open(io.BytesIO(value)).convert("RGB")
        if isinstance(value, str):
            return Image.open(folder / value).convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise CheckpointError(f"expected an image: {error}") from None
    raise CheckpointError(f"expected an image or the path of one, got {brief(value)}")
