"""What one attention call computes, apart from its operands."""

import math
from ast import literal_eval
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal, get_args

from torch import Tensor

from octavo.errors import ConfigError

# Kernels add a window and a position in 32 bits.
MAX_WINDOW = 2**30

Exponentials = Literal["codes", "exact"]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """softmax(mask(softcap(q·kᵀ · softmax_scale))) · v, and how the products are added up.

    The last query sits at the last key: query i has position kv_len − q_len + i.

    causal: a query sees no key after its own position.
    window: a query sees only keys closer than this to its own position (itself at distance 0);
        with `causal` these are the last `window` keys, as in transformers.
    softcap: logits become softcap·tanh(logits / softcap).
    softmax_scale: None means 1/√head_dim.
    promote_every: after how many KV tiles the tensor core's sum of P·V moves to a float32
        register; 1 is every tile, None never (one-level accumulation). FP8 only.
    exponentials: how P becomes e4m3: by "codes", which take no exponentials, or "exact", by
        exponentials and rounding; None leaves it to the implementation. FP8 only.
    """

    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    softmax_scale: float | None = None
    promote_every: int | None = 1
    exponentials: Exponentials | None = None

    def __post_init__(self) -> None:
        # Kept as Python's own numbers: the repr() of numpy's is not what parse_spec reads.
        for name in ("window", "promote_every"):
            value = getattr(self, name)
            if value is None:
                continue
            if not hasattr(value, "__index__") or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1 or None, got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.window is not None and self.window > MAX_WINDOW:
            raise ConfigError(
                f"window must be at most {MAX_WINDOW}, got {self.window}: leave it out, it hides "
                "nothing"
            )
        for name in ("softcap", "softmax_scale"):
            value = getattr(self, name)
            if value is None:
                continue
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive finite number or None, got {value}")
            object.__setattr__(self, name, float(value))
        if self.exponentials not in (*get_args(Exponentials), None):
            raise ConfigError(
                f"exponentials must be 'codes', 'exact' or None, got {self.exponentials!r}"
            )

    def __str__(self) -> str:
        """Only what differs from the default, such as "causal=True window=128"."""
        shown = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return " ".join(f"{name}={value!r}" for name, value, default in shown if value != default)

    def scale_for(self, head_dim: int) -> float:
        """The factor that q·k is multiplied by."""
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


@lru_cache(maxsize=1024)
def parse_spec(text: str) -> AttentionSpec:
    """The spec whose str() is `text`: how a spec travels through torch.library."""
    pairs = (pair.split("=", 1) for pair in text.split())
    return AttentionSpec(**{name: literal_eval(value) for name, value in pairs})


@dataclass(frozen=True, eq=False)
class Packing:
    """Where each sequence lies in packed tensors [tokens, heads, head_dim].

    cu_seqlens: int32 [num_sequences + 1], starting with 0: sequence i is cu_seqlens[i] …
    cu_seqlens[i + 1]. max_seqlen: an upper bound of the lengths, so that nobody asks the device.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @staticmethod
    def same(cu_seqlens: Tensor, max_seqlen: int) -> "Packing":
        """Queries and keys of the same tokens, as in self-attention."""
        return Packing(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
