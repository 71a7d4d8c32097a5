"""What linear layers are given while a model runs, and the static scales that follow from it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from octavo.brief import list_names
from octavo.calibration.observers import CalibrationSettings, Histogram
from octavo.errors import ConfigError
from octavo.integrations.patch import Handle, Patch
from octavo.numerics.scales import amax_to_scale


@contextmanager
def watch_inputs(
    model: nn.Module, names: Iterable[str], see: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call `see` with the name and the input of these layers, whenever one runs."""

    def watch(name: str) -> Handle:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["input"]
            if x.numel():  # none: an expert that no token was sent to
                see(name, x)

        return model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    with Patch() as patch:
        for name in names:
            patch.hook(watch(name))
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
        return {name: _scale(name, seen, settings) for name, seen in self.seen.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything, on the CPU, as `load_state_dict` takes it."""
        seen = {name: histogram.state_dict() for name, histogram in self.seen.items()}
        return {"seen": seen, "num_passes": dict(self.num_passes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` of an observer of the same layers gave."""
        self.seen = {name: Histogram.from_state_dict(x) for name, x in state["seen"].items()}
        self.num_passes = dict(state["num_passes"])


def _scale(name: str, seen: Histogram, settings: CalibrationSettings) -> float:
    limit = seen.limits(settings)
    if not bool(limit > 0):
        raise ConfigError(
            f"{name}: expected values to calibrate on, got only zeros for {settings}: use other "
            "data or another observer, or ignore the layer"
        )
    return float(amax_to_scale(limit, margin=settings.margin))
