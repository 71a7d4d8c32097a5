"""Two pictures of one seed beside each other, with their difference and their scores."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.measure.evaluate.image_scores import ImageScores, compare_images

TIMES = 8  # the difference, so that it can be seen
MIN_SIDE = 256  # pixels of a panel's longer side; smaller pictures are enlarged, pixel by pixel
LINE, GAP = 24, 6  # pixels: the captions, and between panels


def score_pictures(first: Sequence[Any], second: Sequence[Any]) -> ImageScores:
    """The scores of pillow images, or of the frames of videos, against those in their place."""
    return compare_images(_as_tensor(first), _as_tensor(second))


def _as_tensor(images: Sequence[Any]) -> Tensor:
    """[n, 3, height, width] in [0, 1]."""
    if len({image.size for image in images}) != 1:
        raise ConfigError(f"expected pictures of one size, got {[i.size for i in images][:5]}")
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
    sheet = Image.new("RGB", (3 * size[0] + 2 * GAP, size[1] + LINE), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    texts = (*captions, f"difference x {TIMES}")  # the font has no ×
    for place, (panel, text) in enumerate(zip((*pair, difference), texts, strict=True)):
        left = place * (size[0] + GAP)
        pen.text((left + 2, 3), fitting(pen, text, font, size[0] - 4), fill="black", font=font)
        sheet.paste(panel.resize(size, Image.Resampling.NEAREST), (left, LINE))
    return sheet


def fitting(pen: Any, text: str, font: Any, width: int) -> str:
    """As much of a text as has room."""
    text = text[: width // 2]  # a character has 2 pixels or more
    while text and pen.textlength(text, font=font) > width:
        text = text[:-1]
    return text
