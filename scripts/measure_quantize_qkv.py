"""Time `quantize_qkv` and `append_kv` as they are launched by default, after comparing their bits.

Needs a GPU on which the Triton kernels run. Calls are replayed in a CUDA graph, so that launching
is not counted. quantize_qkv reads and writes more than the L2 cache holds; append_kv finds its
inputs there, as a projection leaves them. Appends one record for each case.

    python scripts/measure_quantize_qkv.py results/quantize_qkv_h200.jsonl \\
        results/append_kv_h200.jsonl
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView
from octavo.kernels.append_kv import config as append_config
from octavo.kernels.device import default_device
from octavo.kernels.quantize_qkv.config import work
from octavo.measure import store
from octavo.measure.bench.timing import sample_graph_ms
from octavo.measure.records import Machine, Measurement, timing
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.rotary import Rotary
from octavo.reference.paged import append_kv as reference_append
from octavo.reference.qkv import quantize_qkv as reference_qkv

# Three FullHD images in Qwen3-VL's vision tower.
LENGTHS, NUM_HEADS, HEAD_DIM = (8160, 8160, 8160), 16, 72
NUM_INPUTS = 3
NUM_TOKENS = (1, 64, 256)
NUM_CALLS = 40


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    ours, theirs = (x.contiguous().flatten().view(torch.uint8) for x in (ours, theirs))
    return torch.equal(ours, theirs)


def make_rotary(num_tokens: int, head_dim: int) -> Rotary:
    """Tables of random angles."""
    angle = torch.rand(num_tokens, head_dim // 2, device="cuda") * 6
    return Rotary(angle.cos(), angle.sin())


def copy_gb_per_s(num_bytes: int) -> float:
    """Bandwidth of y.copy_(x): the best of about `num_bytes` read and written, and of 8192².

    Some sizes take a way through the copy that is a third slower.
    """
    found = []
    for shape in ((num_bytes // 4 // 4096, 4096), (8192, 8192)):
        inputs = [torch.randn(shape, device="cuda").bfloat16() for _ in range(NUM_INPUTS)]
        copies = [torch.empty_like(x) for x in inputs]
        pairs = zip(inputs, copies, strict=True)
        samples = sample_graph_ms([partial(y.copy_, x) for x, y in pairs])
        found.append(4e-6 * inputs[0].numel() / timing(samples)["median_ms"])
    return max(found)


def check_qkv(actual: QuantizedQkv, expected: QuantizedQkv, name: str) -> None:
    """Stop unless data and scales have the reference's bits."""
    for part in "qkv":
        if not same_bits(getattr(actual, part), getattr(expected, part)):
            sys.exit(f"{part} of quantize_qkv {name} differs from the reference")
        if not same_bits(getattr(actual.scales, part), getattr(expected.scales, part)):
            sys.exit(f"the scale of {part} of quantize_qkv {name} differs from the reference")


def measure_qkv(machine: Machine, command: str) -> list[Measurement]:
    """Static and dynamic scales, with and without rotary embedding, values transposed."""
    num_tokens = sum(LENGTHS)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).to("cuda", torch.int32)
    width = 3 * NUM_HEADS * HEAD_DIM
    joint = [torch.randn(num_tokens, width, device="cuda").bfloat16() for _ in range(NUM_INPUTS)]
    inputs = [x.view(num_tokens, 3, NUM_HEADS, HEAD_DIM).unbind(1) for x in joint]
    scales = QkvScales(*(torch.tensor(size, device="cuda") for size in (0.01, 0.013, 0.007)))
    _, num_bytes = work(num_tokens, num_tokens, NUM_HEADS, NUM_HEADS, HEAD_DIM)
    copied = copy_gb_per_s(num_bytes)
    records = []
    for scaling in ("static", "dynamic", "dynamic with history", "dynamic per head"):
        for rotary in (None, make_rotary(num_tokens, HEAD_DIM)):
            name = f"{scaling}, {'no ' if rotary is None else ''}rotary"
            options: dict[str, Any] = {
                "rotary": rotary,
                "value_layout": "transposed",
                "cu_seqlens": ends,
            }
            given: dict[str, Any] = {}
            if scaling == "static":
                options["scales"] = scales
            elif scaling == "dynamic per head":
                options["granularity"] = PerHead()
            elif scaling == "dynamic with history":
                given["history"] = tuple(AmaxHistory().cuda() for _ in "qkv")
            q, k, v = inputs[0]
            actual = ops.quantize_qkv(q, k, v, **options, **given, impl="triton")
            check_qkv(actual, reference_qkv(q, k, v, E4M3, **options), name)
            calls: list[Callable[[], object]] = [
                partial(ops.quantize_qkv, q, k, v, **options, **given) for q, k, v in inputs
            ]
            samples = sample_graph_ms(calls)
            case = {
                "tokens": num_tokens,
                "sequences": len(LENGTHS),
                "num_heads": NUM_HEADS,
                "head_dim": HEAD_DIM,
                "scaling": scaling,
                "rotary": rotary is not None,
                "value_layout": "transposed",
            }
            values = timing(samples, bytes=num_bytes) | {"copy_gb_per_s": copied}
            records.append(_record("quantize_qkv", case, values, machine, command))
    return records


def append_step(
    view: PagedView, key: Tensor, value: Tensor, slots: Tensor, options: dict[str, Any]
) -> None:
    """One call whose queries are dropped: the next has their memory, as in a model's layers."""
    ops.append_kv(view, key, value, slots, **options)


def measure_append(num_tokens: int, machine: Machine, command: str) -> Measurement:
    """One step's keys and values into e4m3 pages, queries turned; 32 and 8 heads of 128."""
    spec = CacheSpec(
        num_layers=1, num_kv_heads=8, head_dim=128, page_size=64, granularity=PerHead()
    )
    table, lengths = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in ((1, 1), (1,)))
    view, other = (PagedStorage(spec, 2048, "cuda").view(0, table, lengths) for _ in range(2))
    calls: list[Callable[[], object]] = []
    for i in range(8):
        joint = torch.randn(num_tokens, 48, 128, device="cuda").bfloat16()
        query, key, value = joint.split([32, 8, 8], dim=1)
        slots = torch.randperm(2048 * 64, device="cuda")[:num_tokens]
        options: dict[str, Any] = {"query": query, "rotary": make_rotary(num_tokens, 128)}
        if i == 0:
            actual = ops.append_kv(view, key, value, slots, **options, impl="triton")
            expected = reference_append(other, key, value, slots, **options)
            if actual is None or expected is None or not same_bits(actual, expected):
                sys.exit(f"queries of append_kv of {num_tokens} differ from the reference")
            for ours, theirs in zip(view.tensors[:2], other.tensors[:2], strict=True):
                if not same_bits(ours, theirs):
                    sys.exit(f"pages of append_kv of {num_tokens} differ from the reference")
        calls.append(partial(append_step, view, key, value, slots, options))
    samples = sample_graph_ms(calls * (NUM_CALLS // len(calls)))
    _, num_bytes = append_config.work(num_tokens, 32, 8, 128)
    case = {
        "tokens": num_tokens,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 64,
        "pages": "e4m3",
        "rotary": True,
    }
    return _record("append_kv", case, timing(samples, bytes=num_bytes), machine, command)


def _record(
    op: str, case: dict[str, Any], values: dict[str, float], machine: Machine, command: str
) -> Measurement:
    print(op, case, values, flush=True)
    return Measurement(
        op=op, impl="triton", case=case, values=values, machine=machine, command=command
    )


def main() -> None:
    """Measure both ops and append the records to the two files named on the command line."""
    qkv_path, append_path = (Path(name) for name in sys.argv[1:3])
    device = default_device()
    if device.capability is None:
        sys.exit(f"expected a CUDA GPU, got {device.name}")
    machine = Machine.current(gpu=device.name, capability=device.capability)
    command = (
        f"python scripts/measure_quantize_qkv.py results/{qkv_path.name} results/{append_path.name}"
    )
    store.append(qkv_path, measure_qkv(machine, command))
    store.append(append_path, [measure_append(n, machine, command) for n in NUM_TOKENS])


if __name__ == "__main__":
    main()
