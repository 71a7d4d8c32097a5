"""Time `decode_attention` beside vLLM's FlashAttention-3, after checking its results.

Needs a GPU on which the Gluon kernel runs. Every shape has more than an L2 cache of pages in random
order, replayed in a CUDA graph; a step's plan is made before, as for one of many layers. Results of
sampled sequences are compared with float64 over the same pages. Appends one record for each shape,
cache and implementation. FOLDER, if given, holds `vllm_fa3_C.abi3.so` (or the same as .xz).

    python scripts/measure_decode.py results/decode_h200.jsonl [FOLDER]
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.view import PagedView
from octavo.kernels.device import default_device
from octavo.measure import store
from octavo.measure.bench import peers
from octavo.measure.bench.timing import sample_graph_ms
from octavo.measure.records import Machine, Measurement, timing

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
TOUCHED_BYTES = 260e6
MAX_ERROR = {"gluon": 5e-3, "triton": 5e-3, "fa3": 6e-2}
UNEVEN = (131072, 1000, 2000, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Step:
    """One decode step: its lengths and heads, and who is timed on it."""

    lengths: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    impls: tuple[str, ...] = ("gluon", "fa3")

    @property
    def name(self) -> str:
        """Such as "8 × 32768", or "8 uneven"."""
        first = self.lengths[0]
        is_even = set(self.lengths) == {first}
        return f"{len(self.lengths)} × {first}" if is_even else f"{len(self.lengths)} uneven"


EVERYBODY = ("gluon", "triton", "fa3")
STEPS = (
    Step((32768,) * 8, impls=EVERYBODY),
    Step((131072,) * 8),
    Step((32768,), impls=EVERYBODY),
    Step((131072,)),
    *(Step((length,), impls=EVERYBODY) for length in (256, 1024, 4096, 16384)),
    Step((4096,) * 64),
    Step((1024,) * 256),
    Step(UNEVEN),
    Step((sum(UNEVEN) // 8,) * 8),
    Step((65536,) * 8, head_dim=64),
    Step((32768,) * 8, head_dim=256, num_heads=16, num_kv_heads=4),
    Step((32768,) * 8, num_heads=8),
    Step((32768,) * 8, num_heads=56),
    Step((32768,) * 8, num_heads=64),
    Step((32768,) * 8, page_size=16, impls=("gluon",)),
)


@dataclass
class Inputs:
    """Queries and views of disjoint pages, to be decoded in turn."""

    step: Step
    queries: list[Tensor]
    views: list[PagedView]
    num_bytes: int


def make_inputs(step: Step, dtype: torch.dtype) -> Inputs:
    """Normal keys and values in pages of random order, as many sets as the L2 cache needs."""
    heads, size, dim = step.num_kv_heads, step.page_size, step.head_dim
    num_bytes = 2 * sum(step.lengths) * heads * dim * dtype.itemsize
    num_sets = max(2, min(100, math.ceil(TOUCHED_BYTES / num_bytes)))
    counts = [-(-length // size) for length in step.lengths]
    order = torch.randperm(sum(counts) * num_sets, device="cuda").int().split(counts * num_sets)
    key, value = (random_pages((sum(counts) * num_sets, heads, size, dim), dtype) for _ in "kv")
    scale = torch.full((heads,), 1 / 64 if dtype == FP8 else 1.0, device="cuda")
    scale = scale if dtype == FP8 else torch.ones((), device="cuda")
    lengths = torch.tensor(step.lengths, dtype=torch.int32, device="cuda")
    queries, views = [], []
    for index in range(num_sets):
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
        for row, count in enumerate(counts):
            table[row, :count] = order[index * len(counts) + row]
        views.append(PagedView(key, value, scale, scale, table, lengths))
        shape = (len(counts), 1, step.num_heads, dim)
        queries.append(torch.randn(shape, device="cuda", dtype=BF16))
    return Inputs(step, queries, views, num_bytes)


def random_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal values, scaled by 64 if they become FP8, drawn in pieces."""
    pages = torch.empty(shape, dtype=dtype, device="cuda")
    for piece in pages.split(4096):
        drawn = torch.randn(piece.shape, device="cuda", dtype=BF16)
        piece.copy_((drawn * 64).clamp(-448, 448) if dtype == FP8 else drawn)
    return pages


def truth(inputs: Inputs, index: int, row: int) -> Tensor:
    """The exact result of one sequence, [num_heads, head_dim] float64."""
    view, length = inputs.views[index], inputs.step.lengths[row]
    pages = view.page_table[row, : -(-length // view.page_size)].long()

    def gather(x: Tensor, scale: Tensor) -> Tensor:
        tokens = x.view(torch.uint8)[pages].view(x.dtype).transpose(1, 2).flatten(0, 1)
        return tokens[:length].double() * scale.double().reshape(-1, 1)

    key = gather(view.key_pages, view.key_scale)
    value = gather(view.value_pages, view.value_scale)
    q = inputs.queries[index][row, 0].double().unflatten(0, (view.num_kv_heads, -1))
    logits = torch.einsum("hgd,nhd->hgn", q, key) * view.head_dim**-0.5
    return torch.einsum("hgn,nhd->hgd", logits.softmax(-1), value).flatten(0, 1)


def octavo_calls(inputs: Inputs, impl: str) -> list[Callable[[], Tensor]]:
    """One call of octavo for each set of pages, with the plan they share."""
    num_heads = inputs.step.num_heads
    plan = ops.plan_decode(inputs.views[0], num_heads=num_heads, impl=impl)
    return [
        lambda q=q, view=view: ops.decode_attention(q, view, plan=plan)  # type: ignore[misc]
        for q, view in zip(inputs.queries, inputs.views, strict=True)
    ]


def fa3_calls(inputs: Inputs) -> list[Callable[[], Tensor]]:
    """One call of vLLM's FlashAttention-3 for each set of pages; it quantizes q as well."""
    step, first = inputs.step, inputs.views[0]
    batch, longest = len(step.lengths), max(step.lengths)
    ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    fa3 = torch.ops._vllm_fa3_C
    sizes = (step.num_heads, step.num_kv_heads, step.head_dim, step.head_dim, first.dtype)
    rest = (None, None, None, None, step.page_size, 0, True, -1, -1, False, 0, None, 0)
    schedule = fa3.get_scheduler_metadata(batch, 1, longest, *sizes, first.lengths, ends, *rest)

    def call(q: Tensor, q_scale: Tensor | None, view: PagedView) -> Tensor:
        key, value = view.as_token_major()
        scales: list[Tensor | None] = [None, None, None]
        if q_scale is not None:
            shared = view.key_scale.expand(batch, step.num_kv_heads)
            scales = [q_scale.expand(batch, step.num_kv_heads), shared, shared]
        positions = (ends, None, None, None, view.lengths, 1, longest, view.page_table)
        options = (step.head_dim**-0.5, True, -1, -1, 0.0, True, schedule, 0, None, 0)
        result: Tensor = fa3.fwd(
            *(q, key, value, None, None, None, None),
            *positions,
            *(None, None, None, None, None),
            *scales,
            *options,
            *(None, 1, 0, None),
        )[0]
        return result.unsqueeze(1)

    calls: list[Callable[[], Tensor]] = []
    for q, view in zip(inputs.queries, inputs.views, strict=True):
        q, q_scale = q.squeeze(1), None
        if view.is_fp8:
            q_scale = (q.float().abs().max() / 448).reshape(1, 1)
            q = (q / q_scale).clamp(-448, 448).to(FP8)
        calls.append(lambda q=q, s=q_scale, view=view: call(q, s, view))  # type: ignore[misc]
    return calls


def worst_error(inputs: Inputs, calls: list[Callable[[], Tensor]]) -> float:
    """The largest relative RMS error of some sequences of the first and the last set."""
    batch = len(inputs.step.lengths)
    worst = 0.0
    for index in (0, len(calls) - 1):
        out = calls[index]()
        for row in {0, batch // 2, batch - 1}:
            exact = truth(inputs, index, row)
            error = (out[row, 0].double() - exact).norm() / exact.norm()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def measure(inputs: Inputs, impl: str, machine: Machine, command: str) -> Measurement:
    """One record: the time of a call, and the error of what it computed."""
    calls = fa3_calls(inputs) if impl == "fa3" else octavo_calls(inputs, impl)
    step, dtype = inputs.step, inputs.views[0].dtype
    error = worst_error(inputs, calls)
    if not error < MAX_ERROR[impl]:
        sys.exit(f"{impl} of {step} over {dtype} pages is off by {error}")
    samples = sample_graph_ms([*calls])
    return Measurement(
        op="decode_attention",
        impl=impl,
        case={
            "lengths": step.name,
            "num_heads": step.num_heads,
            "num_kv_heads": step.num_kv_heads,
            "head_dim": step.head_dim,
            "page_size": step.page_size,
            "cache": "e4m3" if dtype == FP8 else "bf16",
        },
        values=timing(samples, bytes=inputs.num_bytes) | {"relative_rms": error},
        machine=machine,
        command=command,
    )


def main() -> None:
    """Measure every step and append the records to the file named on the command line."""
    path, device = Path(sys.argv[1]), default_device()
    if device.capability is None:
        sys.exit(f"expected a CUDA GPU, got {device.name}")
    has_fa3 = len(sys.argv) > 2
    if has_fa3:
        peers.load("_vllm_fa3_C", Path(sys.argv[2]))
    machine = Machine.current(gpu=device.name, capability=device.capability)
    command = f"python scripts/measure_decode.py results/{path.name}" + " FOLDER" * has_fa3
    for step in STEPS:
        for dtype in (FP8, BF16):
            torch.manual_seed(0)
            inputs = make_inputs(step, dtype)
            for impl in step.impls:
                if impl == "fa3" and not has_fa3:
                    continue
                record = measure(inputs, impl, machine, command)
                store.append(path, [record])
                case, values = record.case, record.values
                print(
                    f"{impl:7s} {case['lengths']:12s} {case['num_heads']}/{case['num_kv_heads']} "
                    f"{case['head_dim']:3d} page {case['page_size']:3d} {case['cache']}: "
                    f"{1e3 * values['median_ms']:.1f} µs, {record.gb_per_s:.0f} GB/s, "
                    f"error {values['relative_rms']:.1e}"
                )


if __name__ == "__main__":
    main()
