"""Asserts whose limits are derived: from a float64 truth and a model with the same rounding."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
from torch import Tensor

# What another order of float32 sums or a fast exponential costs, relative to the result.
FLOAT32_SLACK = 2.0**-20


@contextmanager
def assert_no_waiting() -> Iterator[None]:
    """What runs inside must not wait for the GPU: a call that would raises RuntimeError."""
    _set_sync_mode("error")
    try:
        yield
    finally:
        _set_sync_mode("default")


def _set_sync_mode(mode: Literal["error", "default"]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(mode)


def assert_within_budget(actual: Tensor, *, truth: Tensor, model: Tensor) -> None:
    """|actual − truth| ≤ 2·|model − truth| + eps, as RMS of all elements and for the worst one.

    truth: the float64 result without rounding; model: the reference with the rounding points of
    what is tested. eps: what rounding the result to actual's dtype may cost, relative to the RMS
    and to the largest element of the truth. NaN and ±Inf must be where the truth has them.
    """
    if not actual.shape == truth.shape == model.shape:
        pytest.fail(
            f"expected one shape, got {list(actual.shape)}, truth {list(truth.shape)} and model "
            f"{list(model.shape)}"
        )
    eps = max(torch.finfo(actual.dtype).eps / 2, FLOAT32_SLACK)
    got, want, like = (x.detach().cpu().to(torch.float64) for x in (actual, truth, model))
    _check_nonfinite(got, want)
    finite = torch.isfinite(want)
    if not finite.any():
        return
    error = torch.where(finite, got - want, 0.0).abs()
    model_error = torch.where(finite, like - want, 0.0).abs()
    size = torch.where(finite, want, 0.0).abs()

    budget = 2 * _rms(model_error) + eps * _rms(size)
    if not _rms(error) <= budget:
        pytest.fail(
            f"RMS error {_rms(error):.3e} is over the budget {budget:.3e} (the model's RMS error "
            f"is {_rms(model_error):.3e}, eps {eps:.1e} of RMS {_rms(size):.3e}); "
            + _describe_worst(error, got, want, like)
        )
    limit = 2 * float(model_error.max()) + eps * float(size.max())
    if not float(error.max()) <= limit:
        pytest.fail(
            f"largest error {float(error.max()):.3e} is over the budget {limit:.3e} (the model's "
            f"is {float(model_error.max()):.3e}); " + _describe_worst(error, got, want, like)
        )


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Same dtype, same shape and the same bits; says where they first differ."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        pytest.fail(
            f"expected {expected.dtype} {list(expected.shape)}, got {actual.dtype} "
            f"{list(actual.shape)}"
        )
    got, want = (x.detach().cpu().contiguous().flatten() for x in (actual, expected))
    size = got.element_size()
    is_different = got.view(torch.uint8) != want.view(torch.uint8)
    is_different = is_different.view(-1, size).any(dim=1)
    if not is_different.any():
        return
    first = int(is_different.nonzero()[0])
    pytest.fail(
        f"{int(is_different.sum())} of {len(got)} elements differ, first at "
        f"{_index(first, actual.shape)}: expected {want[first].item()} ({_hex(want[first])}), got "
        f"{got[first].item()} ({_hex(got[first])})"
    )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _check_nonfinite(got: Tensor, want: Tensor) -> None:
    is_same = torch.where(torch.isfinite(want), torch.isfinite(got), got == want)
    is_same |= got.isnan() & want.isnan()
    if is_same.all():
        return
    first = int((~is_same.flatten()).nonzero()[0])
    pytest.fail(
        f"{int((~is_same).sum())} of {got.numel()} elements are finite in one result only or "
        f"differ in kind, first at {_index(first, got.shape)}: expected "
        f"{want.flatten()[first].item()}, got {got.flatten()[first].item()}"
    )


def _describe_worst(error: Tensor, got: Tensor, want: Tensor, like: Tensor) -> str:
    worst = int(error.argmax())
    values = (float(x.flatten()[worst]) for x in (want, got, like))
    return "worst at {}: expected {:.6g}, got {:.6g}, model {:.6g}".format(
        _index(worst, error.shape), *values
    )


def _index(flat: int, shape: torch.Size) -> list[int]:
    return [int(place) for place in torch.unravel_index(torch.tensor(flat), shape)]


def _hex(x: Tensor) -> str:
    return "0x" + bytes(x.reshape(1).view(torch.uint8).tolist()[::-1]).hex()
