"""Sheets of images: rows below each other and prompts side by side, or two images and their gap."""

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.atomic import write_atomically
from octavo.errors import ConfigError
from octavo.measure.evaluate.image_scores import ImageScores, compare_images
from octavo.measure.evaluate.images import Keep

SHEET = "sheet.png"
SIDE = 192  # pixels of the longer side of an image on the sheet
LINE, GAP, LABEL = 16, 4, 160  # pixels: a line of text, around an image, the names of rows
MAX_COLUMNS = 16
MAX_COMPARED = 8  # prompts of a sheet that compares two rows
QUALITY = 90  # of a JPEG
TIMES = 8  # the difference of two images, so that it can be seen
MIN_SIDE = 256  # pixels of a panel's longer side; smaller images are enlarged, pixel by pixel
CAPTION, BETWEEN = 24, 6  # pixels: the captions of panels, and between them


def save_images(
    folder: Path, prompts: Sequence[str], rows: Sequence[tuple[str, Sequence[Tensor]]]
) -> Path:
    """Write each row's images to a folder of its own, and all of them on one sheet.

    rows: names, and images for each prompt, [frames, 3, height, width] in [0, 1]; of a video the
    first frame. The sheet has the first MAX_COLUMNS prompts. Returns its path.
    """
    if not rows or any(len(images) != len(prompts) for _, images in rows):
        raise ConfigError(f"expected an image for each of {len(prompts)} prompts in every row")
    folder.mkdir(parents=True, exist_ok=True)
    for place, (name, images) in enumerate(rows):
        own = folder / f"{place}_{_file_name(name)}"
        own.mkdir(exist_ok=True)
        for index, (prompt, frames) in enumerate(zip(prompts, images, strict=True)):
            file = own / f"{index:03d}_{_file_name(prompt)}.png"
            write_atomically(file, _png(_image(frames)))
    shown = [(name, [_image(frames) for frames in row[:MAX_COLUMNS]]) for name, row in rows]
    write_atomically(folder / SHEET, _png(_sheet(prompts[:MAX_COLUMNS], shown)))
    return folder / SHEET


def save_compared(
    folder: Path, prompts: Sequence[str], rows: Sequence[tuple[str, Sequence[Tensor]]]
) -> Path:
    """Write the images of two rows or more beside each other as one JPEG, named by the last row.

    prompts, rows: as in `save_images`; the first MAX_COMPARED prompts are shown.
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
        pen.text((LABEL + column * across, 1), fitting(pen, prompt, size[0]), fill="black")
    for place, (name, images) in enumerate(rows):
        top = LINE + place * down
        shown = fitting(pen, name, LABEL - 2 * GAP)
        pen.text((GAP, top + size[1] // 2), shown, fill="black")
        for column, image in enumerate(images):
            fitted = image.resize(size, Image.Resampling.BICUBIC)
            sheet.paste(fitted, (LABEL + column * across, top))
    return sheet


def keep_compared(folder: Path | None, prompts: Sequence[str], records: Path | None) -> Keep | None:
    """What writes images of two rows to a folder, for records of that file; None without either.

    The image is named by its path from the records file on, so that both can be moved together.
    """
    if folder is None or records is None:
        return None

    def keep(rows: Sequence[tuple[str, list[Tensor]]]) -> tuple[str, Sequence[str]]:
        path = save_compared(folder, prompts, rows)
        place = os.path.relpath(path.resolve(), records.resolve().parent)
        return Path(place).as_posix(), prompts[:MAX_COMPARED]

    return keep


def score_images(first: Sequence[Any], second: Sequence[Any]) -> ImageScores:
    """The scores of pillow images, or of the frames of videos, against those in their place."""
    return compare_images(_as_tensor(first), _as_tensor(second))


def _as_tensor(images: Sequence[Any]) -> Tensor:
    """[n, 3, height, width] in [0, 1]."""
    if len({image.size for image in images}) != 1:
        raise ConfigError(f"expected images of one size, got {[i.size for i in images][:5]}")
    width, height = images[0].size
    bytes_of_all = bytearray(b"".join(image.convert("RGB").tobytes() for image in images))
    values = torch.frombuffer(bytes_of_all, dtype=torch.uint8)
    return values.view(len(images), height, width, 3).permute(0, 3, 1, 2).float() / 255


def draw_side_by_side(first: Any, second: Any, captions: tuple[str, str]) -> Any:
    """A pillow image of three panels: the first, the second, and TIMES their difference."""
    from PIL import Image, ImageChops, ImageDraw, ImageFont

    pair = [image.convert("RGB") for image in (first, second)]
    difference = ImageChops.difference(*pair).point([min(255, TIMES * x) for x in range(256)] * 3)
    zoom = max(1, -(-MIN_SIDE // max(first.size)))
    size = (first.width * zoom, first.height * zoom)
    sheet = Image.new("RGB", (3 * size[0] + 2 * BETWEEN, size[1] + CAPTION), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    texts = (*captions, f"difference x {TIMES}")  # the font has no ×
    for place, (panel, text) in enumerate(zip((*pair, difference), texts, strict=True)):
        left = place * (size[0] + BETWEEN)
        pen.text((left + 2, 3), fitting(pen, text, size[0] - 4, font), fill="black", font=font)
        sheet.paste(panel.resize(size, Image.Resampling.NEAREST), (left, CAPTION))
    return sheet


def fitting(pen: Any, text: str, width: int, font: Any = None) -> str:
    """As much of a text as has room, with dots where it is cut."""
    shown = text[: max(4, width // 2)]  # a character has 2 pixels or more
    if font is None:  # the built-in one has Latin letters alone
        shown = shown.encode("latin-1", "replace").decode("latin-1")
    while shown and pen.textlength(shown, font=font) > width:
        shown = f"{shown.removesuffix('...')[:-1]}..." if len(shown) > 4 else ""
    return shown


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
