"""grouped_mm: rows of activations, sorted by expert, by the FP8 weights of the experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.device import describe
from octavo.kernels.grouped_mm.config import objection
from octavo.numerics.formats import is_fp8
from octavo.numerics.granularity import Granularity
from octavo.numerics.quantize import Quantized
from octavo.ops.arguments import Arguments
from octavo.ops.check import FLOAT_DTYPES, check_float, check_one_device
from octavo.ops.register import Operator
from octavo.ops.scaled_mm import check_granularities, check_quantized
from octavo.ops.select import Request, register_impl, register_reference
from octavo.reference.gemm import grouped_mm as reference


def grouped_mm(
    a: Quantized | Tensor,
    b: Quantized,
    ends: Tensor,
    *,
    tokens: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> Tensor:
    """Multiply the rows of each expert by its weight: [rows, columns], with scales and bias.

    a: [tokens, K], FP8 with one scale per tensor, per token or per block of 1 × columns; or plain
    bf16, fp16 or fp32, for weights in FP8 only. b: [experts, columns, K] in FP8, with one scale per
    tensor, per channel or per block. ends: int32 [experts], ascending: where each expert's rows
    end and the next one's begin; rows behind the last end belong to no expert and are zero. The
    ends stay on their device: nothing waits for them. tokens: int32 or int64 [rows], which token
    each row is; left out, every token is one row. bias: [experts, columns].
    """
    scale, granularity = (None, None) if isinstance(a, Tensor) else (a.scale, a.granularity)
    data = a if isinstance(a, Tensor) else a.data
    call = GroupedArguments(data, scale, granularity, b, ends, tokens, bias, out_dtype, impl)
    result: Tensor = _OPERATOR(call)
    return result


@dataclass(eq=False)
class GroupedArguments(Arguments):
    """One call of `grouped_mm`; a_scale and a_granularity: of a in FP8."""

    a: Tensor
    a_scale: Tensor | None
    a_granularity: Granularity | None
    b: Quantized
    ends: Tensor
    tokens: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    impl: str | None

    def check(self) -> None:
        a, b, bias = self.a, self.b, self.bias
        if a.dim() != 2 or b.data.dim() != 3 or a.shape[1] != b.data.shape[2]:
            raise ConfigError(
                "expected a [tokens, K] and b [experts, columns, K], got "
                f"{list(a.shape)} and {list(b.data.shape)}"
            )
        operand = self.operand()
        if isinstance(operand, Tensor):
            check_float("a", a)
        else:
            check_quantized("a", operand)
        check_quantized("b", b)
        check_granularities(self.a_granularity, b.granularity)
        _check_index("ends", self.ends, b.data.shape[0], (torch.int32,))
        if self.tokens is not None:
            _check_index("tokens", self.tokens, None, (torch.int32, torch.int64))
        if bias is not None:
            check_float("bias", bias)
            if bias.shape != b.data.shape[:2]:
                raise ConfigError(
                    f"expected a bias of shape {list(b.data.shape[:2])}, got {list(bias.shape)}"
                )
        if self.out_dtype not in FLOAT_DTYPES:
            expected = "bfloat16, float16 or float32"
            raise ConfigError(f"expected out_dtype {expected}, got {self.out_dtype}")
        check_one_device(
            a=a,
            a_scale=self.a_scale,
            b=b.data,
            b_scale=b.scale,
            ends=self.ends,
            tokens=self.tokens,
            bias=bias,
        )

    def operand(self) -> Quantized | Tensor:
        """a with its scales, or as it is if it has none."""
        if self.a_scale is None or self.a_granularity is None:
            return self.a
        return Quantized(self.a, self.a_scale, self.a_granularity)

    def request(self) -> Request:
        num_experts, num_columns, depth = self.b.data.shape
        used = {"bias": self.bias is not None, "tokens": self.tokens is not None}
        return Request(
            op="grouped_mm",
            device=describe(self.a.device),
            dtype=self.a.dtype,
            other_dtype=self.b.data.dtype,
            granularity=f"{self.a_granularity or 'tensor'} by {self.b.granularity}",
            features=frozenset(name for name, is_used in used.items() if is_used),
            group=num_experts,
            sizes=(len(self.a if self.tokens is None else self.tokens), num_columns, depth),
            bias_dtype=None if self.bias is None else self.bias.dtype,
            out_dtype=self.out_dtype,
        )

    def run(self, run: Callable[..., Any]) -> Tensor:
        operands = (self.operand(), self.b, self.ends, self.tokens, self.bias)
        result: Tensor = run(*operands, out_dtype=self.out_dtype)
        return result


def _check_index(name: str, x: Tensor, length: int | None, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dim() != 1 or x.dtype not in dtypes or length not in (None, len(x)):
        size = "rows" if length is None else length
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ConfigError(f"expected {name} as {expected} [{size}], got {x.dtype} {list(x.shape)}")


def _fake(a: Tensor, b_data: Tensor, tokens: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    num_rows = a.shape[0] if tokens is None else tokens.shape[0]
    return a.new_empty((num_rows, b_data.shape[1]), dtype=out_dtype)


def _reference(
    a: Quantized | Tensor,
    b: Quantized,
    ends: Tensor,
    tokens: Tensor | None,
    bias: Tensor | None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """What every implementation of `grouped_mm` takes and returns."""
    return reference(a, b, ends, tokens, bias).to(out_dtype)


def _triton_objection(request: Request) -> str | None:
    return objection(request.device, is_fp8=is_fp8(request.dtype))


_OPERATOR = Operator("grouped_mm", GroupedArguments, _fake)
register_reference("grouped_mm", _reference)
register_impl(
    "grouped_mm",
    "triton",
    "octavo.kernels.grouped_mm.triton:grouped_mm",
    objection=_triton_objection,
    reason="tiles of the experts that have rows, found on the GPU",
    is_automatic=True,
    is_repeatable=True,
)
