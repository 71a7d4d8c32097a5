"""Settings of a calibration: no tensors, and no torch until they are checked."""

from typing import Annotated, Literal

from pydantic import Field

from octavo.settings import checked


@checked
class CalibrationSettings:
    """How scales are found: which observer, for how many values at once, with how much headroom.

    Attributes:
        observer: What a scale reaches to: the largest value, a percentile of the absolute values,
            or wherever the squared error of e4m3 is least.
        percentile: Of the observer of that name.
        granularity: A scale for each tensor, or for each head.
        margin: Headroom: every scale is this many times larger.
        rotate_keys: Of a KV cache (--kv): scales of keys and queries that are multiplied by a
            Hadamard matrix, for Recipe(kv_cache={…, "rotate_keys": true}).
        center_keys: Of a KV cache (--kv): scales of keys without their mean, and the mean, found by
            a pass over the data of its own, for Recipe(kv_cache={…, "center_keys": true}).
    """

    observer: Literal["amax", "percentile", "mse"] = "amax"
    percentile: Annotated[float, Field(gt=0, le=100)] = 99.99
    granularity: Literal["tensor", "head"] = "tensor"
    margin: Annotated[float, Field(gt=0)] = 1.5
    rotate_keys: bool = False
    center_keys: bool = False

    def __str__(self) -> str:
        name = self.observer
        return f"{name} {self.percentile:g}" if name == "percentile" else name
