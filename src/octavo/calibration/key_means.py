"""The mean key of every KV head, found in a pass of its own before scales are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.brief import list_names
from octavo.errors import ConfigError


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
        if missing := [name for name, total in self.sums.items() if total is None]:
            raise ConfigError(
                f"expected every layer to run, got no pass of {list_names(missing)}: "
                "use prompts that reach them"
            )
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

    def state_dict(self) -> dict[str, Any]:
        """Everything, on the CPU, as `load_state_dict` takes it."""
        return {
            "sums": {name: None if x is None else x.cpu() for name, x in self.sums.items()},
            "num_tokens": dict(self.num_tokens),
            "num_prompts": self.num_prompts,
            "is_complete": self.is_complete,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was made."""
        self.sums, self.num_tokens = dict(state["sums"]), dict(state["num_tokens"])
        self.num_prompts, self.is_complete = state["num_prompts"], state["is_complete"]
