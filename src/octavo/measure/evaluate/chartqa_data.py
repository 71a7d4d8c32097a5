"""Questions about charts: generated ones, or data of the form of HuggingFaceM4/ChartQA.

That form has the columns image, query and label, a list of accepted answers. It is read from a
parquet or JSON Lines file, from a folder of either (of a clone of the data set: its root, or data
in it), or by its name from the `datasets` hub. Where there are splits, it is always the one for
tests. In JSON Lines, image is a path relative to the file.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError
from octavo.measure.evaluate.question_files import Line, read_files, read_split
from octavo.measure.evaluate.requests import GENERATED

COLUMNS = ("image", "query", "label")
SUFFIXES = (".jsonl", ".parquet")
OTHER_SPLITS = frozenset({"dev", "train", "val", "valid", "validation"})


@dataclass(frozen=True)
class Question:
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


def load_questions(
    data: str, num_questions: int, generate: Callable[[int], list[Question]]
) -> list[Question]:
    """The first questions of `data`: "generated", a path, or the name of a data set.

    generate: makes so many questions.
    """
    if num_questions < 1:
        raise ConfigError(f"expected one question or more, got {num_questions}")
    if data == GENERATED:
        return generate(num_questions)
    questions = list(islice(_read(data), num_questions))
    if not questions:
        raise CheckpointError(f"expected questions in {data}, got none")
    return questions


def _read(data: str) -> Iterator[Question]:
    path = Path(data)
    if not path.exists():
        for line in read_split(data, "test", COLUMNS):
            yield _question(line, Path())
        return
    for file in _find_files(path) if path.is_dir() else [path]:
        for line in read_files(file, COLUMNS, SUFFIXES):
            yield _question(line, file.parent)


def _find_files(folder: Path) -> list[Path]:
    """The files of a folder, or of data in it; of those of several splits, the ones for tests."""
    for place in (folder, folder / "data"):
        if place.is_dir():
            files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES)
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


def _question(line: Line, folder: Path) -> Question:
    row, where = line
    label = row["label"]
    answers = (label,) if isinstance(label, str) else tuple(label or ())
    try:
        return Question(_image(row["image"], folder), row["query"], answers)
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
