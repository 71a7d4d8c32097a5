"""Questions about charts: generated ones, or data of the form of HuggingFaceM4/ChartQA.

That form has the columns image, query and label, a list of accepted answers. It is read from a
parquet or JSON Lines file, from a folder of either (of a clone of the data set: its root, or data
in it), or by its name from the `datasets` hub. Where there are splits, it is always the one for
tests. In JSON Lines, image is a path relative to the file.
"""

import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.brief import brief
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.measure.evaluate.charts import Distribution, make_chart, make_questions

COLUMNS = ("image", "query", "label")
SUFFIXES = (".parquet", ".jsonl")
OTHER_SPLITS = frozenset({"dev", "train", "val", "valid", "validation"})
GENERATED = "generated"
QUESTIONS_PER_CHART = 4


@dataclass(frozen=True)
class Question:
    """A question about a picture, and the answers that count as right, the first one above all."""

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


def load_questions(data: str, num_questions: int) -> list[Question]:
    """The first questions of `data`: "generated", a path, or the name of a data set."""
    if num_questions < 1:
        raise ConfigError(f"expected one question or more, got {num_questions}")
    if data == GENERATED:
        return generated_questions(num_questions)
    path = Path(data)
    rows = _read_path(path) if path.exists() else _read_hub(data)
    questions = list(islice(rows, num_questions))
    if not questions:
        raise CheckpointError(f"expected questions in {data}, got none")
    return questions


def generated_questions(
    num_questions: int, distribution: Distribution = "plain", first_seed: int = 0
) -> list[Question]:
    """Questions about charts of consecutive seeds, four about each; training uses other seeds."""
    from octavo.measure.evaluate.chart_drawing import draw_chart

    found: list[Question] = []
    for seed in range(first_seed, first_seed + -(-num_questions // QUESTIONS_PER_CHART)):
        chart = make_chart(seed, distribution)
        image = draw_chart(chart)
        asked = make_questions(chart, seed, QUESTIONS_PER_CHART)
        found += [Question(image, question.text, (question.answer,)) for question in asked]
    return found[:num_questions]


def _read_path(path: Path) -> Iterator[Question]:
    if path.is_dir():
        for file in _find_files(path):
            yield from _read_path(file)
    elif path.suffix == ".jsonl":
        yield from _read_jsonl(path)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path)
    else:
        raise ConfigError(f"expected a folder, a .parquet or a .jsonl file, got {path}")


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


def _read_jsonl(path: Path) -> Iterator[Question]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CheckpointError(f"{path}:{number}: not a line of JSON: {error}") from None
            yield _question(row, f"{path}:{number}", path.parent)


def _read_parquet(path: Path) -> Iterator[Question]:
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
        if missing := [name for name in COLUMNS if name not in file.schema_arrow.names]:
            raise CheckpointError(f"{path}: expected columns {COLUMNS}, got no {missing}")
        number = 0
        for batch in file.iter_batches(batch_size=64, columns=list(COLUMNS)):
            for row in batch.to_pylist():
                number += 1
                yield _question(row, f"{path}: row {number}", path.parent)


def _read_hub(name: str) -> Iterator[Question]:
    """The test split of a data set, streamed from the hub or found in its cache."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise UnsupportedError(
            f"{name} is no path here, and loading it as a data set needs datasets: "
            "pip install 'octavo[data]'"
        ) from None
    try:
        rows = datasets.load_dataset(name, split="test", streaming=True)
    except Exception as error:  # datasets raises whatever its network stack does
        raise UnsupportedError(
            f"expected a path or a data set that can be loaded, got {name!r}: {error}"
        ) from None
    for number, row in enumerate(rows, 1):
        yield _question(row, f"{name}: row {number}", Path())


def _question(row: Any, where: str, folder: Path) -> Question:
    if not isinstance(row, Mapping) or not all(name in row for name in COLUMNS):
        got = list(row) if isinstance(row, Mapping) else brief(row)
        raise CheckpointError(f"{where}: expected {', '.join(COLUMNS)}, got {got}")
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
