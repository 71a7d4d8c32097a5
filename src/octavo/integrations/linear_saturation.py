"""Whether the static input scales of a model's FP8 linear layers reach: counters, read and set."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from octavo.layers.linear import Fp8Linear
from octavo.layers.saturation import EVERY, WATCH, Saturation, SaturationCounter


def read_saturation(model: nn.Module) -> dict[str, Saturation]:
    """What each layer with a static input scale has counted so far; waits for the device.

    Layers count in their first 16 calls and then in one of 64 (`count_every_call`: in all), and
    only where the model runs eagerly: compiled and captured calls are not counted. Layers that
    are one product of the same input count together.
    """
    return {name: counter.read() for name, counter in find_counters(model).items()}


@contextmanager
def count_every_call(model: nn.Module) -> Iterator[None]:
    """Count afresh, and in every call; warns of layers that saturate at the end, if not before."""
    counters = list(find_counters(model).values())
    for counter in counters:
        counter.reset(every=1)
    try:
        yield
        WATCH.look()
    finally:
        for counter in counters:
            counter.every = EVERY


def find_counters(model: nn.Module) -> dict[str, SaturationCounter]:
    """The counter of each layer with a static input scale; layers may share one."""
    return {
        name: module.saturation
        for name, module in model.named_modules()
        if isinstance(module, Fp8Linear) and module.saturation is not None
    }
