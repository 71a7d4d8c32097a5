"""What each op would run on a device, and why: the table behind `octavo doctor`."""

from dataclasses import dataclass

import torch

from octavo.errors import UnsupportedError
from octavo.kernels.device import Device, describe
from octavo.ops.select import OPS, Request, Selection, select

_FP8, _BF16 = torch.float8_e4m3fn, torch.bfloat16
_OPERANDS = {"BF16": (_BF16, _BF16), "FP8": (_FP8, _FP8), "BF16 to FP8": (_BF16, _FP8)}
# Decoding and appending take BF16 whatever the pages are; quantizing starts from BF16.
_KINDS = {
    "append_kv": ("BF16", "BF16 to FP8"),
    "attention": ("BF16", "FP8"),
    "decode_attention": ("BF16", "BF16 to FP8"),
    "linear_gelu": ("BF16",),
    "matvec": ("BF16",),
    "prefill_attention": ("BF16", "FP8"),
    "quantize": ("BF16 to FP8",),
    "quantize_qkv": ("BF16 to FP8",),
    "rotate_qk": ("BF16",),
    "scaled_mm": ("FP8", "BF16 to FP8"),
}


@dataclass(frozen=True)
class Explanation:
    """One op with one kind of operands: what was selected, or why nothing can be."""

    op: str
    operands: str
    selection: Selection | None
    reason: str


def explain(device: Device, head_dim: int = 128) -> list[Explanation]:
    """Every op with each kind of operands, as it would run on `device`."""
    return [_explain(op, kind, device, head_dim) for op in OPS for kind in _KINDS[op]]


def explain_op(op: str, operands: str, device: torch.device, head_dim: int = 128) -> Explanation:
    """One op with one kind of operands, as it would run on `device`."""
    return _explain(op, operands, describe(device), head_dim)


def _explain(op: str, kind: str, device: Device, head_dim: int) -> Explanation:
    dtype, other_dtype = _OPERANDS[kind]
    # octavo's layers have values transposed for FP8 attention.
    features = frozenset({"transposed"} if (op, kind) == ("attention", "FP8") else ())
    request = Request(
        op=op,
        device=device,
        dtype=dtype,
        other_dtype=other_dtype,
        head_dim=head_dim,
        features=features,
    )
    try:
        selection = select(request)
    except UnsupportedError as error:
        return Explanation(op, kind, None, str(error))
    return Explanation(op, kind, selection, selection.reason)
