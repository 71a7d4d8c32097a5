"""Static scales for the activations that linear layers are given, from a model's own inputs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from octavo.brief import list_names
from octavo.calibration.observers import CalibrationSettings, Histogram
from octavo.calibration.scale_file import ScaleHeader, ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.linear import plan_linear
from octavo.numerics.scales import amax_to_scale


def calibrate_linear(
    model: nn.Module,
    batches: Iterable[Any],
    settings: CalibrationSettings | None = None,
    *,
    ignored_layers: Sequence[str] = (),
) -> ScaleSet:
    """Static input scales for the linear layers that `quantize_` would quantize.

    batches: the model's inputs, each a mapping of keyword arguments, a tensor, or a tuple or list
    of positional arguments. The model runs in its own dtype and is left as it was. All positions
    count, padding included. With the observer "amax" a scale is margin times the largest absolute
    value of all batches, exactly, over 448. NaN and Inf, layers that no batch reaches and layers
    that see only zeros are errors; ignored_layers: patterns of layers to leave out.
    """
    settings = settings or CalibrationSettings()
    if settings.granularity != "tensor" or settings.rotate_keys or settings.center_keys:
        raise ConfigError(
            "expected granularity 'tensor' without rotate_keys and center_keys for linear layers, "
            f"got {settings}"
        )
    names = list(plan_linear(model, ignored_layers).chosen)
    seen = {name: Histogram(1) for name in names}
    num_passes = dict.fromkeys(names, 0)
    with torch.inference_mode(), _observing(model, seen, num_passes):
        for batch in batches:
            _run(model, batch)
    header = ScaleHeader(
        kind="linear",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        observer=str(settings),
        passes=_fewest_passes(num_passes),
        margin=settings.margin,
    )
    return ScaleSet({}, header, {name: _scale(name, seen[name], settings) for name in names})


@contextmanager
def _observing(
    model: nn.Module, seen: dict[str, Histogram], num_passes: dict[str, int]
) -> Iterator[None]:
    """Show every input of these layers to their histograms."""

    def watch(name: str, module: nn.Module) -> Any:
        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["input"]
            if x.numel() == 0:  # an expert that no token was sent to
                return
            seen[name].add(x.reshape(-1, 1, x.shape[-1]))
            num_bad = int(seen[name].num_nonfinite)
            if num_bad:
                raise ConfigError(
                    f"{name}: expected finite activations, got {num_bad} NaN or Inf values: no "
                    "scales are found; use other data or ignore the layer"
                )
            num_passes[name] += 1

        return module.register_forward_pre_hook(see, with_kwargs=True)

    hooks = [watch(name, model.get_submodule(name)) for name in seen]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _run(model: nn.Module, batch: Any) -> None:
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    match batch:
        case Mapping():
            model(**{key: _moved(x, device) for key, x in batch.items()})
        case list() | tuple():
            model(*(_moved(x, device) for x in batch))
        case _:
            model(_moved(batch, device))


def _moved(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def _fewest_passes(num_passes: dict[str, int]) -> int:
    if missing := [name for name, num in num_passes.items() if num == 0]:
        raise ConfigError(
            f"expected every layer to run, got no pass of {list_names(missing)}: use data that "
            "reaches them, or ignore them"
        )
    return min(num_passes.values())


def _scale(name: str, seen: Histogram, settings: CalibrationSettings) -> float:
    limit = seen.limits(settings)
    if not bool(limit > 0):
        raise ConfigError(
            f"{name}: expected values to calibrate on, got only zeros for {settings}: use other "
            "data or another observer, or ignore the layer"
        )
    return float(amax_to_scale(limit, margin=settings.margin))
