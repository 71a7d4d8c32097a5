"""Run one small case of every kernel under NVIDIA's compute-sanitizer, and record what it found.

    python scripts/sanitize_on_gpu.py [TOOL ...]      memcheck and racecheck unless named

racecheck does not follow the barriers by which Triton hands work to warps of their own, and reports
that hand-over, so Hopper's attention is left out there; its tests compare repeated runs bit by bit.

Exit code 1 if a tool finds anything. Records go to results/sanitizer_<gpu>.jsonl.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path

import torch

from octavo import ops
from octavo.kernels.device import default_device
from octavo.kernels.tuning import file_name
from octavo.measure import store
from octavo.measure.bench.gpu_records import code_hash, kernel_names
from octavo.measure.records import Machine, Measurement
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import PerBlock, PerChannel, PerTensor, PerToken
from octavo.numerics.rotary import Rotary
from octavo.ops.select import impl_names
from octavo.testing.cases import AttentionCase, PackedCase, PagedCase
from octavo.testing.inputs import (
    make_attention_inputs,
    make_decode_inputs,
    make_packed_inputs,
    make_paged_view,
    make_prefill_inputs,
)

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*")
FP8 = torch.float8_e4m3fn
SPECS = (AttentionSpec(), AttentionSpec(causal=True, window=100))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def append_kv() -> None:
    for granularity in (PerTensor(), PerToken()):
        view = make_paged_view(PagedCase(granularity=granularity), device="cuda")
        key, angle = randn(70, 2, 64), torch.rand(70, 32, device="cuda")
        slots = torch.arange(70, device="cuda")
        rotary = Rotary(angle.cos(), angle.sin())
        ops.append_kv(view, key, key, slots, query=randn(70, 4, 64), rotary=rotary, impl="triton")


def attention() -> None:
    left_out = {"reference", "gluon"} if "racecheck" in sys.argv else {"reference"}
    for name in sorted(set(impl_names("attention")) - left_out):
        for head_dim, spec in itertools.product((64, 72, 128), SPECS):
            # More tiles of queries than an H200 has SMs, where a program may do several.
            q, k, v = (randn(3, 200, 24, head_dim) for _ in range(3))
            qkv = ops.quantize_qkv(q, k, v, value_layout="transposed")
            ops.attention(
                *(qkv.q, qkv.k, qkv.v, spec, qkv.scales), value_layout="transposed", impl=name
            )
    packed = make_packed_inputs(PackedCase(), dtype=FP8, device="cuda")
    ops.attention(**packed, impl="triton")
    dense = make_attention_inputs(AttentionCase(has_key_mask=True), dtype=FP8, device="cuda")
    ops.attention(**dense, impl="triton")


def decode() -> None:
    case = PagedCase(lengths=(700, 1, 0, 65), q_lens=(1,) * 4, head_dim=128)
    for dtype in (FP8, torch.bfloat16):
        inputs = make_decode_inputs(PagedCase(**{**vars(case), "dtype": dtype}), device="cuda")
        for name in ("gluon", "triton"):
            plan = ops.plan_decode(inputs["view"], num_heads=case.num_heads, impl=name)
            ops.decode_attention(**inputs, plan=plan)


def matvec() -> None:
    for columns, depth in ((65, 2880), (136, 4096), (7, 201)):
        fused, bias = randn(2 * columns, depth), randn(columns)
        for weight in (fused[:columns], fused[::2]):
            ops.matvec(randn(1, depth), weight, bias, impl="triton")
            ops.matvec(randn(1, depth), weight, impl="triton")


def prefill() -> None:
    case = PagedCase(lengths=(300, 65), q_lens=(200, 65), granularity=PerToken())
    ops.prefill_attention(**make_prefill_inputs(case, dtype=FP8, device="cuda"), impl="triton")


def quantize() -> None:
    for granularity in (PerTensor(), PerToken(), PerChannel(), PerBlock(1, 128)):
        for shape in ((65, 200), (33, 3072)):
            ops.quantize(randn(*shape), granularity, impl="triton")


def quantize_qkv() -> None:
    angle = torch.rand(130, 36, device="cuda")
    q, k, v = (randn(130, 2, 72) for _ in range(3))
    ops.quantize_qkv(
        *(q, k, v),
        value_layout="transposed",
        cu_seqlens=torch.tensor([0, 63, 130], dtype=torch.int32, device="cuda"),
        rotary=Rotary(angle.cos(), angle.sin()),
        impl="triton",
    )
    text = [randn(2, 63, 2, 72) for _ in range(3)]
    q, k, v = (randn(2, 2, 2, 72) for _ in range(3))
    first = (text[0], text[1], text[2])
    ops.quantize_qkv(q, k, v, first=first, value_layout="transposed", impl="triton")


def rotate_qk() -> None:
    angle = torch.rand(130, 36, device="cuda")
    q, k, _ = randn(130, 3, 2, 72).unbind(1)
    for is_interleaved in (False, True):
        rotary = Rotary(angle.cos(), angle.sin(), is_interleaved)
        ops.rotate_qk(q, k, rotary, impl="triton")


def scaled_mm() -> None:
    for rows in (3, 200):
        for columns in (136, 4096):
            weight = ops.quantize(randn(columns, 2048), PerChannel())
            x, bias = randn(rows, 2048), randn(columns)
            ops.scaled_mm(x, weight, bias, activation=PerToken(), impl="triton")
            ops.scaled_mm(x, weight, bias, impl="triton")


CASES: dict[str, Callable[[], None]] = {
    "append_kv": append_kv,
    "attention": attention,
    "decode": decode,
    "matvec": matvec,
    "prefill": prefill,
    "quantize": quantize,
    "quantize_qkv": quantize_qkv,
    "rotate_qk": rotate_qk,
    "scaled_mm": scaled_mm,
}


def find_sanitizer() -> str:
    """The program, on the path or where CUDA puts it."""
    found = shutil.which("compute-sanitizer")
    places = [place for folder in FOLDERS for place in glob(f"{folder}/compute-sanitizer")]
    if found is None and not places:
        sys.exit("expected compute-sanitizer, got none: install the CUDA toolkit")
    return found or places[0]


def run(tool: str) -> subprocess.Popen[str]:
    """All cases under one tool, in a process of their own."""
    command = [find_sanitizer(), "--tool", tool, "--error-exitcode", "3"]
    command += ["--kernel-name", "kernel_substring=_kernel", sys.executable, __file__]
    command += ["--cases", tool]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that memcheck sees the ends
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def records(tool: str, output: str, machine: Machine) -> Iterator[Measurement]:
    """One for each kernel that ran to its end without a finding."""
    for kernel in re.findall(r"^ran (\w+)$", output, re.M):
        left_out = "gluon" if (tool, kernel) == ("racecheck", "attention") else "none"
        yield Measurement(
            op="sanitizer",
            impl=tool,
            case={"kernel": kernel, "code": code_hash(kernel), "left_out": left_out},
            values={"num_findings": 0},
            machine=machine,
            command=f"python scripts/sanitize_on_gpu.py {tool}",
        )


def main() -> None:
    """Run the tools side by side; with --cases, the cases themselves."""
    if sys.argv[1:2] == ["--cases"]:
        for name, case in CASES.items():
            case()
            torch.cuda.synchronize()
            print(f"ran {name}", flush=True)
        return
    assert set(CASES) == set(kernel_names()) - {"linear_gelu"}  # cuBLAS's, none of ours
    device = default_device()
    if device.capability is None:
        sys.exit(f"expected a CUDA GPU, got {device.name}")
    path = RESULTS / f"sanitizer_{Path(file_name(device)).stem}.jsonl"
    machine = Machine.current(gpu=device.name, capability=device.capability)
    running = {tool: run(tool) for tool in sys.argv[1:] or ("memcheck", "racecheck")}
    failed = []
    for tool, process in running.items():
        output, _ = process.communicate()
        print(f"{tool}: exit {process.returncode}\n{output[-3000:]}", flush=True)
        if process.returncode:
            failed.append(tool)
        else:
            store.append(path, list(records(tool, output, machine)))
    if failed:
        sys.exit(f"findings: {', '.join(failed)}")


if __name__ == "__main__":
    main()
