"""A picture of pictures: rows of a table below each other, prompts beside each other."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.atomic import write_atomically
from octavo.errors import ConfigError

SHEET = "sheet.png"
SIDE = 192  # pixels of the longer side of a picture on the sheet
LINE, GAP, LABEL = 16, 4, 160  # pixels: a line of text, around a picture, the names of rows
MAX_COLUMNS = 16
MAX_COMPARED = 8  # prompts of a picture that compares two rows
QUALITY = 90  # of a JPEG


def save_pictures(
    folder: Path, prompts: Sequence[str], rows: Sequence[tuple[str, Sequence[Tensor]]]
) -> Path:
    """Write each row's pictures to a folder of its own, and all of them on one sheet.

    rows: names, and pictures for each prompt, [frames, 3, height, width] in [0, 1]; of a video the
    first frame. The sheet has the first MAX_COLUMNS prompts. Returns its path.
    """
    if not rows or any(len(pictures) != len(prompts) for _, pictures in rows):
        raise ConfigError(f"expected a picture for each of {len(prompts)} prompts in every row")
    folder.mkdir(parents=True, exist_ok=True)
    for place, (name, pictures) in enumerate(rows):
        own = folder / f"{place}_{_file_name(name)}"
        own.mkdir(exist_ok=True)
        for index, (prompt, frames) in enumerate(zip(prompts, pictures, strict=True)):
            file = own / f"{index:03d}_{_file_name(prompt)}.png"
            write_atomically(file, _png(_image(frames)))
    shown = [(name, [_image(frames) for frames in row[:MAX_COLUMNS]]) for name, row in rows]
    write_atomically(folder / SHEET, _png(_sheet(prompts[:MAX_COLUMNS], shown)))
    return folder / SHEET


def save_compared(
    folder: Path, prompts: Sequence[str], rows: Sequence[tuple[str, Sequence[Tensor]]]
) -> Path:
    """Write the pictures of two rows or more beside each other as one JPEG, named by the last row.

    prompts, rows: as in `save_pictures`; the first MAX_COMPARED prompts are shown.
    """
    shown = [(name, [_image(frames) for frames in row[:MAX_COMPARED]]) for name, row in rows]
    content = io.BytesIO()
    _sheet(prompts[:MAX_COMPARED], shown).save(content, "JPEG", quality=QUALITY)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"compared_{_file_name(rows[-1][0])}.jpg"
    write_atomically(path, content.getvalue())
    return path


def _sheet(prompts: Sequence[str], rows: Sequence[tuple[str, Sequence[Any]]]) -> Any:
    from PIL import Image, ImageDraw

    width, height = rows[0][1][0].size
    zoom = SIDE / max(width, height)
    size = (max(1, round(width * zoom)), max(1, round(height * zoom)))
    across, down = size[0] + GAP, size[1] + GAP
    sheet = Image.new("RGB", (LABEL + across * len(prompts), LINE + down * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    for column, prompt in enumerate(prompts):
        _write(pen, (LABEL + column * across, 1), prompt, size[0])
    for place, (name, images) in enumerate(rows):
        top = LINE + place * down
        _write(pen, (GAP, top + size[1] // 2), name, LABEL - 2 * GAP)
        for column, image in enumerate(images):
            fitted = image.resize(size, Image.Resampling.BICUBIC)
            sheet.paste(fitted, (LABEL + column * across, top))
    return sheet


def _write(pen: Any, place: tuple[int, int], text: str, width: int) -> None:
    """As much of a text as has room."""
    # The built-in font has Latin letters alone.
    shown = text.encode("latin-1", "replace").decode("latin-1")
    while shown and pen.textlength(shown) > width:
        shown = f"{shown.removesuffix('...')[:-1]}..." if len(shown) > 4 else ""
    pen.text(place, shown, fill="black")


def _image(frames: Tensor) -> Any:
    from PIL import Image

    rounded = (frames[0].clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    return Image.fromarray(rounded.permute(1, 2, 0).contiguous().numpy())


def _png(image: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text, flags=re.ASCII)[:60].strip("._") or "x"
