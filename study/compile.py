"""Compile variants for sm_90 without a GPU: registers, spills, serialized products.

    python study/compile.py [-j PROCESSES] [-o FILE] 'CASE MODE VARIANT [USE …]' …

VARIANT is a name of study/variants.py, "default", "all", or settings as block_n=64,num_stages=2.
USE: packed, window, softcap, sinks. CASE may be a head_dim, of a call that is not causal, or one
with a c before it. One line each, as JSON in FILE; lines that FILE has are not compiled again.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "study")]
USES = {"window": 170, "softcap": 9.0}
KERNEL = "octavo.kernels.attention.gluon_sm90:_attention_kernel"


def plan(text):
    """(head_dim, spec, config, uses) of one line of the command."""
    from variants import CASES, MODES, spec_of, variants

    from octavo.kernels.attention.config import GluonConfig

    case, mode, variant, *uses = text.split()
    if case not in CASES:
        is_causal, head_dim = case[0] == "c", int(case.lstrip("c"))
        CASES[case] = (1, 8192, 16, 16, head_dim, is_causal)
    spec = replace(spec_of(case, mode), **{use: USES[use] for use in uses if use in USES})
    assert mode in MODES
    if "=" in variant:
        pairs = (pair.split("=") for pair in variant.split(","))
        return CASES[case][4], spec, GluonConfig(**{k: int(v) for k, v in pairs}), uses
    if variant == "default":
        from octavo.kernels.attention.config import default_gluon

        return CASES[case][4], spec, default_gluon(CASES[case][4], spec), uses
    return CASES[case][4], spec, variants(case, mode)[variant], uses


def request(text, out="*bf16"):
    """What octavo_testkit's compiler is asked for, with the constants of a launch."""
    from octavo.kernels.attention.gluon_sm90 import _SIZES, _arguments

    head_dim, spec, config, uses = plan(text)
    _, fixed = _arguments(
        (1, 8192, 16, head_dim),
        (8192, 16),
        4 if "packed" in uses else None,
        (0, 0, 0),
        spec,
        "sinks" in uses,
        config,
        132,
    )
    n = fixed["BLOCK_N"]
    shapes = {
        "q_desc": (64, fixed["D1"]),
        "q2_desc": (64, fixed["D2"]),
        "k_desc": (n, fixed["D1"]),
        "k2_desc": (n, fixed["D2"]),
        "v_desc": (fixed["E1"], n),
        "v2_desc": (fixed["E2_COPIED"], n),
    }
    pointers = ["lse_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr", "sink_ptr"]
    signature = {
        **{k: f"tensordesc<fp8e4nv[1, 1, {r}, {c}]>" for k, (r, c) in shapes.items() if r * c},
        "out_ptr": out,
        **dict.fromkeys(pointers, "*fp32"),
        **dict.fromkeys(["cu_seqlens_q_ptr", "cu_seqlens_k_ptr"], "*i32"),
        **dict.fromkeys(_SIZES, "i32"),
        **dict.fromkeys(["softmax_scale", "softcap"], "fp32"),
    }
    options = {name: fixed[name] for name in ("num_warps", "maxnreg")}
    constants = {k: v for k, v in fixed.items() if k.isupper() or k[1:2].isdigit()}
    constants |= {k: None for k, (r, c) in shapes.items() if not r * c}
    return {
        "capability": 90,
        "kernel": KERNEL,
        "signature": signature,
        "constants": constants,
        "aligned": pointers,
        "options": options,
    }


def compile_one(text):
    from octavo_testkit.kernels.compiling import _compile

    started = time.time()
    try:
        found = _compile(**request(text))
    except Exception as error:
        return {"what": text, "error": f"{type(error).__name__} {str(error)[-1500:]}"}
    usage, spills = read_sass(found["ptx"])
    ops = found["opcodes"]
    return {
        "what": text,
        "stack": found["stack_bytes"],
        "regs": found["num_registers"],
        "shared_kib": round(found["shared_bytes"] / 1024, 1),
        "serialized": "erialized" in found["warnings"] or "erialized" in usage,
        "warnings": found["warnings"][:300],
        **spills,
        "seconds": round(time.time() - started),
        "ops": {
            k: ops.get(k, 0) for k in ["QGMMA", "MUFU", "SHFL", "BAR", "PRMT", "LDS", "STS", "VOTE"]
        },
    }


def read_sass(ptx):
    """ptxas' own words, and loads and stores of spilled registers inside loops over tiles.

    A loop over tiles is an innermost loop among those with products.
    """
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "k.ptx"), Path(folder, "k.o")
        source.write_text(ptx)
        command = [tools / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", binary]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [tools / "cuobjdump", "-sass", binary]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(
        r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+) )?\s*([A-Z0-9_.]+)\s*([^;]*);", sass, re.M
    )
    rows = [(int(at, 16), guard, op.split(".")[0], args) for at, guard, op, args in rows]
    loops = [body for body in natural_loops(rows) if any(rows[i][2] == "QGMMA" for i in body)]
    inner = [body for body in loops if not any(other < body for other in loops)]
    counts = [
        {
            "qgmma": sum(rows[i][2] == "QGMMA" for i in body),
            "instructions": len(body),
            "spills": sum(rows[i][2] in ("LDL", "STL") for i in body),
            "barriers": sum(rows[i][2] == "BAR" for i in body),
        }
        for body in inner
    ]
    total = sum(row[2] in ("LDL", "STL") for row in rows)
    return log, {"spills": total, "loops": counts}


def natural_loops(rows):
    """Sets of indices of instructions, one for each loop of a kernel's control flow."""
    place = {row[0]: i for i, row in enumerate(rows)}
    targets = {}
    for i, (_, _, op, args) in enumerate(rows):
        match = re.search(r"0x([0-9a-f]+)", args) if op in ("BRA", "BSSY", "CALL") else None
        if op == "BRA" and match and int(match[1], 16) in place:
            targets[i] = place[int(match[1], 16)]
    starts = sorted({0, *targets.values(), *(i + 1 for i in targets if i + 1 < len(rows))})
    ends = [*starts[1:], len(rows)]
    number = {start: block for block, start in enumerate(starts)}
    after = []
    for end in ends:
        last = rows[end - 1]
        successors = []
        if end - 1 in targets:
            successors.append(number[targets[end - 1]])
        is_end = last[2] in ("EXIT", "RET", "BRA") and not last[1] and "P" not in last[3][:4]
        if end < len(rows) and not is_end:
            successors.append(number[end])
        after.append(successors)
    before = [[] for _ in starts]
    for block, successors in enumerate(after):
        for successor in successors:
            before[successor].append(block)
    every = set(range(len(starts)))
    dominators = [every.copy() for _ in starts]
    # Jump tables lead to blocks that seem to come after none.
    roots = {0} | {block for block, found in enumerate(before) if not found}
    for root in roots:
        dominators[root] = {root}
    reached, stack = set(roots), [*roots]
    while stack:
        for successor in after[stack.pop()]:
            if successor not in reached:
                reached.add(successor)
                stack.append(successor)
    is_changing = True
    while is_changing:
        is_changing = False
        for block in sorted(reached - roots):
            found = set.intersection(*(dominators[b] for b in before[block] if b in reached))
            found = found | {block}
            if found != dominators[block]:
                dominators[block], is_changing = found, True
    loops = {}
    for block in reached:
        for head in after[block]:
            if head in dominators[block]:
                body, stack = {head}, [block]
                while stack:
                    one = stack.pop()
                    if one not in body:
                        body.add(one)
                        stack.extend(before[one])
                loops.setdefault(head, set()).update(body)
    return [
        frozenset(i for block in body for i in range(starts[block], ends[block]))
        for body in loops.values()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", nargs="+")
    parser.add_argument("-j", type=int, default=2)
    parser.add_argument("-o", type=Path, default=Path("compiled.jsonl"))
    args = parser.parse_args()
    lines = []
    for line in args.lines:
        case, mode, variant, *_ = line.split()
        if variant == "all":
            from variants import variants

            lines += [f"{case} {mode} {name}" for name in variants(case, mode)]
        else:
            lines.append(line)
    done = set()
    if args.o.exists():
        done = {json.loads(line)["what"] for line in args.o.read_text().splitlines()}
    lines = [line for line in dict.fromkeys(lines) if line not in done]
    with ProcessPoolExecutor(args.j) as pool, args.o.open("a") as file:
        for future in as_completed([pool.submit(compile_one, line) for line in lines]):
            row = future.result()
            file.write(json.dumps(row) + "\n")
            file.flush()
            print({k: v for k, v in row.items() if k not in ("ops", "warnings")}, flush=True)


if __name__ == "__main__":
    main()
