"""Launch Hopper's attention kernel with random shapes, each beside plain attention in float32.

    python scripts/fuzz_attention.py [LAUNCHES] [SEED]      10000 and 0 unless given

Both get the same FP8 operands; the kernel rounds P, which costs 0.026 of the result's RMS. A launch
fails if the results differ by more than twice that, if one is NaN, or if the log-sum-exp is off by
more than rounding P explains. Kernels are compiled by all cores first. One record goes to
results/fuzz_<gpu>.jsonl.
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
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from octavo import ops
from octavo.kernels.device import default_device
from octavo.kernels.tuning import file_name
from octavo.measure import store
from octavo.measure.bench.gpu_records import code_hash
from octavo.measure.records import Machine, Measurement
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.qkv import QkvScales
from octavo.reference.qkv import transpose_values
from octavo.testing.inputs import make_packing

RESULTS = Path(__file__).parents[1] / "results"
HEAD_DIMS = (64, 72, 80, 96, 128, 192)
MAX_LENGTH = 700
MAX_ERROR = 2 * 0.026
SPREAD = 64.0  # of FP8 values: few reach 448
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


@dataclass(frozen=True)
class Operands:
    """What attention gets; sequences of a packed call lie one after the other."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: QkvScales
    sinks: Tensor | None
    packing: Packing | None
    spec: AttentionSpec


def make_operands(kind: Kind, shape: Shape, device: str) -> Operands:
    """Values as FP8 holds them, so that both sides see the same."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    packing = None
    sizes = [(len(shape.q_lens), shape.q_lens[0]), *[(len(shape.kv_lens), shape.kv_lens[0])] * 2]
    if kind.is_packed:
        packing = make_packing(shape.q_lens, shape.kv_lens, device=device)
        sizes = [(1, sum(shape.q_lens)), *[(1, sum(shape.kv_lens))] * 2]
    q, k, v = (
        (torch.randn(*size, h, kind.head_dim, device=device) * SPREAD).to(torch.float8_e4m3fn)
        for size, h in zip(sizes, heads, strict=True)
    )
    if kind.is_packed:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    scales = (
        (0.5 + torch.rand(h if shape.per_head else (), device=device)) / SPREAD for h in heads
    )
    return Operands(
        *(q, k, v),
        QkvScales(*scales),
        torch.randn(shape.num_heads, device=device) if kind.has_sinks else None,
        packing,
        AttentionSpec(
            causal=kind.is_causal,
            window=shape.window if kind.has_window else None,
            softcap=5.0 if kind.has_softcap else None,
        ),
    )


def attend(x: Operands, impl: str) -> tuple[Tensor, Tensor]:
    """(out, lse) by octavo."""
    ends = None if x.packing is None else x.packing.cu_seqlens_k
    return ops.attention(
        *(x.q, x.k, transpose_values(x.v, ends), x.spec, x.scales),
        packing=x.packing,
        sinks=x.sinks,
        return_lse=True,
        value_layout="transposed",
        impl=impl,
    )


def expected(x: Operands, shape: Shape) -> tuple[Tensor, Tensor]:
    """(out, lse) in float32: all sequences at once, padded to the longest."""
    device, q_lens, kv_lens = x.q.device, torch.tensor(shape.q_lens), torch.tensor(shape.kv_lens)
    q_index, q_mask = _places(q_lens)
    k_index, k_mask = _places(kv_lens)
    tokens = (x.q.flatten(0, -3), x.k.flatten(0, -3), x.v.flatten(0, -3))
    q, k, v = (
        F.pad(y.float(), (0, 0, 0, 0, 0, 1))[index.to(device)] * _of_heads(scale)
        for y, index, scale in zip(
            tokens, (q_index, k_index, k_index), (x.scales.q, x.scales.k, x.scales.v), strict=True
        )
    )
    group = shape.num_heads // shape.num_kv_heads
    k, v = (y.repeat_interleave(group, 2) for y in (k, v))
    logits = torch.einsum("nqhd,nkhd->nhqk", q, k) * x.spec.scale_for(q.shape[-1])
    if x.spec.softcap is not None:
        logits = x.spec.softcap * torch.tanh(logits / x.spec.softcap)
    hidden = ~_visible(q_lens, kv_lens, q_mask, k_mask, x.spec).to(device)
    logits = logits.masked_fill_(hidden[:, None], float("-inf"))
    terms = logits
    if x.sinks is not None:
        sinks = x.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        terms = torch.cat([logits, sinks], -1)
    lse = terms.logsumexp(-1)
    weights = (logits - lse[..., None]).exp_().nan_to_num_(0.0)  # nan: nothing is seen
    out = torch.einsum("nhqk,nkhd->nqhd", weights, v)
    kept = q_mask.to(device)
    shaped = x.q.shape
    return out[kept].view(shaped), lse.transpose(1, 2)[kept].view(shaped[:-1])


def _of_heads(scale: Tensor) -> Tensor:
    return scale.view(-1, 1) if scale.dim() else scale


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Of sequences one after the other: [number, longest] indices of tokens, and which are real."""
    step = torch.arange(max(1, int(lengths.max())))
    mask = step < lengths[:, None]
    return ((lengths.cumsum(0) - lengths)[:, None] + step).where(mask, torch.tensor(0)), mask


def _visible(
    q_lens: Tensor, kv_lens: Tensor, q_mask: Tensor, k_mask: Tensor, spec: AttentionSpec
) -> Tensor:
    """[number, queries, keys]: which keys a query sees."""
    key = torch.arange(k_mask.shape[1])
    position = (kv_lens - q_lens)[:, None, None] + torch.arange(q_mask.shape[1])[:, None]
    seen = k_mask[:, None, :] & q_mask[:, :, None]
    if spec.causal:
        seen = seen & (key <= position)
    if spec.window is not None:
        seen = seen & ((key - position).abs() < spec.window)
    return seen


def launch(kind: Kind, shape: Shape, impl: str = "gluon", device: str = "cuda") -> Tensor:
    """(difference of the results, of the log-sum-exp, number of NaN) as one tensor."""
    x = make_operands(kind, shape, device)
    out, lse = attend(x, impl)
    exact, exact_lse = expected(x, shape)
    norm = exact.norm().clamp(min=1e-3)
    off = torch.where(exact_lse.isfinite(), (lse - exact_lse).abs(), (lse != exact_lse).float())
    return torch.stack(
        [
            (out.float() - exact).norm() / norm,
            off.max() if off.numel() else off.sum(),
            out.isnan().sum().float(),
        ]
    )


def compile_kind(kind: Kind) -> None:
    """One launch, so that the cache on disk has the kernel."""
    launch(kind, draw_shape(kind, random.Random(0)))
    torch.cuda.synchronize()


def fuzz(num_launches: int, seed: int) -> list[float]:
    """The worst errors of so many launches; ends the program at the first that is wrong."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    waiting: list[tuple[Kind, Shape, Tensor]] = []
    worst = torch.zeros(3)
    for number in track(range(1, num_launches + 1), "launching"):
        kind = source.choice(KINDS)
        shape = draw_shape(kind, source)
        waiting.append((kind, shape, launch(kind, shape)))
        if number % CHECK_EVERY and number != num_launches:
            continue
        for one_kind, one_shape, found in waiting:
            error = found.cpu()
            if not (error[0] <= MAX_ERROR and error[1] <= MAX_LSE_ERROR and error[2] == 0):
                sys.exit(f"launch by {number}: {error.tolist()}: {one_kind} {one_shape}")
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
    torch.backends.cuda.matmul.allow_tf32 = False
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_kind, KINDS))
    started = time.monotonic()
    worst = fuzz(num_launches, seed)
    seconds = time.monotonic() - started
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
