"""Check and time Hopper's attention, each case after most of a second of its own load; on a GPU.

    python study/time_attention.py CASE[:MODE[:SETTINGS]] …

CASE: head_dim after d, or c for causal calls (CASES). MODE: codes, exact, bf16. SETTINGS: fields of
GluonConfig, such as block_n=128,num_stages=4; the default's if left out.
"""

import math
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo import ops
from octavo.kernels.attention.config import GluonConfig
from octavo.kernels.attention.gluon_sm90 import attention
from octavo.numerics.attention import AttentionSpec

# batch, tokens, heads, heads of keys, head_dim, causal
CASES = {
    **{f"d{d}": (1, 8192, 16, 16, d, False) for d in (64, 72, 80, 96, 128, 192, 256)},
    "c64": (1, 8192, 64, 8, 64, True),
    "c128": (1, 16384, 32, 8, 128, True),
    "c192": (1, 8192, 16, 16, 192, True),
    "short": (8, 1024, 32, 8, 128, True),
    "s64": (8, 1024, 64, 8, 64, True),
    "mid": (4, 2048, 32, 32, 128, False),
    "b2": (2, 8192, 64, 8, 128, True),
}
NUM_CHECKED = 128  # rows at the end, of the first head and the last


def error_of(out, q, k, v, is_causal):
    """Relative error of the last rows of two heads against float64."""
    found, expected = [], []
    length = k.shape[1]
    for head in {0, q.shape[2] - 1}:
        kv_head = head * k.shape[2] // q.shape[2]
        logits = q[-1, -NUM_CHECKED:, head].double() @ k[-1, :, kv_head].double().T
        logits *= q.shape[-1] ** -0.5
        if is_causal:
            key = torch.arange(length, device="cuda")
            logits.masked_fill_(key[None] > key[length - NUM_CHECKED :, None], -math.inf)
        expected.append(torch.softmax(logits, -1) @ v[-1, :, kv_head].double())
        found.append(out[-1, -NUM_CHECKED:, head].double())
    found, expected = torch.stack(found), torch.stack(expected)
    return float((found - expected).norm() / expected.norm())


def calls(case, mode, settings):
    """(name, call, out's layout is [batch, tokens, heads, head_dim]) of what is to be timed."""
    batch, length, heads, kv_heads, head_dim, causal = CASES[case]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, length, n, head_dim, device="cuda", dtype=torch.bfloat16)
        for n in (heads, kv_heads, kv_heads)
    )
    if mode == "bf16":
        operands = [x.transpose(1, 2) for x in (q, k, v)]
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

            def call(backend=backend):
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(
                        *operands, is_causal=causal, enable_gqa=heads != kv_heads
                    ).transpose(1, 2)

            yield backend.name, call, (q, k, v)
        return
    x = ops.quantize_qkv(q, k, v, value_layout="transposed")
    spec = AttentionSpec(causal=causal, exponentials=mode)
    config = None
    if settings:
        pairs = (pair.split("=") for pair in settings.split(","))
        config = GluonConfig(**{name: int(value) for name, value in pairs})
    options = {"packing": None, "sinks": None, "key_mask": None, "out_dtype": torch.bfloat16}
    options |= {"value_layout": "transposed", "config": config}
    yield "octavo", lambda: attention(x.q, x.k, x.v, spec, x.scales, **options)[0], (q, k, v)


def main():
    for text in sys.argv[1:]:
        case, mode, settings = (text.split(":") + ["codes", ""][text.count(":") :])[:3]
        batch, length, heads, _, head_dim, causal = CASES[case]
        flops = 4 * batch * length**2 * heads * head_dim / (2 if causal else 1)
        try:
            for name, call, plain in calls(case, mode, settings):
                error = error_of(call(), *plain, causal)
                end, found = time.time() + 0.8, []
                while time.time() < end:
                    begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(20):
                        call()
                    done.record()
                    torch.cuda.synchronize()
                    found.append(begin.elapsed_time(done) / 20)
                best, last = min(found), sorted(found[-10:])[len(found[-10:]) // 2]
                print(
                    f"{text:36} {name:16} best {best:.4f} {flops / best / 1e9:5.0f}  under load "
                    f"{last:.4f} ms {flops / last / 1e9:5.0f} TFLOP/s  error {error:.4f}",
                    flush=True,
                )
        except Exception as error:
            print(text, "FAILED", str(error)[-200:].replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
