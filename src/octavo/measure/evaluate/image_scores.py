"""How near pictures are to others: PSNR and SSIM."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.errors import ConfigError

MAX_PSNR_DB = 100.0


@dataclass(frozen=True)
class ImageScores:
    """The scores of each picture; lpips is None where it could not be taken."""

    psnr_db: tuple[float, ...]
    ssim: tuple[float, ...]
    lpips: tuple[float, ...] | None = None
    lpips_note: str | None = None


def compare_images(a: Tensor, b: Tensor) -> ImageScores:
    """The scores of each picture of `a` against that of `b`: [n, 3, height, width] in [0, 1]."""
    if a.dim() != 4 or a.shape[1] != 3 or a.shape != b.shape:
        raise ConfigError(f"expected [n, 3, height, width] twice, got {a.shape} and {b.shape}")
    a, b = a.to("cpu", torch.float64), b.to("cpu", torch.float64)
    errors = (a - b).square().mean((1, 2, 3)).tolist()
    psnr_db = [min(MAX_PSNR_DB, -10 * math.log10(e)) if e else MAX_PSNR_DB for e in errors]
    return ImageScores(tuple(psnr_db), _ssim(a, b), None, "LPIPS is left out: it is not installed")


def _ssim(a: Tensor, b: Tensor) -> tuple[float, ...]:
    places = torch.arange(11, dtype=a.dtype) - 5
    weights = torch.exp(-(places**2) / 4.5)
    weights = (weights / weights.sum()).expand(3, 1, 1, 11)

    def blur(x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, weights, groups=3), weights.transpose(2, 3), groups=3)

    mean_a, mean_b = blur(a), blur(b)
    spread = blur(a * a) - mean_a**2 + blur(b * b) - mean_b**2
    both = blur(a * b) - mean_a * mean_b
    light = (2 * mean_a * mean_b + 0.01**2) / (mean_a**2 + mean_b**2 + 0.01**2)
    return tuple((light * (2 * both + 0.03**2) / (spread + 0.03**2)).mean((1, 2, 3)).tolist())
