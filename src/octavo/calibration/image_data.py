"""Images to calibrate on: from a folder, a .jsonl or .parquet file, or a data set's name.

A prompt is what one request brings: a list of one or more images, RGB.
"""

import base64
import binascii
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.brief import brief, list_names
from octavo.calibration.data import (
    ROW_SUFFIXES,
    PromptData,
    Row,
    is_path,
    listing_digest,
    open_dataset,
    open_file,
)
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.extras import need

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
FIELDS = ("image", "images")

ImagePrompt = list["Image"]


def open_images(
    data: str, *, split: str = "train", subset: str | None = None
) -> PromptData[ImagePrompt]:
    """The images of a folder, of a file with one prompt per row, or of a data set on the hub.

    Rows have a field "image" or "images": a path, base64 or a data URL in .jsonl; bytes, or bytes
    with a path, in .parquet. split and subset: of a data set.
    """
    path = Path(data)
    if data and path.is_dir():
        return _folder(data, path)
    if path.suffix in ROW_SUFFIXES:
        rows = open_file(path, "images")
    elif is_path(data):
        raise ConfigError(
            f"expected a folder of images, a .jsonl or .parquet file, or a data set's name such as "
            f"lmarena-ai/VisionArena-Chat, got {brief(data)}"
        )
    else:
        rows = open_dataset(data, "images", split=split, subset=subset)
    return PromptData(data, rows.fingerprint, None, lambda start: map(_prompt, rows.read(start)))


def _folder(name: str, folder: Path) -> PromptData[ImagePrompt]:
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if not paths:
        raise ConfigError(
            f"expected images ({', '.join(SUFFIXES)}) in the folder {name}, got none; "
            "subfolders are not searched"
        )

    def read(start: int) -> Iterator[ImagePrompt]:
        for path in paths[start:]:
            yield [_open(path, str(path))]

    return PromptData(name, f"{len(paths)} images {listing_digest(paths)}", len(paths), read)


def _prompt(source: Row) -> ImagePrompt:
    """All images of one row."""
    row, where, folder = source.content, source.where, source.folder
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
    need("reading images", "PIL")
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CheckpointError(f"{where}: expected an image: {error}") from None
