"""Attention beside the peers: ours in FP8 and BF16, torch's, cuDNN's and FlashAttention-3."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from octavo import ops
from octavo.kernels.attention.config import work
from octavo.measure.bench import peers
from octavo.measure.bench.benchmark import Benchmark, Contender, timed_impls
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.quantize import Quantized
from octavo.reference import attention as reference

# Queries at the end of a sequence, which see all of its keys: what is checked.
CHECKED = 64
MAX_ERROR = {"FP8": 0.07, "BF16": 0.01}
# (batch, length, query heads, KV heads, head_dim, causal)
SMALL = ((1, 512, 8, 8, 128, False),)
LARGE = (
    *((1, 8192, 16, 16, head_dim, False) for head_dim in (64, 72, 80, 96, 128, 192, 256)),
    *((1, length, 32, 8, 128, True) for length in (16384, 32768)),
    (1, 16384, 16, 8, 256, True),
)

Inputs = tuple[Tensor, Tensor, Tensor]
Prepare = Callable[[Inputs], Callable[[], Tensor | Quantized]]


def benchmarks(device: torch.device, folder: Path | None) -> list[Benchmark]:
    """One benchmark for each size that suits the device; `folder` may hold peers."""
    sizes = LARGE if device.type == "cuda" else SMALL
    return [_benchmark(device, folder, *size) for size in sizes]


def bytes_per_token(operands: str, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """q, k and v are read, the result is written in BF16."""
    width = 1 if operands == "FP8" else 2
    return head_dim * (width * (num_heads + 2 * num_kv_heads) + 2 * num_heads)


def _benchmark(
    device: torch.device,
    folder: Path | None,
    batch: int,
    length: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_causal: bool,
) -> Benchmark:
    spec = AttentionSpec(causal=is_causal)

    def make_inputs(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        heads = (num_heads, num_kv_heads, num_kv_heads)
        q, k, v = (
            torch.randn(batch, length, n, head_dim, device=device, generator=generator).bfloat16()
            for n in heads
        )
        return q, k, v

    def truth(inputs: Inputs) -> Tensor:
        q, k, v = inputs
        return reference.attention(q[:, -CHECKED:], k, v, spec, compute=torch.float64)[0]

    def contender(name: str, operands: str, prepare: Prepare, **notes: str | int) -> Contender:
        moved = batch * length * bytes_per_token(operands, num_heads, num_kv_heads, head_dim)
        return Contender(name, operands, prepare, MAX_ERROR[operands], moved, notes)

    ours = [
        contender(name, operands, partial(_ours, name, operands, spec))
        for operands in ("FP8", "BF16")
        for name in timed_impls("attention", device)
    ]
    others = []
    if device.type == "cuda":
        others = [
            contender("vllm-fa3", operands, _peer(peers.vllm_fa3, folder, is_fp8, is_causal))
            for operands, is_fp8 in (("FP8", True), ("BF16", False))
        ]
        others += [
            contender("fa3-fwd", "FP8", _peer(peers.fa3_fwd, folder, True, is_causal), levels=1),
            contender("fa3-fwd", "BF16", _peer(peers.fa3_fwd, folder, False, is_causal)),
            contender("cudnn", "FP8", _peer(peers.cudnn_fp8, folder, is_causal), output="FP8"),
            contender(
                "torch-cudnn", "BF16", _peer(peers.sdpa, SDPBackend.CUDNN_ATTENTION, is_causal)
            ),
            contender(
                "torch-flash", "BF16", _peer(peers.sdpa, SDPBackend.FLASH_ATTENTION, is_causal)
            ),
        ]
    heads = f"{num_heads}/{num_kv_heads}"
    return Benchmark(
        op="attention",
        case={
            "shape": f"{batch}x{length} heads {heads} head_dim {head_dim}",
            "causal": is_causal,
        },
        make_inputs=make_inputs,
        truth=truth,
        contenders=(*ours, *others),
        flops=work(batch, length, length, num_heads, head_dim, is_causal),
        checked=_checked,
    )


def _checked(result: Tensor | Quantized) -> Tensor:
    value = result if isinstance(result, Tensor) else result.dequantize()
    return value[:, -CHECKED:]


def _ours(impl: str, operands: str, spec: AttentionSpec, inputs: Inputs) -> Callable[[], Tensor]:
    if operands == "BF16":
        return partial(ops.attention, *inputs, spec, impl=impl)
    qkv = ops.quantize_qkv(*inputs, value_layout="transposed")
    return partial(
        ops.attention,
        *(qkv.q, qkv.k, qkv.v, spec, qkv.scales),
        value_layout=qkv.value_layout,
        impl=impl,
    )


def _peer(function: Callable[..., Callable[[], Tensor | Quantized]], *settings: object) -> Prepare:
    *first, is_causal = settings
    return lambda inputs: function(*first, *inputs, is_causal)
