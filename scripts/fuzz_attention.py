"""Launch Hopper's attention kernel with random shapes, each beside the Triton kernel.

    python scripts/fuzz_attention.py [LAUNCHES] [SEED]      10000 and 0 unless given

Both get the same FP8 operands; they round P around different maxima, which costs each 0.026 of the
result's RMS. A launch fails if the results differ by more than twice that, if one is NaN, or if the
log-sum-exp is off by more than rounding P explains. Kernels are compiled by all cores first, and
eight processes launch at the same time. One record goes to results/fuzz_<gpu>.jsonl.
"""

import itertools
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.kernels.device import default_device
from octavo.kernels.tuning import file_name
from octavo.measure import store
from octavo.measure.bench.gate import code_hash
from octavo.measure.records import Machine, Measurement
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.granularity import PerHead, PerTensor

RESULTS = Path(__file__).parents[1] / "results"
HEAD_DIMS = (64, 72, 80, 96, 128, 192)
MAX_LENGTH = 700
MAX_ERROR = 2 * 0.026
MAX_LSE_ERROR = 0.1
CHECK_EVERY = 100


@dataclass(frozen=True)
class Kind:
    """What is compiled in."""

    head_dim: int
    is_packed: bool
    is_causal: bool
    has_window: bool
    has_softcap: bool
    has_sinks: bool


FEATURES = (
    (False, False, False, False),
    (True, False, False, False),
    (True, True, False, True),
    (False, True, True, False),
)
KINDS = [
    Kind(head_dim, is_packed, *features)
    for head_dim, is_packed, features in itertools.product(HEAD_DIMS, (False, True), FEATURES)
]


@dataclass(frozen=True)
class Shape:
    """What is drawn anew for each launch."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    window: int
    per_head: bool


def draw_shape(kind: Kind, source: random.Random) -> Shape:
    """Lengths at and around the edges of tiles more often than others."""

    def length() -> int:
        edge = source.choice((1, 16, 64, 128, 256, 384)) + source.randint(-1, 1)
        return max(1, edge) if source.random() < 0.5 else source.randint(1, MAX_LENGTH)

    count = source.randint(1, 5) if source.random() < 0.8 else source.randint(20, 40)
    num_kv_heads = source.choice((1, 2, 3))
    if kind.is_packed:
        kv_lens = tuple(0 if source.random() < 0.1 else length() for _ in range(count))
        q_lens = tuple(n if source.random() < 0.5 else length() for n in kv_lens)
    else:
        q_lens, kv_lens = (length(),) * count, (length(),) * count
    return Shape(
        q_lens,
        kv_lens,
        num_kv_heads * source.choice((1, 2, 4)),
        num_kv_heads,
        source.randint(1, MAX_LENGTH),
        source.random() < 0.5,
    )


def launch(kind: Kind, shape: Shape) -> Tensor:
    """(difference of the results, of the log-sum-exp, number of NaN) as one tensor."""
    spec = AttentionSpec(
        causal=kind.is_causal,
        window=shape.window if kind.has_window else None,
        softcap=5.0 if kind.has_softcap else None,
    )
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    lens = (shape.q_lens, shape.kv_lens, shape.kv_lens)
    granularity = PerHead() if shape.per_head else PerTensor()
    packing = ends = None
    sizes: list[tuple[int, ...]]
    if kind.is_packed:
        sizes = [(sum(n), h, kind.head_dim) for n, h in zip(lens, heads, strict=True)]
        ends = [torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in lens[:2]]
        packing = Packing(ends[0], ends[1], max(1, *shape.q_lens), max(1, *shape.kv_lens))
    else:
        sizes = [(len(n), n[0], h, kind.head_dim) for n, h in zip(lens, heads, strict=True)]
    q, k, v = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    qkv = ops.quantize_qkv(
        *(q, k, v),
        granularity=granularity,
        value_layout="transposed",
        cu_seqlens=None if ends is None else ends[1],
    )
    sinks = torch.randn(shape.num_heads, device="cuda") if kind.has_sinks else None
    (out, lse), (expected, expected_lse) = (
        ops.attention(
            *(qkv.q, qkv.k, qkv.v, spec, qkv.scales),
            packing=packing,
            sinks=sinks,
            return_lse=True,
            value_layout="transposed",
            impl=impl,
        )
        for impl in ("gluon", "triton")
    )
    norm = expected.float().norm().clamp(min=1e-3)
    seen = expected_lse.isfinite()
    off = torch.where(seen, (lse - expected_lse).abs(), (lse != expected_lse).float())
    return torch.stack(
        [
            (out.float() - expected.float()).norm() / norm,
            off.max() if off.numel() else off.sum(),
            out.isnan().sum().float(),
        ]
    )


def compile_kind(kind: Kind) -> None:
    """One launch, so that the cache on disk has the kernels."""
    launch(kind, draw_shape(kind, random.Random(0)))
    torch.cuda.synchronize()


def fuzz(num_launches: int, seed: int) -> list[float]:
    """The worst errors of so many launches; raises at the first that is wrong."""
    source = random.Random(seed)
    waiting: list[tuple[Kind, Shape, Tensor]] = []
    worst = torch.zeros(3)
    for number in range(1, num_launches + 1):
        kind = source.choice(KINDS)
        shape = draw_shape(kind, source)
        waiting.append((kind, shape, launch(kind, shape)))
        if number % CHECK_EVERY and number != num_launches:
            continue
        for one_kind, one_shape, found in waiting:
            error = found.cpu()
            if not (error[0] <= MAX_ERROR and error[1] <= MAX_LSE_ERROR and error[2] == 0):
                raise SystemExit(f"launch by {number}: {error.tolist()}: {one_kind} {one_shape}")
            worst = torch.maximum(worst, error)
        waiting.clear()
    return worst.tolist()


def main() -> None:
    """Compile, launch, check, record."""
    num_launches = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    device = default_device()
    if device.capability != (9, 0):
        sys.exit(f"expected a GPU of compute capability 9.0, got {device.name}")
    num_processes, started = min(14, os.cpu_count() or 1), time.monotonic()
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kind, KINDS))
        print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
        started = time.monotonic()
        shares = [num_launches * (i + 1) // 8 - num_launches * i // 8 for i in range(8)]
        found = list(pool.map(fuzz, shares, range(8 * seed, 8 * seed + 8)))
    seconds = time.monotonic() - started
    worst = [max(errors) for errors in zip(*found, strict=True)]
    record = Measurement(
        op="fuzz",
        impl="gluon",
        case={"kernel": "attention", "code": code_hash("attention"), "seed": seed},
        values={
            "num_launches": num_launches,
            "max_relative_rms": worst[0],
            "max_lse_error": worst[1],
            "seconds": seconds,
        },
        machine=Machine.current(gpu=device.name, capability=device.capability),
        command=f"python scripts/fuzz_attention.py {num_launches} {seed}",
    )
    store.append(RESULTS / f"fuzz_{Path(file_name(device)).stem}.jsonl", [record])
    print(f"{num_launches} launches in {seconds:.0f} s, worst {worst}")


if __name__ == "__main__":
    main()
