"""rotate_qk: rotary embedding of queries and keys that stay in the model's own dtype."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.rotate_qk.config import objection
from octavo.numerics.rotary import Rotary
from octavo.ops.arguments import Arguments
from octavo.ops.check import check_float, check_one_device
from octavo.ops.register import Operator
from octavo.ops.select import Request, register_impl, register_reference
from octavo.reference.qkv import rotate_qk as reference


def rotate_qk(
    q: Tensor, k: Tensor, rotary: Rotary, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by tables of cos and sin; each result is contiguous and in its own dtype.

    q: [..., num_heads, head_dim]; k: [..., num_kv_heads, head_dim]; bf16, fp16 or fp32, views of a
    joint projection as well. Pairs are turned in float32, whatever the dtypes are, and rounded
    once. For attention in FP8 `quantize_qkv` turns them on the way.
    """
    turned_q, turned_k = _OPERATOR(RotateArguments(q, k, rotary, impl))
    return turned_q, turned_k


@dataclass(eq=False)
class RotateArguments(Arguments):
    """One call of `rotate_qk`."""

    q: Tensor
    k: Tensor
    rotary: Rotary
    impl: str | None

    def check(self) -> None:
        q, k, rotary = self.q, self.k, self.rotary
        for name, x in (("q", q), ("k", k)):
            check_float(name, x)
            if x.dim() < 3:
                raise ConfigError(f"expected {name} [..., heads, head_dim], got {list(x.shape)}")
        if q.shape[-1] != k.shape[-1]:
            raise ConfigError(
                f"expected q and k of one head_dim, got {q.shape[-1]} and {k.shape[-1]}"
            )
        check_float("cos and sin", rotary.cos)
        check_one_device(q=q, k=k, cos=rotary.cos, sin=rotary.sin)
        for x in (q, k):
            rotary.check(math.prod(x.shape[:-2]), x.shape[-1])

    def request(self) -> Request:
        return Request(
            op="rotate_qk",
            device=describe(self.q.device),
            dtype=self.q.dtype,
            other_dtype=self.k.dtype,
            head_dim=self.q.shape[-1],
            features=frozenset({"interleaved"} if self.rotary.is_interleaved else ()),
        )

    def run(self, run: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = run(self.q, self.k, self.rotary)
        return turned_q.contiguous(), turned_k.contiguous()


def _fake(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


_OPERATOR = Operator("rotate_qk", RotateArguments, _fake)


def _triton_objection(request: Request) -> str | None:
    return objection(request.device, request.head_dim)


register_reference("rotate_qk", reference)
register_impl(
    "rotate_qk",
    "triton",
    "octavo.kernels.rotate_qk.triton:rotate_qk",
    objection=_triton_objection,
    reason="one launch for queries and keys",
    is_automatic=True,
    is_repeatable=True,
)
