"""How far a result is from the truth: four measures, computed in float64.

All return a Python float and are NaN when either tensor has a NaN or Inf: a broken result never
looks good. An exact result, zeros included, has error 0, SQNR +inf and cosine 1.
"""

import math

import torch
from torch import Tensor

from octavo.errors import ConfigError


def relative_rms(actual: Tensor, truth: Tensor) -> float:
    """‖actual − truth‖ / ‖truth‖; inf when only the truth is zero."""
    actual, truth = _as_float64(actual, truth)
    noise, signal = _norm(actual - truth), _norm(truth)
    return _ratio(noise, signal)


def sqnr_db(actual: Tensor, truth: Tensor) -> float:
    """Signal to quantization-noise ratio in dB: 20·log10(‖truth‖ / ‖actual − truth‖)."""
    ratio = relative_rms(actual, truth)
    if math.isnan(ratio):
        return math.nan
    return math.inf if ratio == 0 else -20 * math.log10(ratio)


def cosine(actual: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between the tensors as vectors; 0 when only one of them is zero."""
    actual, truth = _as_float64(actual, truth)
    lengths = _norm(actual), _norm(truth)
    if math.isnan(sum(lengths)):
        return math.nan
    if 0.0 in lengths:
        return 1.0 if lengths == (0.0, 0.0) else 0.0
    # cos = 1 − |u − w|²/2 of unit vectors: exact where it matters, near 1.
    return 1 - _norm(actual / lengths[0] - truth / lengths[1]) ** 2 / 2


def max_error(actual: Tensor, truth: Tensor) -> float:
    """The largest absolute difference of two elements; 0 for empty tensors."""
    actual, truth = _as_float64(actual, truth)
    difference = (actual - truth).abs()
    return float(difference.max()) if difference.numel() else 0.0


def _as_float64(actual: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != truth.shape:
        raise ConfigError(
            f"expected two tensors of one shape, got {list(actual.shape)} and {list(truth.shape)}"
        )
    pair = actual.detach().to(torch.float64), truth.detach().to(torch.float64)
    if not all(bool(torch.isfinite(x).all()) for x in pair):
        return torch.full_like(pair[0], math.nan), pair[1]
    return pair


def _norm(x: Tensor) -> float:
    # Scaled first: squares leave float64's range long before the values do.
    largest = float(x.abs().max()) if x.numel() else 0.0
    return largest * float(torch.linalg.vector_norm(x / largest)) if largest else 0.0


def _ratio(noise: float, signal: float) -> float:
    if math.isnan(noise):
        return math.nan
    if signal == 0:
        return 0.0 if noise == 0 else math.inf
    return noise / signal
