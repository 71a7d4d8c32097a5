"""The attention kernel against the reference: on a GPU, or small in the interpreter."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo import ops
from octavo.kernels.attention.config import (
    AttentionConfig,
    AttentionShape,
    candidates,
    default,
    is_valid,
    objection,
    shared_bytes,
    split_head_dim,
)
from octavo.kernels.device import CPU, Device, describe
from octavo.numerics.accumulator import HOPPER_FP8
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import relative_rms
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.reference import attention as reference
from octavo.reference.qkv import restore_values, transpose_values
from octavo.reference.softmax import Rounding, kernel_rounding
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.cases import HEAD_DIMS, HEADS, LENGTHS, PACKED, AttentionCase, PackedCase
from octavo.testing.inputs import make_attention_inputs, make_packed_inputs

pytest.importorskip("triton")
from octavo.kernels.attention.triton import attention

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
A100 = Device(type="cuda", name="NVIDIA A100", capability=(8, 0))
L4 = Device(type="cuda", name="NVIDIA L4", capability=(8, 9))


def run(inputs, *, layout="rows", out_dtype=torch.float32, **options):
    """The kernel, called as `ops.attention` calls it."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    packing = inputs.get("packing")
    if layout == "transposed":
        v = transpose_values(v, None if packing is None else packing.cu_seqlens_k)
    return attention(
        q,
        k,
        v,
        inputs["spec"],
        inputs.get("scales") or QkvScales.ones(q.device),
        packing=packing,
        sinks=inputs["sinks"],
        key_mask=inputs.get("key_mask"),
        out_dtype=out_dtype,
        value_layout=layout,
        **options,
    )


def check(inputs, *, layout="rows", out_dtype=torch.float32, **options):
    packing = inputs.get("packing")
    call = reference.attention if packing is None else reference.varlen_attention
    truth, truth_lse = call(**inputs, compute=torch.float64)
    rounding = kernel_rounding(inputs["q"].dtype, inputs["spec"])
    model, model_lse = call(**inputs, rounding=rounding)
    if rounding.weights == E4M3:  # what the accumulator cuts off shows in logits, not beside P
        _, model_lse = call(**inputs, rounding=Rounding(E4M3, HOPPER_FP8))
    out, lse = run(inputs, layout=layout, out_dtype=out_dtype, **options)
    assert out.dtype == out_dtype
    assert_within_budget(out, truth=truth, model=model)
    assert_within_budget(lse, truth=truth_lse, model=model_lse)
    return out


@pytest.mark.parametrize(("dtype", "layout"), [(BF16, "rows"), (E4M3, "transposed")], ids=str)
@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_lengths(case, dtype, layout, device):
    check(make_attention_inputs(case, dtype=dtype, device=device), layout=layout)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("head_dim", (*HEAD_DIMS, 40, 100))
def test_head_dims(head_dim, dtype, device):
    layout = "transposed" if dtype == E4M3 else "rows"
    case = AttentionCase(batch=1, q_len=20, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    check(make_attention_inputs(case, dtype=dtype, device=device), layout=layout)


@pytest.mark.parametrize("num_heads", HEADS, ids=str)
def test_heads(num_heads, device):
    case = AttentionCase(q_len=17, num_heads=num_heads[0], num_kv_heads=num_heads[1], head_dim=32)
    inputs = make_attention_inputs(case, dtype=E4M3, granularity=PerHead(), device=device)
    check(inputs, layout="transposed")


SPECS = [
    AttentionSpec(causal=True),
    AttentionSpec(window=5),
    AttentionSpec(window=70),
    AttentionSpec(window=1),
    AttentionSpec(causal=True, window=40),
    AttentionSpec(softcap=3.0),
    AttentionSpec(causal=True, softcap=20.0, window=100, softmax_scale=0.3),
    AttentionSpec(promote_every=None),
    AttentionSpec(promote_every=2, causal=True),
]


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("lengths", [(150, 150), (70, 150), (150, 70)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_specs(spec, lengths, dtype, device):
    case = AttentionCase(
        batch=1,
        q_len=lengths[0],
        kv_len=lengths[1],
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        spec=spec,
    )
    # Small tiles, so that there are several of every kind.
    config = AttentionConfig(32, 32, 4, 2)
    check(make_attention_inputs(case, dtype=dtype, device=device), config=config)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_sinks_and_key_mask(causal, dtype, device):
    case = AttentionCase(
        q_len=33, spec=AttentionSpec(causal=causal), has_sinks=True, has_key_mask=True, head_dim=32
    )
    check(make_attention_inputs(case, dtype=dtype, device=device))
    case = AttentionCase(q_len=33, has_key_mask=True, head_dim=32)
    check(make_attention_inputs(case, dtype=dtype, device=device))


@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
@pytest.mark.parametrize("promote_every", [1, 2, None])
def test_scales(promote_every, granularity, layout, device):
    spec = AttentionSpec(promote_every=promote_every)
    case = AttentionCase(q_len=20, kv_len=140, head_dim=32, spec=spec)
    inputs = make_attention_inputs(case, dtype=E4M3, granularity=granularity, device=device)
    check(inputs, layout=layout, config=AttentionConfig(32, 32, 4, 2))


@pytest.mark.parametrize(
    ("dtype", "layout", "granularity"),
    [(BF16, "rows", PerTensor()), (E4M3, "transposed", PerTensor()), (E4M3, "rows", PerToken())],
    ids=str,
)
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed(case, dtype, layout, granularity, device):
    inputs = make_packed_inputs(case, dtype=dtype, granularity=granularity, device=device)
    check(inputs, layout=layout)


def test_packed_causal_with_sinks(device):
    case = PackedCase(spec=AttentionSpec(causal=True, window=30), has_sinks=True, head_dim=32)
    check(make_packed_inputs(case, dtype=E4M3, device=device), layout="transposed")


@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_tokens_after_the_last_sequence_give_zeros(layout, device):
    case = PackedCase(q_lens=(3, 40, 200), num_heads=2, head_dim=40)
    inputs = make_packed_inputs(case, dtype=E4M3, device=device)
    packing = inputs["packing"]
    packing.cu_seqlens_q[-1] = packing.cu_seqlens_k[-1] = 43 + 5
    out = check(inputs, layout=layout, config=AttentionConfig(32, 32, 4, 2))
    assert not out[48:].any()


@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2, BF16, torch.float16, torch.float32], ids=str)
def test_dtypes(dtype, out_dtype, device):
    case = AttentionCase(batch=1, q_len=40, kv_len=70, head_dim=64)
    check(make_attention_inputs(case, dtype=dtype, device=device), out_dtype=out_dtype)


@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_nan_stays_in_its_sequence(layout, device):
    case = PackedCase(q_lens=(20, 30, 5), num_heads=1, num_kv_heads=1, head_dim=32)
    inputs = make_packed_inputs(case, dtype=E4M3, device=device)
    inputs["v"].view(torch.uint8)[20:50] = 0x7F
    out, _ = run(inputs, layout=layout)
    assert out[20:50].isnan().all()
    assert out[:20].isfinite().all() and out[50:].isfinite().all()


def test_strided_operands(device):
    case = AttentionCase(batch=2, q_len=30, num_heads=3, num_kv_heads=3, head_dim=40)
    inputs = make_attention_inputs(case, dtype=E4M3, device=device)
    packed = torch.empty(2, 30, 3, 3, 48, dtype=E4M3, device=device)
    for i, name in enumerate("qkv"):
        packed[:, :, i, :, :40] = inputs[name]
        inputs[name] = packed[:, :, i, :, :40]
    expected, _ = run(inputs)
    contiguous = {**inputs, **{name: inputs[name].contiguous() for name in "qkv"}}
    assert_same_bits(expected, run(contiguous)[0])
    check(inputs)


def test_transposed_values_further_apart_than_32_bits_count(device):
    """Only the last keys are seen; what is before them takes no memory until it is touched."""
    num_keys, head_dim = 2**31 // 64 + 16, 72
    # Not torch.zeros, which writes all of it.
    zeros = (np.zeros(num_keys * head_dim, np.uint8) for _ in range(2))
    k, v = (torch.from_numpy(x).to(device).view(E4M3) for x in zeros)
    k, v = k.view(1, num_keys, 1, head_dim), v.view(1, 1, head_dim, num_keys)
    inputs = make_attention_inputs(
        AttentionCase(batch=1, q_len=16, num_heads=1, num_kv_heads=1, head_dim=head_dim),
        dtype=E4M3,
        device=device,
    )
    spec = AttentionSpec(window=16, causal=True)
    v[..., -16:] = transpose_values(inputs["v"])
    q, scales = inputs["q"][:, -1:], inputs["scales"]
    options = {"packing": None, "sinks": None, "key_mask": None, "out_dtype": torch.float32}
    out, _ = attention(q, k, v, spec, scales, value_layout="transposed", **options)
    keys = torch.zeros_like(inputs["k"])
    truth, _ = reference.attention(q, keys, inputs["v"], spec, scales)
    # All keys weigh the same; the tensor core cuts each product off at 2^-13 of the largest.
    largest = float((inputs["v"].float() * scales.v).abs().max())
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=2**-13 * largest)


@pytest.mark.parametrize("device_", [H200, A100, L4], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", (*HEAD_DIMS, 40, 100))
def test_defaults_and_candidates_fit(head_dim, dtype, device_):
    for max_q_len, has_token_scales in itertools.product((1, 64, 10_000), (False, True)):
        shape = AttentionShape(dtype, head_dim, max_q_len, 1, has_token_scales)
        config = default(shape, device_)
        assert is_valid(config, shape, device_)
        assert shared_bytes(config, shape) <= device_.shared_bytes
        assert all(is_valid(config, shape, device_) for config in candidates(shape, device_))


def test_settings_that_do_not_fit():
    shape = AttentionShape(BF16, 128, 1000)
    assert is_valid(AttentionConfig(128, 128, 8, 3), shape, H200)
    assert not is_valid(AttentionConfig(128, 128, 8, 3), shape, A100)
    assert not is_valid(AttentionConfig(96, 128, 8, 2), shape, H200)
    assert not is_valid(AttentionConfig(256, 256, 4, 1), shape, H200)
    with_scales = replace(shape, has_token_scales=True)
    assert not is_valid(AttentionConfig(128, 128, 8, 3), with_scales, H200)


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [
        (32, ((32, 0), (32, 0))),
        (72, ((64, 32), (64, 16))),
        (96, ((64, 32), (64, 32))),
        (192, ((128, 64), (128, 64))),
        (256, ((128, 128), (128, 128))),
    ],
)
def test_how_head_dim_is_split(head_dim, expected):
    assert split_head_dim(head_dim, is_fp8_operand=True) == expected


@pytest.mark.parametrize(
    ("device_", "dtype", "head_dim", "message"),
    [
        (CPU, E4M3, 64, "needs a CUDA GPU, got CPU"),
        (A100, E4M3, 64, "8.9 or newer, got 8.0: run attention in bfloat16"),
        (Device("cuda", "T4", (7, 5)), BF16, 64, "8.0 or newer, got 7.5"),
        (H200, E4M3, 264, "32 … 256, got 264"),
    ],
)
def test_objections(device_, dtype, head_dim, message):
    assert message in objection(device_, dtype, head_dim)


def test_no_objection():
    assert objection(H200, E4M3, 72) is None
    assert objection(L4, E5M2, 128) is None
    assert objection(A100, BF16, None) is None


def check_ends(q, k, v, spec, scales=None, *, length=64, **options):
    """The first and the last queries of a long sequence against the reference."""
    out = ops.attention(q, k, v, spec, scales, impl="triton", **options)
    if options.get("value_layout") == "transposed":
        v = restore_values(v, k.shape[1])
    first = slice(0, length)
    keys = first if spec.causal else slice(None)
    ends = [(first, keys), (slice(-length, None), slice(None))]
    for rows, seen in ends:
        operands = (q[:, rows], k[:, seen], v[:, seen], spec, scales)
        truth, _ = reference.attention(*operands, compute=torch.float64)
        model, _ = reference.attention(*operands, rounding=kernel_rounding(q.dtype, spec))
        assert_within_budget(out[:, rows], truth=truth, model=model)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_sequences_on_a_gpu(head_dim, causal, layout):
    shape = [(1, 5000, heads, head_dim) for heads in (8, 2, 2)]
    qkv = ops.quantize_qkv(
        *(torch.randn(s, device="cuda") for s in shape), granularity=PerHead(), value_layout=layout
    )
    spec = AttentionSpec(causal=causal)
    operands = (qkv.q, qkv.k, qkv.v, spec, qkv.scales)
    out = check_ends(*operands, value_layout=layout)
    for _ in range(10):
        assert_same_bits(ops.attention(*operands, value_layout=layout, impl="triton"), out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_16_bit_on_a_gpu(head_dim, dtype):
    q, k, v = (
        torch.randn(1, 3000, heads, head_dim, device="cuda", dtype=dtype) for heads in (8, 2, 2)
    )
    check_ends(q, k, v, AttentionSpec(causal=True))


def biased_values(num_keys):
    """All keys weigh the same and values have a mean: what a short accumulator cannot add up."""
    q, k = (torch.randn(1, n, 2, 128, device="cuda") * 0.01 for n in (128, num_keys))
    v = 1 + 0.1 * torch.randn(1, num_keys, 2, 128, device="cuda")
    return ops.quantize_qkv(q, k, v, value_layout="transposed")


@pytest.mark.gpu
def test_two_levels_keep_the_error_of_short_contexts():
    errors = {}
    for promote_every in (1, None):
        for num_keys in (1024, 131072):
            qkv = biased_values(num_keys)
            spec = AttentionSpec(promote_every=promote_every)
            out = ops.attention(
                *(qkv.q, qkv.k, qkv.v, spec, qkv.scales), value_layout="transposed", impl="triton"
            )
            rows = restore_values(qkv.v, num_keys)
            truth, _ = reference.attention(
                *(qkv.q, qkv.k, rows, spec, qkv.scales), compute=torch.float64
            )
            errors[promote_every, num_keys] = relative_rms(out, truth)
    limit = 2 * errors[1, 1024]
    assert errors[1, 131072] <= limit, errors
    if torch.cuda.get_device_capability() == (9, 0):  # others add up in float32
        assert errors[None, 131072] > limit, errors


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    heads, length = 128, 140_000
    k = torch.zeros(1, length, heads, 128, device="cuda", dtype=E4M3)
    assert k.numel() > 2**31
    v = torch.zeros_like(k)
    for x in (k, v):
        x[:, :, -1] = torch.randn(1, length, 128, device="cuda").to(E4M3)
    q = torch.randn(1, 64, heads, 128, device="cuda").to(E4M3)
    scales = QkvScales.ones("cuda")
    spec = AttentionSpec()
    out = ops.attention(q, k, v, spec, scales, impl="triton")
    assert not out[:, :, :-1].any()
    last = [x[:, :, -1:] for x in (q, k, v)]
    truth, _ = reference.attention(*last, spec, scales, compute=torch.float64)
    model, _ = reference.attention(*last, spec, scales, rounding=kernel_rounding(E4M3, spec))
    assert_within_budget(out[:, :, -1:], truth=truth, model=model)


@pytest.mark.gpu
def test_more_heads_than_a_second_axis_of_programs_counts():
    case = PackedCase(q_lens=(3,) * 5000, num_heads=16, num_kv_heads=16, head_dim=64)
    inputs = make_packed_inputs(case, dtype=E4M3, device="cuda")
    out = ops.attention(**inputs, out_dtype=torch.float32, impl="triton")
    dense = {name: inputs[name].view(5000, 3, 16, 64) for name in "qkv"}
    expected = ops.attention(
        **dense,
        spec=inputs["spec"],
        scales=inputs["scales"],
        out_dtype=torch.float32,
        impl="triton",
    )
    assert_same_bits(out, expected.view(out.shape))
    some = slice(-32, None)
    truth, _ = reference.attention(
        *(x[some] for x in dense.values()), inputs["spec"], inputs["scales"]
    )
    assert relative_rms(expected[some], truth) < 0.05


@pytest.mark.gpu
def test_attention_in_a_cuda_graph_with_other_lengths():
    case = PackedCase(q_lens=(100, 300, 50), num_heads=4, num_kv_heads=2, head_dim=72)
    inputs = make_packed_inputs(case, dtype=E4M3, device="cuda")
    ops.attention(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(**inputs)
    for ends in ([0, 100, 400, 450], [0, 0, 10, 300], [0, 150, 151, 449]):
        for ends_of in (inputs["packing"].cu_seqlens_q, inputs["packing"].cu_seqlens_k):
            ends_of.copy_(torch.tensor(ends))
        out.fill_(torch.nan)
        graph.replay()
        truth, _ = reference.varlen_attention(**inputs, compute=torch.float64)
        rounding = kernel_rounding(E4M3, inputs["spec"])
        model, _ = reference.varlen_attention(**inputs, rounding=rounding)
        assert_within_budget(out, truth=truth, model=model)


@pytest.mark.gpu
def test_a_gpu_chooses_triton():
    request = ops.Request(op="attention", device=describe("cuda"), dtype=E4M3, head_dim=72)
    assert ops.select(request).impl == "triton"
