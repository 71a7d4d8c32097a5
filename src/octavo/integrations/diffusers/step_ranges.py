"""How the range of activations moves while a picture comes out of noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.granularity import PerTensor
from octavo.numerics.scales import finite_amax


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """One tensor of one layer: its largest absolute value at each step, over all prompts.

    tensor: "input" of a linear layer, "q", "k" or "v" of attention. amax: NaN at steps at which the
    layer did not run.
    """

    layer: str
    tensor: str
    amax: tuple[float, ...]

    @property
    def lowest(self) -> float:
        """The amax of the step at which it is smallest."""
        return min(x for x in self.amax if not math.isnan(x))

    @property
    def highest(self) -> float:
        """The amax of the step at which it is largest, which a static scale has to reach."""
        return max(x for x in self.amax if not math.isnan(x))

    @property
    def spread(self) -> float:
        """How many times larger the highest is: what a scale of one step alone could miss."""
        return math.inf if self.lowest == 0 else self.highest / self.lowest


@dataclass(frozen=True)
class TimestepRanges:
    """The ranges of all layers over the steps of denoising.

    timesteps: the scheduler's, as the first prompt had them, in the order of the steps.
    """

    timesteps: tuple[float, ...]
    rows: tuple[StepRange, ...]

    def __str__(self) -> str:
        lines = []
        for row in sorted(self.rows, key=lambda row: -row.spread):
            reach = f"{row.lowest:.4g} to {row.highest:.4g} ({row.spread:.2f} times)"
            lines.append(f"{row.layer} {row.tensor}: amax {reach}")
        return "\n".join(lines)


class RangeObserver:
    """Collects ranges, tensor by tensor; on the device until they are asked for."""

    def __init__(self) -> None:
        self.timesteps: tuple[float, ...] = ()
        self._seen: dict[tuple[str, str], dict[int, Tensor]] = {}

    def see(self, layer: str, tensor: str, x: Tensor, step: int) -> None:
        """One pass of one layer at a step."""
        amax = finite_amax(x, PerTensor())
        steps = self._seen.setdefault((layer, tensor), {})
        steps[step] = torch.maximum(steps[step].to(amax.device), amax) if step in steps else amax

    def finish_prompt(self, timesteps: Sequence[float]) -> None:
        """A prompt is done; the first says what the timesteps are."""
        self.timesteps = self.timesteps or tuple(timesteps)

    def result(self) -> TimestepRanges:
        """What was seen so far, in the order in which the layers first ran."""
        num_steps = max((1 + max(steps) for steps in self._seen.values()), default=0)
        num_steps = max(num_steps, len(self.timesteps))
        rows = [
            StepRange(
                layer=layer,
                tensor=tensor,
                amax=tuple(float(steps.get(i, math.nan)) for i in range(num_steps)),
            )
            for (layer, tensor), steps in self._seen.items()
        ]
        return TimestepRanges(self.timesteps, tuple(rows))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as `load_state_dict` takes it."""
        seen = [
            (layer, tensor, {step: float(x) for step, x in steps.items()})
            for (layer, tensor), steps in self._seen.items()
        ]
        return {"timesteps": list(self.timesteps), "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.timesteps = tuple(state["timesteps"])
        self._seen = {
            (layer, tensor): {step: torch.tensor(x) for step, x in steps.items()}
            for layer, tensor, steps in state["seen"]
        }
