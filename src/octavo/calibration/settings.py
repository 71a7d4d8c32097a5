"""Settings of a calibration: no tensors, and no torch until they are checked."""

from dataclasses import dataclass
from typing import Literal, get_args

from octavo.errors import ConfigError

Observer = Literal["amax", "percentile", "mse"]


@dataclass(frozen=True, kw_only=True)
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

    observer: Observer = "amax"
    percentile: float = 99.99
    granularity: Literal["tensor", "head"] = "tensor"
    margin: float = 1.5
    rotate_keys: bool = False
    center_keys: bool = False

    def __post_init__(self) -> None:
        from octavo.numerics.scales import check_margin

        if self.observer not in get_args(Observer):
            observers = ", ".join(get_args(Observer))
            raise ConfigError(f"expected an observer, one of {observers}, got {self.observer!r}")
        if self.granularity not in ("tensor", "head"):
            raise ConfigError(f"expected granularity tensor or head, got {self.granularity!r}")
        if not 0 < self.percentile <= 100:
            raise ConfigError(f"expected a percentile above 0, up to 100, got {self.percentile}")
        check_margin(self.margin)

    def __str__(self) -> str:
        name = self.observer
        return f"{name} {self.percentile:g}" if name == "percentile" else name
