"""Which weight file of a model is damaged, and how: for errors when loading has failed."""

import json
from collections.abc import Iterator
from pathlib import Path

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError
from octavo.integrations.checkpoints.tensor_files import damaged, read_header


def find_damage(place: Path) -> str | None:
    """What is wrong with a weight file, or with the first damaged one of a folder, and what to do.

    None if headers and sizes of all safetensors and GGUF files are right, and every file that an
    index names is there. The numbers themselves are not read.
    """
    try:
        for file in _weight_files(place):
            if file.suffix == ".gguf":
                _check_gguf(file)
            else:
                _check_tensors(file)
    except CheckpointError as error:
        return str(error)
    return None


def _weight_files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
        return
    for front in ("", "*/"):  # the components of a pipeline have folders of their own
        for index in sorted(place.glob(f"{front}*.index.json")):
            _check_index(index)
        yield from sorted(place.glob(f"{front}*.safetensors"))
        yield from sorted(place.glob(f"{front}*.gguf"))


def _check_index(index: Path) -> None:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (index.parent / name).is_file()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(index, f"expected the index of weight files, got {error!r}") from None
    if missing:
        raise CheckpointError(
            f"{index} names weight files that are missing: {list_names(missing)}; download or copy "
            "them again"
        )


def _check_tensors(path: Path) -> None:
    end = max((entry.stop for entry in read_header(path)), default=0)
    if end and end != (size := path.stat().st_size):
        raise damaged(path, f"expected {end:,} bytes by its header, got {size:,}")


def _check_gguf(path: Path) -> None:
    with open(path, "rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise damaged(path, f"expected a GGUF file, got one that begins with {brief(start)}")
    try:
        from gguf import GGUFReader
    except ImportError:
        return
    try:
        GGUFReader(path)
    except (IndexError, KeyError, OSError, OverflowError, ValueError) as error:
        reason = f"its content ends too early or is no GGUF ({brief(str(error))})"
        raise damaged(path, reason) from None
