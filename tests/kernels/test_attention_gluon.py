"""Hopper's attention kernel against the reference: on a GPU, since Gluon has no interpreter."""

import dataclasses

import pytest
import torch

from octavo import ops
from octavo.kernels.attention.config import (
    GluonConfig,
    default_gluon,
    hopper_objection,
    is_valid_gluon,
)
from octavo.kernels.device import CPU, Device
from octavo.numerics.accumulator import HOPPER_FP8
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import relative_rms
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales
from octavo.reference import attention as reference
from octavo.reference.qkv import restore_values, transpose_values
from octavo.reference.softmax import Rounding, kernel_rounding
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.cases import LENGTHS, PACKED, AttentionCase, PackedCase
from octavo.testing.inputs import make_attention_inputs, make_packed_inputs

pytest.importorskip("triton")
from octavo.kernels.attention.gluon_sm90 import attention

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
HEAD_DIMS = (64, 72, 80, 96, 104, 128, 136, 160, 192)
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)


def run(inputs, config=None):
    packing = inputs.get("packing")
    return attention(
        inputs["q"],
        inputs["k"],
        transpose_values(inputs["v"], None if packing is None else packing.cu_seqlens_k),
        inputs["spec"],
        inputs["scales"],
        packing=packing,
        sinks=inputs["sinks"],
        key_mask=None,
        out_dtype=torch.float32,
        value_layout="transposed",
        config=config,
    )


def check(inputs, config=None):
    call = reference.attention if "packing" not in inputs else reference.varlen_attention
    truth, truth_lse = call(**inputs, compute=torch.float64)
    config = config or default_gluon(inputs["q"].shape[-1], inputs["spec"])
    model, _ = call(**inputs, rounding=kernel_rounding(E4M3, inputs["spec"]))
    _, model_lse = call(**inputs, rounding=Rounding(E4M3, HOPPER_FP8, config.has_ones))
    out, lse = run(inputs, config)
    assert_within_budget(out, truth=truth, model=model)
    assert_within_budget(lse, truth=truth_lse, model=model_lse)
    return out


def dense(granularity=None, **fields):
    case = AttentionCase(**fields)
    granularity = granularity or PerTensor()
    return make_attention_inputs(case, dtype=E4M3, granularity=granularity, device="cuda")


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in LENGTHS if case.head_dim >= 64], ids=str)
def test_lengths(case):
    check(make_attention_inputs(case, dtype=E4M3, device="cuda"))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim):
    check(dense(PerHead(), q_len=200, kv_len=300, head_dim=head_dim))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_again_with_other_tensors(head_dim, granularity):
    """A launch of known sizes reads and writes the tensors of its own call."""
    fields = {"q_len": 200, "kv_len": 300, "head_dim": head_dim}
    first, second = (dense(granularity, batch=n, **fields) for n in (1, 2))
    outs = [check(first), check(second)]
    for inputs, out in zip((first, second), outs, strict=True):
        values = inputs["v"].view(torch.uint8).flip(1).view(E4M3)
        scales = QkvScales(*(2 * getattr(inputs["scales"], name) for name in "qkv"))
        other = inputs | {"v": values, "scales": scales}
        assert relative_rms(check(other), out) > 0.1
        assert_same_bits(check(inputs), out)


SPECS = [
    AttentionSpec(causal=True),
    AttentionSpec(window=5),
    AttentionSpec(window=170),
    AttentionSpec(causal=True, window=40),
    AttentionSpec(softcap=3.0),
    AttentionSpec(causal=True, softcap=20.0, window=300, softmax_scale=0.3),
]


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 128, 192])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_specs(spec, head_dim):
    for q_len, kv_len in ((450, 450), (70, 520), (450, 100), (128, 128)):
        check(dense(batch=1, q_len=q_len, kv_len=kv_len, head_dim=head_dim, spec=spec))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sinks(head_dim, causal):
    spec = AttentionSpec(causal=causal)
    check(dense(q_len=200, kv_len=150, head_dim=head_dim, spec=spec, has_sinks=True))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed(case):
    check(make_packed_inputs(case, dtype=E4M3, device="cuda"))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 128, 192])
def test_packed_causal_with_sinks(head_dim):
    case = PackedCase(
        q_lens=(300, 1, 0, 130, 64),
        kv_lens=(300, 400, 7, 200, 64),
        spec=AttentionSpec(causal=True, window=150),
        has_sinks=True,
        head_dim=head_dim,
    )
    check(make_packed_inputs(case, dtype=E4M3, device="cuda"))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rest", [200, 2000])
@pytest.mark.parametrize("head_dim", [72, 128])
def test_tokens_after_the_last_sequence_give_zeros(head_dim, rest):
    case = PackedCase(q_lens=(3, 40, rest), num_heads=2, head_dim=head_dim)
    inputs = make_packed_inputs(case, dtype=E4M3, device="cuda")
    packing = inputs["packing"]
    packing.cu_seqlens_q[-1] = packing.cu_seqlens_k[-1] = 43 + 5
    out = check(inputs)
    assert not out[48:].any()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_many_sequences_of_all_lengths(causal):
    """Empty ones, whole tiles, one more and one less, in one call."""
    spec = AttentionSpec(causal=causal)
    lengths = (0, 128, 0, 0, 127, 129, 1, 256, 0, 300, 64, 0)
    case = PackedCase(q_lens=lengths, num_heads=3, num_kv_heads=1, head_dim=72, spec=spec)
    check(make_packed_inputs(case, dtype=E4M3, device="cuda"))


@hopper
@pytest.mark.gpu
def test_no_sequences_give_zeros():
    case = PackedCase(q_lens=(5,), num_heads=2, head_dim=72)
    inputs = make_packed_inputs(case, dtype=E4M3, device="cuda")
    packing = inputs["packing"]
    none = packing.cu_seqlens_q[:1]
    inputs["packing"] = dataclasses.replace(packing, cu_seqlens_q=none, cu_seqlens_k=none)
    out, lse = run(inputs)
    assert not out.any() and not lse.any()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("length", [20, 128, 113, 1, 240])
@pytest.mark.parametrize("head_dim", [72, 128, 136, 192])
def test_nan_stays_in_its_sequence(head_dim, length):
    lengths = (length, 130, 5)
    case = PackedCase(q_lens=lengths, num_heads=1, num_kv_heads=1, head_dim=head_dim)
    inputs = make_packed_inputs(case, dtype=E4M3, device="cuda")
    last = length + 130
    for name in "kv":
        inputs[name].view(torch.uint8)[length:last] = 0x7F
    for x in run(inputs):
        assert x[length:last].isnan().all()
        assert x[:length].isfinite().all() and x[last:].isfinite().all()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128, 136])
def test_one_nan_key(head_dim, has_sinks):
    for place in range(16):
        inputs = dense(batch=1, q_len=70, kv_len=200, head_dim=head_dim, has_sinks=has_sinks)
        inputs["k"].view(torch.uint8)[0, 100 + place, :, 3] = 0x7F
        for x in run(inputs):
            assert x.isnan().all()


@hopper
@pytest.mark.gpu
def test_strided_and_unaligned_operands():
    inputs = dense(q_len=130, num_heads=3, num_kv_heads=3, head_dim=72)
    expected, _ = run(inputs)
    joint = torch.empty(2, 130, 3, 3, 73, dtype=E4M3, device="cuda")
    for i, name in enumerate("qkv"):
        joint[:, :, i, :, 1:] = inputs[name]
        inputs[name] = joint[:, :, i, :, 1:]
    assert_same_bits(run(inputs)[0], expected)


CONFIGS = [
    *((head_dim, GluonConfig()) for head_dim in (64, 72, 96)),
    *((head_dim, GluonConfig(has_ones=True)) for head_dim in (64, 72, 80, 96, 128)),
    *((head_dim, GluonConfig(num_stages=2)) for head_dim in (64, 72)),
    *((head_dim, GluonConfig(num_stages=8, has_ones=True)) for head_dim in (64, 72)),
    (128, GluonConfig(num_stages=2)),
    *((64, GluonConfig(block_n=64, has_ones=has_ones)) for has_ones in (False, True)),
    *((head_dim, GluonConfig(has_one_loop=True)) for head_dim in (96, 104, 128)),
    *((head_dim, GluonConfig(is_persistent=True, has_ones=True)) for head_dim in (64, 72, 80)),
    (72, GluonConfig(is_persistent=True, num_stages=2)),
    *((head_dim, GluonConfig(block_n=64, has_one_loop=True)) for head_dim in (136, 192)),
]


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "config"), CONFIGS, ids=str)
def test_other_settings(head_dim, config):
    for q_len, kv_len in ((300, 700), (1, 1), (193, 128), (65, 129), (64, 2000), (5, 0)):
        check(dense(batch=1, q_len=q_len, kv_len=kv_len, head_dim=head_dim), config)
    causal = AttentionSpec(causal=True)
    for q_len, kv_len in ((450, 450), (450, 100), (70, 520)):
        check(dense(batch=1, q_len=q_len, kv_len=kv_len, head_dim=head_dim, spec=causal), config)
    case = PackedCase(
        q_lens=(300, 1, 0, 130, 64),
        kv_lens=(300, 400, 7, 0, 64),
        spec=AttentionSpec(causal=True),
        has_sinks=True,
        head_dim=head_dim,
    )
    check(make_packed_inputs(case, dtype=E4M3, device="cuda"), config)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [72, 80])
def test_where_the_ring_begins_again(head_dim, causal):
    for kv_len in (896, 897, 1024, 1025, 1152, 2048, 2049):
        spec = AttentionSpec(causal=causal)
        check(dense(batch=1, q_len=130, kv_len=kv_len, head_dim=head_dim, spec=spec))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_defaults_are_valid(head_dim):
    for causal in (False, True):
        assert is_valid_gluon(default_gluon(head_dim, AttentionSpec(causal=causal)))


@pytest.mark.parametrize("changes", [{"block_n": 96}, {"num_stages": 3}, {"num_stages": 1}])
def test_settings_that_are_not_valid(changes):
    assert not is_valid_gluon(GluonConfig(**changes))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_sequences(head_dim, causal):
    sizes = [(1, 5000, heads, head_dim) for heads in (8, 2, 2)]
    q, k, v = (torch.randn(size, device="cuda") for size in sizes)
    qkv = ops.quantize_qkv(q, k, v, granularity=PerHead(), value_layout="transposed")
    operands = (qkv.q, qkv.k, qkv.v, AttentionSpec(causal=causal), qkv.scales)
    options = {"value_layout": "transposed", "impl": "gluon"}
    out = ops.attention(*operands, **options)
    rows = restore_values(qkv.v, 5000)
    last = (qkv.q[:, -64:], qkv.k, rows, operands[3], qkv.scales)
    truth, _ = reference.attention(*last, compute=torch.float64)
    model, _ = reference.attention(*last, rounding=kernel_rounding(E4M3, operands[3]))
    assert_within_budget(out[:, -64:], truth=truth, model=model)
    expected = ops.attention(*operands, value_layout="transposed", impl="triton")
    # Rounding P costs each 0.026; they round around different maxima, so nothing cancels.
    assert relative_rms(out, expected.float()) < 2 * 0.026
    for _ in range(20):
        assert_same_bits(ops.attention(*operands, **options), out)


@hopper
@pytest.mark.gpu
def test_two_levels_keep_the_error_of_short_contexts():
    errors = {}
    for num_keys in (1024, 131072):
        q, k = (torch.randn(1, n, 2, 128, device="cuda") * 0.01 for n in (128, num_keys))
        v = 1 + 0.1 * torch.randn(1, num_keys, 2, 128, device="cuda")
        qkv = ops.quantize_qkv(q, k, v, value_layout="transposed")
        operands = (qkv.q, qkv.k, qkv.v, AttentionSpec(), qkv.scales)
        out = ops.attention(*operands, value_layout="transposed", impl="gluon")
        rows = restore_values(qkv.v, num_keys)
        truth, _ = reference.attention(
            *(qkv.q, qkv.k, rows, AttentionSpec(), qkv.scales), compute=torch.float64
        )
        errors[num_keys] = relative_rms(out, truth)
    assert errors[131072] <= 2 * errors[1024], errors


@hopper
@pytest.mark.gpu
def test_more_heads_than_a_second_axis_of_programs_counts():
    case = PackedCase(q_lens=(3,) * 5000, num_heads=16, num_kv_heads=16, head_dim=64)
    inputs = make_packed_inputs(case, dtype=E4M3, device="cuda")
    out, _ = run(inputs)
    few = {name: inputs[name].view(5000, 3, 16, 64)[-32:] for name in "qkv"}
    truth, _ = reference.attention(**few, spec=inputs["spec"], scales=inputs["scales"])
    assert relative_rms(out.view(5000, 3, 16, 64)[-32:], truth) < 0.05


@hopper
@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    heads, length = 128, 140_000
    k = torch.zeros(1, length, heads, 128, device="cuda", dtype=E4M3)
    v = torch.zeros(1, heads, 128, length, device="cuda", dtype=E4M3)
    last = torch.randn(1, length, 1, 128, device="cuda").to(E4M3)
    k[:, :, -1:] = last
    v[:, -1:] = transpose_values(last)
    q = torch.randn(1, 64, heads, 128, device="cuda").to(E4M3)
    scales, spec = QkvScales.ones("cuda"), AttentionSpec()
    out = ops.attention(q, k, v, spec, scales, value_layout="transposed", impl="gluon")
    assert not out[:, :, :-1].any()
    operands = (q[:, :, -1:], last, last, spec, scales)
    truth, _ = reference.attention(*operands, compute=torch.float64)
    model, _ = reference.attention(*operands, rounding=kernel_rounding(E4M3, spec))
    assert_within_budget(out[:, :, -1:], truth=truth, model=model)


@hopper
@pytest.mark.gpu
def test_other_lengths_in_a_cuda_graph():
    case = PackedCase(q_lens=(100, 300, 50), num_heads=4, num_kv_heads=2, head_dim=72)
    inputs = make_packed_inputs(case, dtype=E4M3, device="cuda")
    ends = ([0, 100, 400, 450], [0, 0, 10, 300], [0, 150, 151, 449])
    lengths = [inputs["packing"].cu_seqlens_q, inputs["packing"].cu_seqlens_k]
    v = transpose_values(inputs["v"], lengths[1])
    operands = (inputs["q"], inputs["k"], v, inputs["spec"], inputs["scales"])
    options = {"packing": inputs["packing"], "value_layout": "transposed", "impl": "gluon"}
    ops.attention(*operands, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(*operands, **options)
    for chosen in ends:
        for ends_of in lengths:
            ends_of.copy_(torch.tensor(chosen))
        v.copy_(transpose_values(inputs["v"], lengths[1]))
        out.fill_(torch.nan)
        graph.replay()
        truth, _ = reference.varlen_attention(**inputs, compute=torch.float64)
        rounding = kernel_rounding(E4M3, inputs["spec"])
        model, _ = reference.varlen_attention(**inputs, rounding=rounding)
        assert_within_budget(out, truth=truth, model=model)


@hopper
@pytest.mark.gpu
def test_hopper_is_given_its_own_kernel():
    qkv = ops.quantize_qkv(
        *(torch.randn(1, 200, 2, 72, device="cuda") for _ in range(3)), value_layout="transposed"
    )
    operands = (qkv.q, qkv.k, qkv.v, AttentionSpec(), qkv.scales)
    options = {"value_layout": "transposed"}
    chosen = ops.attention(*operands, **options)
    assert_same_bits(chosen, ops.attention(*operands, **options, impl="gluon"))


TRANSPOSED = frozenset({"transposed"})


@pytest.mark.parametrize(
    ("device", "dtypes", "head_dim", "granularity", "features", "message"),
    [
        (CPU, (E4M3, E4M3), 64, "tensor", TRANSPOSED, "needs a CUDA GPU, got CPU"),
        (Device("cuda", "L4", (8, 9)), (E4M3, E4M3), 64, "head", TRANSPOSED, "9.0, got 8.9"),
        (H200, (BF16, BF16), 64, "tensor", TRANSPOSED, "takes e4m3, got torch.bfloat16"),
        (H200, (E4M3, E5M2), 64, "tensor", TRANSPOSED, "takes e4m3, got"),
        (H200, (E4M3, E4M3), 256, "tensor", TRANSPOSED, "64 … 192, got 256"),
        (H200, (E4M3, E4M3), 128, "token", TRANSPOSED, "scales per token"),
        (H200, (E4M3, E4M3), 128, "head", TRANSPOSED | {"one-level"}, "two levels"),
        (H200, (E4M3, E4M3), 128, "head", TRANSPOSED | {"key_mask"}, "key mask"),
        (H200, (E4M3, E4M3), 128, "head", TRANSPOSED | {"mixed"}, "one dtype"),
        (H200, (E4M3, E4M3), 128, "head", frozenset(), "values must lie transposed"),
    ],
)
def test_objections(device, dtypes, head_dim, granularity, features, message):
    assert message in hopper_objection(device, dtypes, head_dim, granularity, features)


def test_no_objection():
    features = TRANSPOSED | {"causal", "window", "sinks", "softcap", "packed", "lse"}
    assert hopper_objection(H200, (E4M3, E4M3), 72, "head", features) is None


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_more_tiles_than_programs(head_dim):
    check(dense(batch=40, q_len=200, kv_len=300, num_heads=4, num_kv_heads=2, head_dim=head_dim))
    lengths = (700, *(1 + 13 * i % 131 for i in range(60)), 0, 390)
    for has_sinks in (False, True):
        case = PackedCase(q_lens=lengths, kv_lens=lengths, head_dim=head_dim, has_sinks=has_sinks)
        check(make_packed_inputs(case, dtype=E4M3, device="cuda"))
