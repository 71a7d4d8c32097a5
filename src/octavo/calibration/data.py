"""Images to calibrate on: from a folder, a .jsonl or .parquet file, or a data set's name.

A prompt is what one request brings: a list of one or more images, RGB. Prompts come in a fixed
order, so that a run that was interrupted can go on with the next one.
"""

import base64
import binascii
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.brief import brief, list_names
from octavo.errors import CheckpointError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
FIELDS = ("image", "images")

ImagePrompt = list["Image"]
Reader = Callable[[int], Iterator[ImagePrompt]]  # the prompts from this one on


@dataclass(frozen=True)
class ImageData:
    """Prompts of images, opened when they are asked for.

    name: what was asked for. fingerprint: other data has another one. num_prompts: how many there
    are; None where only the end will tell.
    """

    name: str
    fingerprint: str
    num_prompts: int | None
    read: Reader

    def prompts(self, num_prompts: int, *, start: int = 0) -> Iterator[ImagePrompt]:
        """The first `num_prompts`, or as many as there are, without the first `start`."""
        return islice(self.read(start), max(0, num_prompts - start))


def open_images(data: str, *, split: str = "train", subset: str | None = None) -> ImageData:
    """The images of a folder, of a file with one prompt per row, or of a data set on the hub.

    Rows have a field "image" or "images": a path, base64 or a data URL in .jsonl; bytes, or bytes
    with a path, in .parquet. split and subset: of a data set.
    """
    path = Path(data)
    if data and path.is_dir():
        return _folder(data, path)
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            raise ConfigError(f"expected a file of images, got none at {data}")
        fingerprint = f"{path.resolve()} {path.stat().st_size}"
        if path.suffix == ".jsonl":
            return ImageData(data, fingerprint, None, partial(_read_jsonl, path))
        read = _open_rows(data, path.parent, "parquet", data_files=str(path), split="train")
        return ImageData(data, fingerprint, None, read)
    is_path = not data or path.exists() or data.startswith((".", "/", "~")) or data.count("/") > 1
    if is_path:
        raise ConfigError(
            f"expected a folder of images, a .jsonl or .parquet file, or a data set's name such as "
            f"lmarena-ai/VisionArena-Chat, got {brief(data)}"
        )
    fingerprint = f"{data} {subset or 'default'} {split}"
    return ImageData(data, fingerprint, None, _open_rows(data, None, data, subset, split=split))


def batches(prompts: Iterator[ImagePrompt], batch_size: int) -> Iterator[list[ImagePrompt]]:
    """The prompts in lists of `batch_size`; the last may be shorter."""
    if batch_size < 1:
        raise ConfigError(f"expected a batch_size from 1 on, got {batch_size}")
    while batch := list(islice(prompts, batch_size)):
        yield batch


def _folder(name: str, folder: Path) -> ImageData:
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if not paths:
        raise ConfigError(
            f"expected images ({', '.join(SUFFIXES)}) in the folder {name}, got none; "
            "subfolders are not searched"
        )
    listing = "\n".join(f"{path.name} {path.stat().st_size}" for path in paths)
    digest = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def read(start: int) -> Iterator[ImagePrompt]:
        for path in paths[start:]:
            yield [_open(path, str(path))]

    return ImageData(name, f"{len(paths)} images {digest}", len(paths), read)


def _read_jsonl(path: Path, start: int) -> Iterator[ImagePrompt]:
    with open(path, "rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in islice(lines, start, None):
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{where}: expected JSON: {error}") from None
            yield _prompt(row, where, path.parent)


def _open_rows(name: str, folder: Path | None, *args: str | None, **kwargs: str) -> Reader:
    """The rows of a data set; opened now, so that one that is not there is noticed at once."""
    datasets = _datasets()
    with _reading(name):
        rows = datasets.load_dataset(*args, streaming=True, **kwargs)
        # Undecoded: a damaged image is then ours to name.
        rows = rows.decode(False) if rows.features else rows

    def read(start: int) -> Iterator[ImagePrompt]:
        with _reading(name):
            for number, row in enumerate(rows.skip(start), start):
                yield _prompt(row, f"{name}, row {number}", folder)

    return read


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Whatever a data set raises on the way, with its name."""
    try:
        yield
    except (CheckpointError, ConfigError, UnsupportedError):
        raise
    except (ConnectionError, FileNotFoundError) as error:
        raise ConfigError(
            f"expected the data set {name}, which cannot be reached from here ({brief(str(error))})"
            "; give a folder of images, or a .jsonl or .parquet file"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name}: expected a data set of images: {error}") from error
    except Exception as error:  # pyarrow's and the hub's own kinds share no base with ours
        raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error


def _datasets() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedError(
            "data sets and .parquet files need the package datasets, which is not installed: "
            "pip install 'octavo[data]'"
        ) from error
    return datasets


def _prompt(row: object, where: str, folder: Path | None) -> ImagePrompt:
    """All images of one row."""
    if not isinstance(row, Mapping):
        raise CheckpointError(f"{where}: expected an object with image or images, got {brief(row)}")
    found = [row[field] for field in FIELDS if row.get(field) is not None]
    if len(found) != 1:
        got = "both" if found else f"only {list_names([str(key) for key in row]) or 'nothing'}"
        raise CheckpointError(f"{where}: expected image or images, got {got}")
    cells = found[0] if isinstance(found[0], Sequence) and not _is_text(found[0]) else found
    if not cells:
        raise CheckpointError(f"{where}: expected at least one image, got an empty list")
    return [_image(cell, where, folder) for cell in cells]


def _is_text(cell: object) -> bool:
    return isinstance(cell, str | bytes | bytearray)


def _image(cell: object, where: str, folder: Path | None) -> "Image":
    """One image: bytes, {"bytes", "path"}, a path, base64 or a data URL."""
    match cell:
        case {"bytes": bytes(content)}:
            return _open(content, where)
        case {"path": str(path)}:
            return _image(path, where, folder)
        case bytes() | bytearray():
            return _open(bytes(cell), where)
        case str() if cell.startswith("data:"):
            return _open(_decode_base64(cell.partition(",")[2], where), where)
        case str() if cell.startswith(("http://", "https://")):
            raise UnsupportedError(f"{where}: expected an image at hand, got {brief(cell)}")
        case str() if (file := _existing(cell, folder)) is not None:
            return _open(file, f"{where}: {file}")
        case str() if cell.lower().endswith(SUFFIXES):
            raise CheckpointError(f"{where}: expected an image file, got none at {brief(cell)}")
        case str():
            return _open(_decode_base64(cell, where), where)
    raise CheckpointError(f"{where}: expected an image, got {brief(cell)}")


def _existing(text: str, folder: Path | None) -> Path | None:
    """The file that a text names, relative to `folder`; None if it names none."""
    try:
        path = (folder or Path()) / os.path.expanduser(text)
        return path if path.is_file() else None
    except (OSError, ValueError):  # base64 is too long for a name
        return None


def _decode_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise CheckpointError(
            f"{where}: expected the path of an image, or one in base64, got {brief(text)}"
        ) from None


def _open(source: Path | bytes, where: str) -> "Image":
    """The image in a file or in memory, upright and in RGB."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UnsupportedError(
            "images need the package pillow, which is not installed: pip install 'octavo[data]'"
        ) from error
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CheckpointError(f"{where}: expected an image: {error}") from None
