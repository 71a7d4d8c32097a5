"""Static scales for the activations that linear layers are given, from a model's own inputs."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.scale_file import ScaleHeader, ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.linear import plan_linear
from octavo.integrations.observe_linear import InputObserver, watch_inputs


def calibrate_linear(
    model: nn.Module,
    batches: Iterable[Any],
    settings: CalibrationSettings | None = None,
    *,
    ignored_layers: Sequence[str] = (),
    weight_only_layers: Sequence[str] = (),
) -> ScaleSet:
    """Static input scales for the linear layers that `quantize_` would quantize.

    batches: the model's inputs, each a mapping of keyword arguments, a tensor, or a tuple or list
    of positional arguments. The model runs in its own dtype and is left as it was. All positions
    count, padding included. With the observer "amax" a scale is margin times the largest absolute
    value of all batches, exactly, over 448. NaN and Inf, layers that no batch reaches and layers
    that see only zeros are errors; ignored_layers, weight_only_layers: patterns of layers to leave
    out, as `quantize_` has them.
    """
    settings = settings or CalibrationSettings()
    if settings.granularity != "tensor" or settings.rotate_keys or settings.center_keys:
        raise ConfigError(
            "expected granularity 'tensor' without rotate_keys and center_keys for linear layers, "
            f"got {settings}"
        )
    plan = plan_linear(model, ignored_layers, weight_only_layers=weight_only_layers)
    names = plan.with_inputs()
    if not names:
        raise ConfigError("expected layers that take scales, got weight-only ones alone")
    observer = InputObserver(names)
    with torch.inference_mode(), watch_inputs(model, names, observer.see):
        for batch in batches:
            _run(model, batch)
    header = ScaleHeader(
        kind="linear",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        observer=str(settings),
        passes=observer.fewest_passes(),
        margin=settings.margin,
    )
    return ScaleSet({}, header, observer.scales(settings))


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
