"""How near pictures are to others: PSNR, SSIM and, where its package is installed, LPIPS.

Pictures are [n, 3, height, width] with values from 0 to 1. PSNR is -10 log10 of the mean square
error, at most `MAX_PSNR_DB`: the same pictures would have an infinite one, and so would the mean of
many. SSIM is that of Wang et al. (2004), by windows of 11 pixels wholly inside the picture, and
the mean of the three colors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.errors import ConfigError, UnsupportedError

MAX_PSNR_DB = 100.0
WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03
NO_LPIPS = "LPIPS is left out: the package lpips is not installed (pip install lpips)"
LPIPS_OFF = "LPIPS is left out: it was not asked for"
MIN_LPIPS_SIDE = 31  # pixels that AlexNet needs
Net = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ImageScores:
    """The scores of each picture.

    psnr_db: up to MAX_PSNR_DB, of the same pictures. ssim: 1 is the same. lpips: 0 is the same, and
    None where it could not be taken; `lpips_note` says why.
    """

    psnr_db: tuple[float, ...]
    ssim: tuple[float, ...]
    lpips: tuple[float, ...] | None = None
    lpips_note: str | None = None

    @property
    def mean_psnr_db(self) -> float:
        """The mean of the pictures' PSNR, in dB."""
        return _mean(self.psnr_db)

    @property
    def mean_ssim(self) -> float:
        """The mean of the pictures' SSIM."""
        return _mean(self.ssim)

    @property
    def mean_lpips(self) -> float | None:
        """The mean of the pictures' LPIPS."""
        return None if self.lpips is None else _mean(self.lpips)


def compare_images(a: Tensor, b: Tensor, *, lpips: bool | None = None) -> ImageScores:
    """The scores of each picture of `a` against the one of `b` in its place.

    a, b: [n, 3, height, width], floating point, 0 to 1, 11 pixels or more on each side. Values that
    are not finite or out of range are errors. lpips: True must be possible, False leaves it out,
    None takes it where the package `lpips` is installed.
    """
    _check(a, b)
    a, b = a.to("cpu", torch.float64), b.to("cpu", torch.float64)
    net = _find_lpips(lpips, min(a.shape[2:]))
    if isinstance(net, str):
        return ImageScores(_psnr_db(a, b), _ssim(a, b), lpips_note=net)
    return ImageScores(_psnr_db(a, b), _ssim(a, b), _lpips(a, b, net))


def why_no_lpips(lpips: bool | None = None, side: int = MIN_LPIPS_SIDE) -> str | None:
    """Why `compare_images` would leave LPIPS out here; None if it would not.

    side: the shorter one of pictures, in pixels.
    """
    net = _find_lpips(lpips, side)
    return net if isinstance(net, str) else None


def _check(a: Tensor, b: Tensor) -> None:
    if a.dim() != 4 or a.shape[1] != 3 or a.shape != b.shape or not len(a):
        raise ConfigError(
            "expected two times the same number of pictures [n, 3, height, width], got "
            f"{list(a.shape)} and {list(b.shape)}"
        )
    if min(a.shape[2:]) < WINDOW:
        raise ConfigError(
            f"expected pictures of {WINDOW} × {WINDOW} pixels or more, a window of SSIM, got "
            f"{a.shape[2]} × {a.shape[3]}"
        )
    for pictures in (a, b):
        if not pictures.is_floating_point():
            raise ConfigError(f"expected values from 0 to 1, got {pictures.dtype}: divide by 255")
        if num_bad := int((~pictures.isfinite()).sum()):
            raise ConfigError(f"expected finite pictures, got {num_bad} NaN or Inf values")
        low, high = float(pictures.min()), float(pictures.max())
        if low < 0 or high > 1:
            raise ConfigError(f"expected values from 0 to 1, got {low:g} to {high:g}")


def _psnr_db(a: Tensor, b: Tensor) -> tuple[float, ...]:
    errors = (a - b).square().mean((1, 2, 3)).tolist()
    return tuple(min(MAX_PSNR_DB, -10 * math.log10(e)) if e else MAX_PSNR_DB for e in errors)


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
    """The Gaussian mean around each pixel whose window lies in the picture, color by color."""
    places = torch.arange(WINDOW, dtype=x.dtype, device=x.device) - WINDOW // 2
    weights = torch.exp(-(places**2) / (2 * SIGMA**2))
    weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, WINDOW)
    across = F.conv2d(x, weights, groups=x.shape[1])
    return F.conv2d(across, weights.transpose(2, 3), groups=x.shape[1])


def _lpips(a: Tensor, b: Tensor, net: Net) -> tuple[float, ...]:
    pairs = zip(2 * a - 1, 2 * b - 1, strict=True)
    with torch.inference_mode():
        return tuple(float(net(x.float()[None], y.float()[None])) for x, y in pairs)


def _find_lpips(asked: bool | None, side: int) -> Net | str:
    """The network, or why there is none; an error if it must be there."""
    if asked is False:
        return LPIPS_OFF
    note = NO_LPIPS
    if find_spec("lpips") is not None:
        note = f"LPIPS is left out: it needs {MIN_LPIPS_SIDE} pixels on each side, got {side}"
        if side >= MIN_LPIPS_SIDE:
            try:
                return _lpips_net()
            except (OSError, RuntimeError) as error:  # the weights of its backbone are a download
                note = f"LPIPS is left out: its weights could not be loaded ({str(error)[:200]})"
    if asked:
        raise UnsupportedError(note)
    return note


@cache
def _lpips_net() -> Net:
    """LPIPS by AlexNet, the variant that its authors recommend for comparisons."""
    from lpips import LPIPS

    net: Net = LPIPS(net="alex", verbose=False).eval()
    return net


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)
