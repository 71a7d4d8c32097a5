"""Static scales for the inputs of linear layers, from what they are given while a model runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.brief import list_names
from octavo.calibration.observers import CalibrationSettings, Histogram
from octavo.calibration.scale_file import ScaleHeader, ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.linear import plan_linear
from octavo.integrations.patch import Patch
from octavo.numerics.scales import amax_to_scale


@contextmanager
def watch_inputs(
    model: nn.Module, names: Iterable[str], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `see` with the name and the input of these layers, whenever one runs."""

    def hook(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        if x.numel():  # none: an expert that no token was sent to
            see(name, x)

    with Patch() as patch:
        for name in names:
            layer = model.get_submodule(name)
            patch.hook(layer.register_forward_pre_hook(partial(hook, name), with_kwargs=True))
        yield


class InputObserver:
    """The activations of linear layers over many passes; NaN and Inf are errors."""

    def __init__(self, names: Sequence[str]) -> None:
        self.seen = {name: Histogram(1) for name in names}
        self.num_passes = dict.fromkeys(names, 0)

    def see(self, name: str, x: Tensor) -> None:
        """One pass of one layer."""
        self.seen[name].add(x.reshape(-1, 1, x.shape[-1]))
        if num_bad := int(self.seen[name].num_nonfinite):  # waits for the device
            raise ConfigError(
                f"{name}: expected finite activations, got {num_bad} NaN or Inf values: no "
                "scales are found; use other data or ignore the layer"
            )
        self.num_passes[name] += 1

    def fewest_passes(self) -> int:
        """Those of the layer that ran least; ConfigError names layers that never ran."""
        if missing := [name for name, num in self.num_passes.items() if num == 0]:
            raise ConfigError(
                f"expected every layer to run, got no pass of {list_names(missing)}: use data that "
                "reaches them, or ignore them"
            )
        return min(self.num_passes.values())

    def scales(self, settings: CalibrationSettings) -> dict[str, float]:
        """The scale of each layer's input; ConfigError for one that saw only zeros."""
        found = {}
        for name, seen in self.seen.items():
            limit = seen.limits(settings)
            if not bool(limit > 0):
                raise ConfigError(
                    f"{name}: expected values to calibrate on, got only zeros for {settings}: use "
                    "other data or another observer, or ignore the layer"
                )
            found[name] = float(amax_to_scale(limit, margin=settings.margin))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything, on the CPU, as `load_state_dict` takes it."""
        seen = {name: histogram.state_dict() for name, histogram in self.seen.items()}
        return {"seen": seen, "num_passes": dict(self.num_passes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` of an observer of the same layers gave."""
        self.seen = {name: Histogram.from_state_dict(x) for name, x in state["seen"].items()}
        self.num_passes = dict(state["num_passes"])


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

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    match batch:
        case Mapping():
            model(**{key: moved(x) for key, x in batch.items()})
        case list() | tuple():
            model(*map(moved, batch))
        case _:
            model(moved(batch))
