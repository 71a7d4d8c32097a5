"""How near images are to others: PSNR, SSIM and, where its package is installed, LPIPS.

Images are [n, 3, height, width] with values from 0 to 1. PSNR is -10 log10 of the mean square
error, at most `MAX_PSNR_DB`: the same images would have an infinite one, and so would the mean of
many. SSIM is that of Wang et al. (2004), by windows of 11 pixels wholly inside the image, and
the mean of the three colors.
"""

import io
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.atomic import write_atomically
from octavo.errors import ConfigError, UnsupportedError

MAX_PSNR_DB = 100.0
WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03
MIN_LPIPS_SIDE = 31  # pixels that AlexNet needs
# A row's name, and its images for each prompt: [frames, 3, height, width] in [0, 1].
DrawnRow = tuple[str, Sequence[Tensor]]


@dataclass(frozen=True)
class ImageScores:
    """The scores of each image.

    psnr_db: up to MAX_PSNR_DB, of the same images. ssim: 1 is the same. lpips: 0 is the same, and
    None where it could not be taken; `lpips_note` says why.
    """

    psnr_db: tuple[float, ...]
    ssim: tuple[float, ...]
    lpips: tuple[float, ...] | None = None
    lpips_note: str | None = None

    @property
    def mean_psnr_db(self) -> float:
        """The mean of the images' PSNR, in dB."""
        return fmean(self.psnr_db)

    @property
    def mean_ssim(self) -> float:
        """The mean of the images' SSIM."""
        return fmean(self.ssim)

    def values(self) -> dict[str, float]:
        """The mean and the worst of each score, by the names of records."""
        found = {"psnr_db": self.mean_psnr_db, "worst_psnr_db": min(self.psnr_db)}
        found |= {"ssim": self.mean_ssim, "worst_ssim": min(self.ssim)}
        if self.lpips is not None:
            found |= {"lpips": fmean(self.lpips), "worst_lpips": max(self.lpips)}
        return found


def compare_images(a: Tensor, b: Tensor, *, lpips: bool | None = None) -> ImageScores:
    """The scores of each image of `a` against the one of `b` in its place.

    a, b: [n, 3, height, width], floating point, 0 to 1, 11 pixels or more on each side. Values that
    are not finite or out of range are errors. lpips: True must be possible, False leaves it out,
    None takes it where the package `lpips` is installed.
    """
    _check(a, b)
    a, b = a.to("cpu", torch.float64), b.to("cpu", torch.float64)
    note = why_no_lpips(lpips, min(a.shape[2:]))
    errors = (a - b).square().mean((1, 2, 3)).tolist()
    psnr = tuple(min(MAX_PSNR_DB, -10 * math.log10(e)) if e else MAX_PSNR_DB for e in errors)
    if note is not None:
        return ImageScores(psnr, _ssim(a, b), None, note)
    net, pairs = _lpips_net(), zip((2 * a - 1).float(), (2 * b - 1).float(), strict=True)
    with torch.inference_mode():
        return ImageScores(psnr, _ssim(a, b), tuple(float(net(x[None], y[None])) for x, y in pairs))


def why_no_lpips(lpips: bool | None = None, side: int = MIN_LPIPS_SIDE) -> str | None:
    """Why `compare_images` would leave LPIPS out here; None if it would not.

    side: the shorter one of images, in pixels. UnsupportedError if it is left out but must be
    there.
    """
    if lpips is False:
        return "LPIPS is left out: it was not asked for"
    note = None
    if find_spec("lpips") is None:
        note = "the package lpips is not installed (pip install lpips)"
    elif side < MIN_LPIPS_SIDE:
        note = f"it needs {MIN_LPIPS_SIDE} pixels on each side, got {side}"
    else:
        try:
            _lpips_net()
        except (OSError, RuntimeError) as error:  # the weights of its backbone are a download
            note = f"its weights could not be loaded ({str(error)[:200]})"
    if note is not None and lpips:
        raise UnsupportedError(f"LPIPS is left out: {note}")
    return note and f"LPIPS is left out: {note}"


def _check(a: Tensor, b: Tensor) -> None:
    if a.dim() != 4 or a.shape[1] != 3 or a.shape != b.shape or not len(a):
        raise ConfigError(
            "expected two times the same number of images [n, 3, height, width], got "
            f"{list(a.shape)} and {list(b.shape)}"
        )
    if min(a.shape[2:]) < WINDOW:
        raise ConfigError(
            f"expected images of {WINDOW} × {WINDOW} pixels or more, a window of SSIM, got "
            f"{a.shape[2]} × {a.shape[3]}"
        )
    for images in (a, b):
        if not images.is_floating_point():
            raise ConfigError(f"expected values from 0 to 1, got {images.dtype}: divide by 255")
        if num_bad := int((~images.isfinite()).sum()):
            raise ConfigError(f"expected finite images, got {num_bad} NaN or Inf values")
        low, high = float(images.min()), float(images.max())
        if low < 0 or high > 1:
            raise ConfigError(f"expected values from 0 to 1, got {low:g} to {high:g}")


def _ssim(a: Tensor, b: Tensor) -> tuple[float, ...]:
    mean_a, mean_b = _blur(a), _blur(b)
    var_a = _blur(a * a) - mean_a**2
    var_b = _blur(b * b) - mean_b**2
    both = _blur(a * b) - mean_a * mean_b
    c1, c2 = K1**2, K2**2  # of a range of 1
    light = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    form = (2 * both + c2) / (var_a + var_b + c2)
    return tuple((light * form).mean((1, 2, 3)).tolist())


def _blur(x: Tensor) -> Tensor:
    """The Gaussian mean around each pixel whose window lies in the image, color by color."""
    places = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weights = torch.exp(-(places**2) / (2 * SIGMA**2))
    weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, WINDOW)
    across = F.conv2d(x, weights, groups=x.shape[1])
    return F.conv2d(across, weights.transpose(2, 3), groups=x.shape[1])


@cache
def _lpips_net() -> Callable[[Tensor, Tensor], Tensor]:
    """LPIPS by AlexNet, the variant that its authors recommend for comparisons."""
    from lpips import LPIPS

    net: Callable[[Tensor, Tensor], Tensor] = LPIPS(net="alex", verbose=False).eval()
    return net


SHEET = "sheet.png"
SIDE = 192  # pixels of the longer side of an image on the sheet
LINE, GAP, LABEL = 16, 4, 160  # pixels: a line of text, around an image, the names of rows
MAX_COLUMNS = 16
MAX_COMPARED = 8  # prompts of a sheet that compares two rows
QUALITY = 90  # of a JPEG
TIMES = 8  # the difference of two images, so that it can be seen
MIN_SIDE = 256  # pixels of a panel's longer side; smaller images are enlarged, pixel by pixel
CAPTION, BETWEEN = 24, 6  # pixels: the captions of panels, and between them


def save_row(
    folder: Path, prompts: Sequence[str], rows: Sequence[DrawnRow], records: Path | None = None
) -> dict[str, str]:
    """Write the last row's images to a folder of its own, and all rows on one sheet.

    Another row than the first also becomes a JPEG below the first one. The result is what its
    record in the file `records` says of that: the path from that file on, so that both can be moved
    together, and the prompts. The sheet shows the first MAX_COLUMNS prompts, the JPEG MAX_COMPARED.
    """
    name, images = rows[-1]
    own = folder / f"{len(rows) - 1}_{_file_name(name)}"
    for index, (prompt, frames) in enumerate(zip(prompts, images, strict=True)):
        _write(own / f"{index:03d}_{_file_name(prompt)}.png", _image(frames))
    _write(folder / SHEET, _sheet(prompts[:MAX_COLUMNS], rows))
    if len(rows) == 1 or records is None:
        return {}
    shown = prompts[:MAX_COMPARED]
    path = folder / f"compared_{_file_name(name)}.jpg"
    _write(path, _sheet(shown, [rows[0], rows[-1]]))
    place = os.path.relpath(path.resolve(), records.resolve().parent)
    return {"picture": Path(place).as_posix(), "picture_prompts": "; ".join(shown)}


def _sheet(prompts: Sequence[str], rows: Sequence[DrawnRow]) -> Any:
    """A pillow image with the rows below each other; of videos it has the first frames."""
    from PIL import Image, ImageDraw

    height, width = rows[0][1][0].shape[-2:]
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
        for column, frames in enumerate(images[: len(prompts)]):
            fitted = _image(frames).resize(size, Image.Resampling.BICUBIC)
            sheet.paste(fitted, (LABEL + column * across, top))
    return sheet


def score_images(first: Sequence[Any], second: Sequence[Any]) -> ImageScores:
    """The scores of pillow images, or of the frames of videos, against those in their place."""
    return compare_images(_as_tensor(first), _as_tensor(second))


def _as_tensor(images: Sequence[Any]) -> Tensor:
    """[n, 3, height, width] in [0, 1]."""
    if len({image.size for image in images}) != 1:
        raise ConfigError(f"expected images of one size, got {[i.size for i in images][:5]}")
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


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


def _write(path: Path, image: Any) -> None:
    """Write a pillow image as its path's ending says, and make its folder."""
    content = io.BytesIO()
    image.save(content, "JPEG" if path.suffix == ".jpg" else "PNG", quality=QUALITY)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text, flags=re.ASCII)[:60].strip("._") or "x"
