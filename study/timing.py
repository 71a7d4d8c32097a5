"""Time launch settings of Hopper's attention kernel, each checked before; on a GPU.

    python study/timing.py [CASE …] [--modes codes,exact,old] [--all] [--budget SECONDS] [-o FILE]

Each row is written to FILE as soon as it is there; what FILE has is not done again, nor what had
begun when an earlier run hung. Mode "old" is the kernel before this branch, in .carry/old_attention
(study/prepare.sh); "bf16" is the fastest of torch's. --all: all variants, the default first.
"""

import argparse
import json
import math
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path

import launching
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from variants import CASES, FIRST, MODES, spec_of, variants

NUM_CHECKED = 128  # rows at the end, of the first head and the last
HANG_S = 40


def names_of(case, mode, has_all):
    if mode in ("old", "bf16"):
        return ["default"]
    return list(variants(case, mode)) if has_all else ["default"]


def make_operands(case, num_tokens=None):
    from octavo import ops

    batch, length, num_heads, num_kv_heads, head_dim, _ = CASES[case]
    batch, length = (1, num_tokens) if num_tokens else (batch, length)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    return (q, k, v), ops.quantize_qkv(q, k, v, value_layout="transposed")


def call_of(x, case, mode, name):
    """A call without arguments; of the old kernel it is the default's."""
    options = {
        "packing": None,
        "sinks": None,
        "key_mask": None,
        "out_dtype": torch.bfloat16,
        "value_layout": "transposed",
    }
    if mode == "old":
        from old_attention.gluon_sm90 import attention

        from octavo import ops

        spec = spec_of(case, "exact")
        if CASES[case][4] > 192:  # was Triton's
            triton = {"out_dtype": torch.bfloat16, "value_layout": "transposed", "impl": "triton"}
            return lambda: (ops.attention(x.q, x.k, x.v, spec, x.scales, **triton),)
        return lambda: attention(x.q, x.k, x.v, spec, x.scales, **options)
    from octavo.kernels.attention.gluon_sm90 import attention

    spec, config = spec_of(case, mode), variants(case, mode)[name]
    return lambda: attention(x.q, x.k, x.v, spec, x.scales, **options, config=config)


def compile_one(case, mode, name):
    """In a process that does not launch."""
    if mode == "old" and CASES[case][4] > 192:
        return
    batch, length, *_ = CASES[case]
    # As many jobs as the real call: the rest is no constant of the kernel.
    _, x = make_operands(case, num_tokens=512)
    call_of(x, case, mode, name)()


def replay_ms(call, warm_s=0.15, number=15):
    """Median and least milliseconds of a call replayed from a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    end = time.time() + warm_s
    while time.time() < end:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    found = []
    for _ in range(number):
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        done.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(done))
    return statistics.median(found), min(found)


def truth_of(q, k, v, is_causal):
    """Of the last rows of the first head and the last, in float64."""
    outs, heads, length = [], sorted({0, q.shape[2] - 1}), k.shape[1]
    for head in heads:
        kv_head = head * k.shape[2] // q.shape[2]
        logits = q[-1, -NUM_CHECKED:, head].double() @ k[-1, :, kv_head].double().T
        logits *= q.shape[-1] ** -0.5
        if is_causal:
            key = torch.arange(length, device="cuda")
            hidden = key[None] > key[length - NUM_CHECKED :, None]
            logits = logits.masked_fill(hidden, -math.inf)
        outs.append(torch.softmax(logits, -1) @ v[-1, :, kv_head].double())
    return torch.stack(outs, 1), heads


def bf16_ms(q, k, v, is_causal):
    operands = [x.transpose(1, 2) for x in (q, k, v)]
    found = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        with suppress(RuntimeError), sdpa_kernel(getattr(SDPBackend, name)):
            found[name] = replay_ms(
                lambda: F.scaled_dot_product_attention(
                    *operands, is_causal=is_causal, enable_gqa=q.shape[2] != k.shape[2]
                )
            )
    return min(found.values(), default=(math.nan, math.nan))


def measure(plain, x, truth, case, mode, name):
    """A row of one variant: right first, then fast."""
    if mode == "bf16":
        ms, least = bf16_ms(*plain, CASES[case][5])
        return {"ms": ms, "least_ms": least}
    call = call_of(x, case, mode, name)
    outs = [call()[0] for _ in range(3)]
    torch.cuda.synchronize()
    expected, heads = truth
    found = outs[0][-1, -NUM_CHECKED:][:, heads].double()
    row = {
        "error": float((found - expected).norm() / expected.norm()),
        "repeats": all(torch.equal(outs[0], out) for out in outs[1:]),
        "finite": bool(outs[0].isfinite().all()),
    }
    ms, least = replay_ms(call)
    return row | {"ms": ms, "least_ms": least}


def show(row, flops):
    if "ms" not in row:
        return print("  FAIL", row, flush=True)
    ok = row.get("finite", True) and row.get("repeats", True) and row.get("error", 0) < 0.08
    print(
        f"  {row['case']:6} {row['mode']:6} {row['variant']:26} {row['ms']:.4f} ms "
        f"{flops / row['ms'] / 1e9:5.0f} TFLOP/s  error {row.get('error', 0):.4f}"
        f"{'' if ok else '  WRONG'}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(FIRST))
    parser.add_argument("--modes", default="codes,exact,old,bf16")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="", help="a part of the variants' names")
    parser.add_argument("--budget", type=float, default=480)
    parser.add_argument("-j", type=int, default=14)
    parser.add_argument("-o", type=Path, default=Path("timing.jsonl"))
    args = parser.parse_args()
    end = time.time() + args.budget
    rows = [json.loads(line) for line in args.o.read_text().splitlines()] if args.o.exists() else []
    done = {(row["case"], row["mode"], row["variant"]) for row in rows}
    todo = [
        (case, mode, name)
        for mode in args.modes.split(",")
        for case in args.cases
        for name in names_of(case, mode, args.all)
        if (case, mode, name) not in done and (name == "default" or args.only in name)
    ]
    if args.all:  # of each case all modes at once: operands are made once
        todo.sort(key=lambda one: args.cases.index(one[0]))
    print(f"{len(todo)} variants", flush=True)
    pool = launching.compilers(args.j)
    compiled = {one: pool.submit(compile_one, *one) for one in todo if one[1] != "bf16"}
    made = None
    with args.o.open("a") as file:

        def write(row):
            file.write(json.dumps(row) + "\n")
            file.flush()

        for case, mode, name in todo:
            if time.time() > end:
                print("the budget is spent", flush=True)
                break
            row = {"case": case, "mode": mode, "variant": name}
            try:
                if (case, mode, name) in compiled:
                    compiled[case, mode, name].result(timeout=max(1, end - time.time()))
                if made is None or made[0] != case:
                    made = None
                    plain, x = make_operands(case)
                    made = (case, plain, x, truth_of(*plain, CASES[case][5]))
                write(row | {"began": True})
                with launching.at_most(HANG_S, row):
                    row |= measure(*made[1:], case, mode, name)
            except Exception as error:
                row |= {"failed": f"{type(error).__name__} {str(error)[-300:]}"}
            write(row)
            batch, length, num_heads, _, head_dim, is_causal = CASES[case]
            show(row, 4 * batch * length**2 * num_heads * head_dim / (2 if is_causal else 1))
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((pool._processes or {}).values()):
        process.terminate()


if __name__ == "__main__":
    assert set(MODES) and torch.cuda.is_available(), "needs a CUDA GPU"
    sys.exit(main())
