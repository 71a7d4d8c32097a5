"""Time launch settings of Hopper's attention kernel, with correctness in the same run.

python study/attention_study.py [CASE …] [-j PROCESSES] [--budget SECONDS] [-o FILE] [--modes exact,codes,codes1]
"""
import argparse, itertools, json, math, multiprocessing, statistics, sys, time
from dataclasses import asdict, replace

sys.path.insert(0, "src")
MODES = {"exact": {}, "codes": {"exponentials": "codes"}, "codes1": {"exponentials": "codes", "promote_every": None}, "exact1": {"promote_every": None}}
CASES = {  # batch, tokens, heads, kv heads, head_dim, causal
    "d64": (1, 8192, 16, 16, 64, False), "d72": (1, 8192, 16, 16, 72, False), "d80": (1, 8192, 16, 16, 80, False), "d96": (1, 8192, 16, 16, 96, False),
    "d128": (1, 8192, 16, 16, 128, False), "d192": (1, 8192, 16, 16, 192, False), "d256": (1, 8192, 16, 16, 256, False),
    "c64": (1, 8192, 64, 8, 64, True), "c128": (1, 16384, 32, 8, 128, True), "c128l": (1, 32768, 32, 8, 128, True),
    "c192": (1, 8192, 16, 16, 192, True), "c256": (1, 8192, 8, 4, 256, True),
    "short": (8, 1024, 32, 8, 128, True), "mid": (4, 2048, 32, 32, 128, False), "s64": (8, 1024, 64, 8, 64, True), "b2": (2, 8192, 64, 8, 128, True),
}
def variants(mode, case):
    from octavo.kernels.attention.config import GluonConfig, default_gluon, is_valid_gluon
    from octavo.numerics.attention import AttentionSpec
    b, n, h, hk, d, causal = CASES[case]
    spec = AttentionSpec(causal=causal, **MODES[mode])
    found = {"default": default_gluon(d, spec)}
    codes = "codes" in mode
    one = mode.endswith("1")
    jobs = {"": {}, "+pers": {"is_persistent": True}}
    if causal:
        jobs["+pers+long"] = {"is_persistent": True, "is_longest_first": True}
        jobs["+long"] = {"is_longest_first": True}
    shapes = []
    if d <= 128:
        shapes += [("n128", {"block_n": 128}), ("n64c3", {"block_n": 64, "num_consumers": 3})]
        if d <= 80 or one: shapes += [("n64", {"block_n": 64})]
        if d <= 64: shapes += [("n128s8", {"num_stages": 8})]
    else:
        shapes += [("n64", {"block_n": 64})]
        if one: shapes += [("n128s2", {"block_n": 128, "num_stages": 2})]
        if d <= 192: shapes += [("n64s2", {"block_n": 64, "num_stages": 2})]
    for (sn, s), (jn, j), first, ones, loop in itertools.product(shapes, jobs.items(), (True, False) if codes else (False,), (True,) if codes or d <= 80 else (False, True), (False, True) if causal else (False,)):
        if d > 128 and not one and first: continue
        if loop and (jn or not first): continue
        c = GluonConfig(**s, **j, encodes_first=first, has_ones=ones, has_one_loop=loop)
        if is_valid_gluon(c, d, spec): found[f"{sn}{jn}{'+first' if first else ''}{'+ones' if ones and not codes else ''}{'+loop' if loop else ''}"] = c
    return spec, found
def operands(case, small=False):
    import torch
    from octavo import ops
    b, n, h, hk, d, causal = CASES[case]
    if small: b, n = 1, 512
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, n, heads, d, device="cuda", dtype=torch.bfloat16) for heads in (h, hk, hk))
    return (q, k, v), ops.quantize_qkv(q, k, v, value_layout="transposed")
def call_of(x, spec, config):
    import torch
    from octavo.kernels.attention.gluon_sm90 import attention
    return lambda: attention(x.q, x.k, x.v, spec, x.scales, packing=None, sinks=None, key_mask=None, out_dtype=torch.bfloat16, value_layout="transposed", config=config)
def compile_one(job):
    import torch
    mode, case, name = job
    try:
        spec, found = variants(mode, case)
        (_, x) = operands(case, small=True)
        t = time.time(); call_of(x, spec, found[name])(); torch.cuda.synchronize()
        return job, time.time() - t, None
    except Exception as e:
        return job, 0, f"{type(e).__name__} {str(e)[-200:]}"
def replay_ms(f, warm=0.15, n=15):
    import torch
    for _ in range(2): f()
    torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    end = time.time() + warm
    while time.time() < end:
        for _ in range(5): g.replay()
        torch.cuda.synchronize()
    ts = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b))
    return statistics.median(ts), min(ts)
def truth_of(q, k, v, causal, rows=128):
    import torch
    outs = []
    heads = sorted({0, q.shape[2] - 1})
    for h in heads:
        kv = h * k.shape[2] // q.shape[2]
        Q, K, V = q[-1, -rows:, h].double(), k[-1, :, kv].double(), v[-1, :, kv].double()
        s = Q @ K.T * q.shape[-1] ** -0.5
        if causal: s = s.masked_fill(torch.arange(K.shape[0], device="cuda")[None] > torch.arange(K.shape[0] - rows, K.shape[0], device="cuda")[:, None], -math.inf)
        outs.append(torch.softmax(s, -1) @ V)
    return torch.stack(outs, 1), heads
def bf16_ms(q, k, v, causal):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    a = [x.transpose(1, 2) for x in (q, k, v)]
    best = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend): best[name] = replay_ms(lambda: F.scaled_dot_product_attention(*a, is_causal=causal, enable_gqa=k.shape[2] != q.shape[2]))[0]
        except Exception as e: print("  ", name, str(e)[:80])
    return best
def main():
    p = argparse.ArgumentParser(); p.add_argument("cases", nargs="*", default=[]); p.add_argument("-j", type=int, default=14); p.add_argument("--budget", type=float, default=500)
    p.add_argument("-o", default="study.jsonl"); p.add_argument("--modes", default="codes,exact"); p.add_argument("--only-default", action="store_true"); p.add_argument("--only", default="")
    args = p.parse_args(); started = time.time()
    cases = args.cases or list(CASES); modes = args.modes.split(",")
    def names(mode, case):
        found = variants(mode, case)[1]
        if args.only_default: return ["default"]
        return [x for x in found if x == "default" or not args.only or args.only in x]
    jobs = [(m, c, n) for c in cases for m in modes for n in names(m, c)]
    print(len(jobs), "variants", flush=True)
    bad = {}
    with multiprocessing.get_context("spawn").Pool(args.j) as pool:
        for job, s, error in pool.imap_unordered(compile_one, jobs):
            if error: bad[job] = error; print("BAD", job, error, flush=True)
    print(f"compiled after {time.time() - started:.0f} s", flush=True)
    import torch
    out = open(args.o, "a")
    for case in cases:
        (q, k, v), x = operands(case)
        b, n, h, hk, d, causal = CASES[case]
        flops = 4 * b * n * n * h * d / (2 if causal else 1)
        t, heads = truth_of(q, k, v, causal)
        base = bf16_ms(q, k, v, causal); fastest = min(base.values()) if base else math.nan
        print(f"{case}: BF16 {base}", flush=True)
        for mode in modes:
            spec, found = variants(mode, case); rows = []
            for name in names(mode, case):
                if (mode, case, name) in bad: continue
                if time.time() - started > args.budget: print("budget spent"); return
                f = call_of(x, spec, found[name])
                try:
                    o = f()[0]; again = f()[0]
                    same = torch.equal(o.view(torch.int16), again.view(torch.int16))
                    e = float((o[-1, -128:, heads].double() - t).norm() / t.norm())
                    first = float((o[0, :128, heads].double()).abs().max())
                    ms, least = replay_ms(f)
                except Exception as ex:
                    print("  FAIL", mode, name, str(ex)[:150], flush=True); continue
                rows.append((ms, name, e, same, first)); out.write(json.dumps({"case": case, "mode": mode, "variant": name, **asdict(found[name]), "ms": ms, "min": least, "tflops": flops / ms / 1e9, "error": e, "repeats": same, "bf16_ms": fastest}) + "\n"); out.flush()
            for ms, name, e, same, first in sorted(rows)[:6] + [r for r in rows if r[1] == "default"]:
                print(f"  {mode:6} {name:28} {ms:.4f} ms {flops / ms / 1e9:5.0f} TF  {fastest / ms:.2f}x BF16  err {e:.4f} {'' if same else 'DIFFERS'} {'' if first < 1e3 else 'WILD'}", flush=True)
            if rows:
                best = min(rows)[1]; ms, least = replay_ms(call_of(x, spec, found[best]), warm=1.0, n=25)
                print(f"  {mode:6} {best} alone after 1 s: {ms:.4f} ms {flops / ms / 1e9:.0f} TF", flush=True)
        print(f"  ({time.time() - started:.0f} s)", flush=True)
if __name__ == "__main__":
    main()
