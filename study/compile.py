"""python study/compile.py 'HEAD_DIM MODE key=value …' …: registers, spills and instruction counts."""
import sys, time, os
sys.path.insert(0, "tests"); sys.path.insert(0, "src")
from dataclasses import replace
from octavo.kernels.attention import config as C
from octavo.kernels.attention.config import split_head_dim, default_gluon
from octavo.numerics.attention import AttentionSpec
from octavo_testkit.kernels.compiling import _compile
USES = ["IS_PACKED", "IS_CAUSAL", "HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"]
def request(head_dim, mode, used=(), **changes):
    is_codes, one = "codes" in mode, "one" in mode
    spec = AttentionSpec(causal="IS_CAUSAL" in used, window=9 if "HAS_WINDOW" in used else None,
        softcap=9.0 if "HAS_SOFTCAP" in used else None, exponentials="codes" if is_codes else "exact",
        promote_every=None if one else 1)
    config = replace(default_gluon(head_dim, spec), **changes)
    (d1, d2), (e1, e2) = split_head_dim(head_dim, is_fp8_operand=True)
    if head_dim == 256: e1, e2 = 256, 0
    n = config.block_n
    has_ones = config.has_ones or is_codes; e2c = 8 if has_ones and e2 and head_dim - e1 == 8 and not one else e2
    tiles = {"q_desc": (64, d1), "q2_desc": (64, d2), "k_desc": (n, d1), "k2_desc": (n, d2), "v_desc": (e1, n), "v2_desc": (e2c, n)}
    pointers = ["lse_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr", "sink_ptr"]
    sizes = "q_scale_stride k_scale_stride v_scale_stride num_jobs num_row_tiles num_sequences num_heads group num_tokens q_len kv_len window".split()
    signature = {**{k: f"tensordesc<fp8e4nv[1, 1, {r}, {c}]>" for k, (r, c) in tiles.items() if r * c}, "out_ptr": "*bf16",
        **dict.fromkeys(pointers, "*fp32"), **dict.fromkeys(["cu_seqlens_q_ptr", "cu_seqlens_k_ptr"], "*i32"),
        **dict.fromkeys(sizes, "i32"), "softmax_scale": "fp32", "softcap": "fp32"}
    constants = {"BLOCK_N": n, "NUM_STAGES": config.num_stages, "NUM_CONSUMERS": config.num_consumers, "HEAD_DIM": head_dim,
        "D1": d1, "D2": d2, "E1": e1, "E2": e2, "E2_COPIED": e2c, **{u: u in used for u in USES}, "HAS_CODES": is_codes, "IS_ONE_LEVEL": one,
        "HAS_ONES": has_ones, "HAS_ONE_LOOP": config.has_one_loop, "ENCODES_FIRST": config.encodes_first,
        "IS_PERSISTENT": config.is_persistent, "IS_LONGEST_FIRST": spec.causal and config.is_longest_first,
        **{k: None for k, (r, c) in tiles.items() if not r * c}}
    return dict(capability=90, kernel="octavo.kernels.attention.gluon_sm90:_attention_kernel", signature=signature, constants=constants,
        aligned=pointers, options=dict(num_warps=4, maxnreg={2: 168, 3: 128}[config.num_consumers])), config
def main():
    for text in sys.argv[1:]:
        head_dim, mode, *rest = text.split()
        used = [u for u in rest if "=" not in u]
        changes = {k: int(v) if v.isdigit() else v == "True" for k, v in (r.split("=") for r in rest if "=" in r)}
        kwargs, config = request(int(head_dim), mode, used, **changes)
        t = time.time()
        try:
            c = _compile(**kwargs)
        except Exception as e:
            print(text, "ERROR", str(e)[-1800:], flush=True); continue
        ops = c["opcodes"]
        open("/tmp/k.ptx", "w").write(c["ptx"])
        import subprocess, triton
        log = subprocess.run([os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas"), "-v", "--gpu-name=sm_90a", "/tmp/k.ptx", "-o", "/tmp/k.o"], capture_output=True, text=True).stderr
        if "erialized" in log or "erformance" in log: print([l for l in log.splitlines() if "erformance" in l or "erialized" in l])
        show = {k: ops.get(k, 0) for k in "BAR QGMMA MUFU SHFL FMNMX FFMA FADD FMUL F2FP HADD2 PRMT VOTE WARPSYNC LDL STL MOV BRA".split()}
        print(f"{text:60} stack {c['stack_bytes']:4} regs {c['num_registers']} smem {c['shared_bytes']//1024}K {time.time()-t:.0f}s", show, flush=True)
if __name__ == "__main__":
    main()
