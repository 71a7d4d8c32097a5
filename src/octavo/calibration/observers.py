"""What calibration keeps of the values it sees, and how it picks a scale from that.

A `Histogram` counts absolute values by their nearest bfloat16. For a model in bfloat16 that loses
nothing: percentiles and errors are those of the data itself. Other values are off by at most 1/256.
It covers the 40 powers of two below the largest value and moves up when a larger one comes, so its
size is fixed; e4m3 spans 18 of them, and what is smaller counts as zero.

`KeyMeans` finds the mean key of every KV head, in a pass of its own before scales are found.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.brief import list_names
from octavo.calibration.settings import CalibrationSettings as CalibrationSettings
from octavo.errors import CheckpointError, ConfigError
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead
from octavo.numerics.quantize import saturating_cast
from octavo.numerics.scales import finite_amax

_OCTAVE = 128  # bfloat16 values from one power of two to the next
_NUM_BINS = 40 * _OCTAVE
_NUM_CODES = 2**15  # bfloat16 values without a sign
_MAX_CODE = 0x7F7F  # the largest finite one, as an integer
_CHUNK_SIZE = 2**24  # values counted at once: as codes they take 64 MiB
# The error is searched at 16 scales per power of two, over 6 powers: beyond, clipping dominates.
_MSE_STEPS = tuple(2.0 ** (-step / 16) for step in range(6 * 16 + 1))


class Histogram:
    """Absolute values of one tensor over many passes: their counts, and the largest one exactly.

    num_groups: 1 for the whole tensor, or the number of its heads. NaN and Inf are counted apart
    and enter nothing else.
    """

    def __init__(self, num_groups: int) -> None:
        # Column 0 holds zeros and what is below the first bin.
        self.counts = torch.zeros(num_groups, 1 + _NUM_BINS, dtype=torch.int64)
        self.first_code = 1
        self.amax = torch.zeros(num_groups, dtype=torch.float32)
        self.num_nonfinite = torch.zeros((), dtype=torch.int64)

    @torch.inference_mode()
    def add(self, x: Tensor) -> None:
        """Count the values of x, [..., heads, head_dim]."""
        for name in ("counts", "amax", "num_nonfinite"):
            setattr(self, name, getattr(self, name).to(x.device))
        num_groups, (heads, head_dim) = len(self.amax), x.shape[-2:]
        if num_groups not in (1, heads):
            raise ConfigError(f"expected {num_groups} heads as in the passes before, got {heads}")
        rows = x.detach().reshape(-1, heads, head_dim)
        for chunk in rows.split(max(1, _CHUNK_SIZE // (heads * head_dim))):
            amax = finite_amax(chunk, PerHead())
            self.amax = torch.maximum(self.amax, amax if num_groups == heads else amax.amax())
            self._grow(int(_code(self.amax.amax())))  # waits for the device
            codes = _code(chunk)
            if num_groups > 1:
                group = torch.arange(num_groups, dtype=codes.dtype, device=codes.device)
                codes = codes + group[:, None] * _NUM_CODES
            found = torch.bincount(codes.flatten(), minlength=num_groups * _NUM_CODES)
            found = found.reshape(num_groups, _NUM_CODES)
            self.num_nonfinite += found[:, _MAX_CODE + 1 :].sum()
            binned = found[:, self.first_code : min(self.first_code + _NUM_BINS, _MAX_CODE + 1)]
            self.counts[:, 0] += found[:, : self.first_code].sum(dim=1)
            self.counts[:, 1 : 1 + binned.shape[1]] += binned

    def _grow(self, largest_code: int) -> None:
        """Move up by whole powers of two until the largest value has a bin."""
        missing = largest_code - (self.first_code + _NUM_BINS - 1)
        if missing <= 0:
            return
        first_code = -(-(self.first_code + missing) // _OCTAVE) * _OCTAVE
        shift = min(first_code - self.first_code, _NUM_BINS)
        kept = torch.zeros_like(self.counts)
        kept[:, 0] = self.counts[:, : 1 + shift].sum(dim=1)
        kept[:, 1 : 1 + _NUM_BINS - shift] = self.counts[:, 1 + shift :]
        self.counts, self.first_code = kept, first_code

    def values(self) -> Tensor:
        """The value that each column of `counts` stands for, float32."""
        codes = torch.arange(_NUM_BINS, device=self.counts.device) + self.first_code
        codes = codes.clamp(max=_MAX_CODE).to(torch.int16)
        return torch.cat([codes.new_zeros(1), codes]).view(torch.bfloat16).to(torch.float32)

    def limits(self, settings: CalibrationSettings) -> Tensor:
        """The largest value of each group that its scale should reach, float32 [num_groups]."""
        match settings.observer:
            case "amax":
                return self.amax
            case "percentile":
                cumulative = self.counts.cumsum(dim=1)
                ranks = cumulative[:, -1:].double() * (settings.percentile / 100)
                # A product such as 0.9999 · 10000 may land just above the whole number meant.
                ranks = (ranks - 1e-6).ceil().clamp(min=1)
                column = (cumulative < ranks).sum(dim=1).clamp(max=_NUM_BINS)
                return torch.minimum(self.values()[column], self.amax)
            case "mse":
                candidates = torch.stack([self.amax * step for step in _MSE_STEPS])
                noise = torch.stack([self.errors(limit / E4M3.max)[0] for limit in candidates])
                best = noise.argmin(dim=0, keepdim=True)  # of equals the first, the largest scale
                return candidates.gather(0, best).squeeze(0)

    def errors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Of e4m3 with these scales, [num_groups]: squared error and squared values, float64."""
        values = self.values()
        # A group of zeros only has scale 0: without error at any scale.
        divisor = torch.where(scale > 0, scale, 1.0)[:, None]
        error = values - saturating_cast(values / divisor).to(torch.float32) * divisor
        weight = self.counts.double()
        return (weight * error.double() ** 2).sum(dim=1), (weight * values.double() ** 2).sum(dim=1)

    def sqnr_db(self, scale: Tensor) -> float:
        """Signal to quantization-noise ratio of all that was seen, in dB; +inf when exact."""
        noise, signal = (float(part.sum()) for part in self.errors(scale))
        return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf

    def state_dict(self) -> dict[str, Any]:
        """Everything, as `from_state_dict` takes it."""
        return dict(vars(self))

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Histogram":
        """The histogram that `state_dict` describes."""
        made = cls(len(state["amax"]))
        if state["counts"].shape != made.counts.shape:
            raise CheckpointError(
                f"expected a histogram of {list(made.counts.shape)}, got "
                f"{list(state['counts'].shape)}: it is another version's, start afresh"
            )
        vars(made).update(state)
        return made


@dataclass
class LayerObserver:
    """What one layer's queries, keys and values were, over many passes."""

    parts: dict[str, Histogram]
    num_passes: int = 0

    @classmethod
    def like(cls, q: Tensor, k: Tensor, v: Tensor, granularity: str) -> "LayerObserver":
        """An empty one for tensors [..., heads, head_dim] such as these."""
        named = {"q": q, "k": k, "v": v}
        heads = {name: x.shape[-2] if granularity == "head" else 1 for name, x in named.items()}
        return cls({name: Histogram(num_groups) for name, num_groups in heads.items()})

    def see(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """One pass."""
        for part, x in zip(self.parts.values(), (q, k, v), strict=True):
            part.add(x)
        self.num_passes += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything, as `from_state_dict` takes it."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"num_passes": self.num_passes, "parts": parts}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "LayerObserver":
        """The observer that `state_dict` describes."""
        parts = {name: Histogram.from_state_dict(part) for name, part in state["parts"].items()}
        return cls(parts, state["num_passes"])


class KeyMeans:
    """Sums of the keys of all layers, in float64, over every token that was seen.

    is_complete: whether the pass is over, and `of` gives the means. num_prompts: how many it saw.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.sums: dict[str, Tensor | None] = dict.fromkeys(layers)
        self.num_tokens = dict.fromkeys(layers, 0)
        self.num_prompts = 0
        self.is_complete = False

    @torch.inference_mode()
    def see(self, name: str, k: Tensor) -> None:
        """One pass of one layer, k [..., num_kv_heads, head_dim]."""
        rows = k.detach().flatten(0, -3)
        total, before = rows.sum(0, dtype=torch.float64), self.sums[name]
        if before is not None and before.shape != total.shape:
            raise ConfigError(
                f"layer {name}: expected keys {list(before.shape)} [num_kv_heads, head_dim] as in "
                f"the passes before, got {list(total.shape)}"
            )
        self.sums[name] = total if before is None else before.to(total.device) + total
        self.num_tokens[name] += len(rows)

    def complete(self, num_prompts: int) -> None:
        """End the pass; ConfigError names layers that saw nothing, or keys that are not finite."""
        check_all_ran(self.sums)
        for name in self.sums:
            if not bool(self.of(name).isfinite().all()):
                raise ConfigError(
                    f"layer {name}: k: expected finite keys to take the mean of, got NaN or Inf: "
                    "no scales are saved; run the model in bfloat16 or float32"
                )
        self.num_prompts, self.is_complete = num_prompts, True

    def of(self, name: str) -> Tensor:
        """The mean keys of a layer, float32 [num_kv_heads, head_dim]."""
        total = self.sums[name]
        assert total is not None
        return (total / self.num_tokens[name]).float()

    def numbers(self, name: str) -> tuple[tuple[float, ...], ...]:
        """The same as numbers for a file; nine digits are read back to the same float32."""
        return tuple(tuple(float(f"{x:.9g}") for x in row) for row in self.of(name).tolist())


def check_all_ran(layers: Mapping[str, object]) -> None:
    """Raise ConfigError that names the layers of which nothing was seen."""
    if missing := [name for name, seen in layers.items() if seen is None]:
        raise ConfigError(
            f"expected every layer to run, got no pass of {list_names(missing)}: "
            "use prompts that reach them"
        )


def _code(x: Tensor) -> Tensor:
    """The nearest bfloat16 of absolute values as integers, which count up as the values do.

    Beyond _MAX_CODE lie Inf and NaN.
    """
    if x.dtype != torch.bfloat16:
        # The largest float32 values would be rounded to Inf.
        largest = torch.finfo(torch.bfloat16).max
        x = torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(torch.bfloat16)
    return (x.view(torch.int16) & (_NUM_CODES - 1)).to(torch.int32)
