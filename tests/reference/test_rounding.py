"""Where reference attention rounds, what that may cost, what it keeps in memory, and NaN."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.numerics.accumulator import HOPPER_FP8
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import dequantize
from octavo.reference.attention import attention, varlen_attention
from octavo.reference.softmax import EXACT, Rounding, kernel_rounding
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.cases import HEADS, AttentionCase, PackedCase
from octavo.testing.inputs import Draw, make_attention_inputs, make_packed_inputs

FP8_P = Rounding(torch.float8_e4m3fn)
BF16_P = Rounding(torch.bfloat16)
FP16_P = Rounding(torch.float16)


def assert_close(actual, truth, v, tolerance):
    """out within `tolerance` of the largest value; lse, where any key is seen, as close."""
    (out, lse), (true_out, true_lse) = actual, truth
    assert float((out - true_out).abs().max()) <= tolerance * float(v.abs().max())
    assert torch.equal(lse == -math.inf, true_lse == -math.inf)
    assert float((lse - true_lse).nan_to_num(0.0).abs().max()) <= tolerance * 10


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("rounding", [EXACT, FP8_P], ids=["exact", "fp8"])
def test_no_matrix_of_queries_by_keys(rounding):
    length = 4096
    q, k, v = Draw(0).normal(3, 1, length, 1, 32).to(E4M3.dtype)
    with LargestTensor() as largest:
        attention(q, k, v, AttentionSpec(causal=True), rounding=rounding)
    assert largest.numel <= length * 32  # as large as q itself
    assert largest.numel < length * length / 100


def test_memory_of_the_accumulator_model_does_not_grow_with_length():
    sizes = []
    for length in (256, 1024):
        q, k, v = Draw(0).normal(3, 1, length, 1, 32).to(E4M3.dtype)
        rounding = Rounding(E4M3.dtype, HOPPER_FP8)
        with LargestTensor() as largest:
            attention(q[:, :20], k, v, rounding=rounding)
        sizes.append(largest.numel)
    assert sizes[0] == sizes[1]


def test_keys_that_nobody_sees_are_not_touched():
    """A window costs its own length, not the sequence's: hidden tiles may even hold NaN."""
    case = AttentionCase(batch=1, q_len=1, kv_len=1000, spec=AttentionSpec(causal=True, window=100))
    inputs = make_attention_inputs(case, dtype=torch.float32)
    expected, _ = attention(**inputs)
    inputs["k"][:, :768], inputs["v"][:, :768] = math.nan, math.nan
    assert_same_bits(attention(**inputs)[0], expected)


@pytest.mark.parametrize(
    ("q_dtype", "promote_every", "expected"),
    [
        (torch.float8_e4m3fn, 1, Rounding(torch.float8_e4m3fn)),
        (torch.float8_e5m2, 1, Rounding(torch.float8_e4m3fn)),
        (torch.float8_e4m3fn, 4, Rounding(torch.float8_e4m3fn, HOPPER_FP8)),
        (torch.float8_e4m3fn, None, Rounding(torch.float8_e4m3fn, HOPPER_FP8)),
        (torch.bfloat16, 1, Rounding(torch.bfloat16)),
        (torch.float16, None, Rounding(torch.float16)),
        (torch.float32, 1, EXACT),
    ],
    ids=str,
)
def test_how_kernels_round(q_dtype, promote_every, expected):
    assert kernel_rounding(q_dtype, AttentionSpec(promote_every=promote_every)) == expected


def dequantized(inputs, dtype=torch.float64):
    """The same call on dequantized float64 tensors."""
    scales, plain = inputs["scales"], dict(inputs)
    for name, scale in (("q", scales.q), ("k", scales.k), ("v", scales.v)):
        granularity = {0: PerTensor(), 1: PerHead()}.get(scale.dim(), PerToken())
        plain[name] = dequantize(inputs[name], scale, granularity, dtype)
    del plain["scales"]
    return plain


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_scales_are_what_dequantizing_first_would_give(granularity, fmt, heads):
    case = AttentionCase(
        q_len=33,
        kv_len=140,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        spec=AttentionSpec(causal=True, softcap=5.0),
        has_sinks=True,
        has_key_mask=True,
    )
    inputs = make_attention_inputs(case, dtype=fmt.dtype, granularity=granularity)
    ours = attention(**inputs, compute=torch.float64)
    plain = dequantized(inputs)
    assert_close(ours, attention(**plain, compute=torch.float64), plain["v"], 1e-12)
    assert_close(attention(**inputs), attention(**plain, compute=torch.float64), plain["v"], 2e-6)


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
def test_packed_scales(granularity):
    case = PackedCase(q_lens=(5, 0, 33), kv_lens=(64, 3, 130), spec=AttentionSpec(causal=True))
    inputs = make_packed_inputs(case, dtype=E4M3.dtype, granularity=granularity)
    plain = dequantized(inputs)
    truth = varlen_attention(**plain, compute=torch.float64)
    assert_close(varlen_attention(**inputs, compute=torch.float64), truth, plain["v"], 1e-12)


def test_scales_of_different_granularity_for_q_k_and_v():
    case = AttentionCase(q_len=9, kv_len=20)
    inputs = make_attention_inputs(case, dtype=E4M3.dtype, granularity=PerToken())
    draw = Draw(5)
    shapes = (4,), (2,), (2, 20, 2)
    inputs["scales"] = QkvScales(*(draw.normal(*shape).abs() / 100 for shape in shapes))
    plain = dequantized(inputs)
    truth = attention(**plain, compute=torch.float64)
    assert_close(attention(**inputs, compute=torch.float64), truth, plain["v"], 1e-12)


# What rounding P costs: half a unit in its last place, and half the smallest step near zero.
# Every weight p ≤ 1 becomes p(1 + δ) + ε, so that the result moves by δ·Σp|v| + ε·Σ|v|.
P_ROUNDING = {
    "fp8": (FP8_P, 2.0**-4, 2.0**-10 / 256),
    "bf16": (BF16_P, 2.0**-8, 0.0),
    "fp16": (FP16_P, 2.0**-11, 2.0**-25),
}


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
@pytest.mark.parametrize("name", P_ROUNDING)
def test_what_rounding_p_costs_is_bounded(name, granularity):
    rounding, relative, absolute = P_ROUNDING[name]
    case = AttentionCase(q_len=33, kv_len=300, spec=AttentionSpec(softmax_scale=0.4))
    inputs = make_attention_inputs(case, dtype=E4M3.dtype, granularity=granularity)
    plain = dequantized(inputs)
    truth, true_lse = attention(**plain, compute=torch.float64)
    magnitude = dict(plain, v=plain["v"].abs())
    weighted, _ = attention(**magnitude, compute=torch.float64)
    out, lse = attention(**inputs, rounding=rounding)
    limit = relative * weighted + absolute * 300 * plain["v"].abs().max() + 1e-6
    error = (out.double() - truth).abs()
    assert (error <= limit).all()
    assert error.max() > relative * weighted.max() / 100  # and it does round
    # The denominator adds up the weights before they are rounded.
    torch.testing.assert_close(lse.double(), true_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rounding", [FP8_P, BF16_P, FP16_P], ids=["fp8", "bf16", "fp16"])
def test_the_model_of_a_kernel_is_within_its_own_budget(rounding):
    """float32 and float64 round P at other places now and then, and stay within the budget."""
    case = AttentionCase(q_len=65, kv_len=200, spec=AttentionSpec(causal=True))
    inputs = make_attention_inputs(case, dtype=E4M3.dtype)
    truth, _ = attention(**inputs, compute=torch.float64)
    model, _ = attention(**inputs, rounding=rounding)
    other, _ = attention(**inputs, rounding=rounding, compute=torch.float64)
    assert_within_budget(other, truth=truth, model=model)
    assert_within_budget(model.bfloat16(), truth=truth, model=model)


@pytest.mark.parametrize(
    "rounding",
    [EXACT, FP8_P, BF16_P, Rounding(E4M3.dtype, HOPPER_FP8)],
    ids=["exact", "fp8", "bf16", "hopper"],
)
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
def test_one_key_gives_its_dequantized_value_exactly(granularity, rounding):
    case = AttentionCase(batch=3, q_len=5, kv_len=1, num_heads=9, num_kv_heads=3, head_dim=72)
    inputs = make_attention_inputs(case, dtype=E4M3.dtype, granularity=granularity)
    out, _ = attention(**inputs, rounding=rounding)
    v = dequantized(inputs, torch.float32)["v"]
    assert_same_bits(out, v.repeat_interleave(3, dim=2).expand(-1, 5, -1, -1).contiguous())


@pytest.mark.parametrize(
    ("exponent", "kept"), [(-8, 2.0**-8), (-17, 2.0**-17), (-18, 0.0), (-19, 0.0)]
)
def test_p_uses_256_of_the_range_of_e4m3(exponent, kept):
    """The smallest weight that counts is 2^-9 / 256; half of it goes to even, which is zero."""
    q = torch.zeros(1, 1, 1, 32, dtype=torch.float64)
    k, v = torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32)
    q[..., 0], k[0, 1, 0, 0] = 1.0, -1.0
    v[0, 1] = 1.0
    spec = AttentionSpec(softmax_scale=-exponent * math.log(2))
    out, _ = attention(q, k, v, spec, rounding=FP8_P, compute=torch.float64)
    expected = kept / (1 + 2.0**exponent)
    torch.testing.assert_close(
        out.flatten(), torch.full((32,), expected).double(), rtol=1e-6, atol=0
    )


def test_promotion_after_every_tile_may_be_modelled_by_exact_sums():
    """The claim of kernel_rounding: inside a tile the accumulator loses far less than P does."""
    case = AttentionCase(batch=1, q_len=8, kv_len=1000, head_dim=128)
    inputs = make_attention_inputs(case, dtype=E4M3.dtype)
    truth, _ = attention(**inputs, compute=torch.float64)
    exact_sums, _ = attention(**inputs, rounding=FP8_P)
    hardware, _ = attention(**inputs, rounding=Rounding(E4M3.dtype, HOPPER_FP8))
    error = (exact_sums - truth).square().mean().sqrt()
    assert (hardware - exact_sums).square().mean().sqrt() < error / 4
    assert_within_budget(hardware, truth=truth, model=exact_sums)


def nan_rows(out: torch.Tensor) -> torch.Tensor:
    """[batch, q_len, heads]: True where a whole vector is NaN; no vector is NaN in part."""
    assert torch.equal(out.isnan().any(dim=-1), out.isnan().all(dim=-1))
    return out.isnan().all(dim=-1)


@pytest.mark.parametrize("rounding", [EXACT, FP8_P, BF16_P], ids=["exact", "fp8", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_query_poisons_its_own_row(bad, rounding):
    inputs = make_attention_inputs(AttentionCase(q_len=130), dtype=torch.float32)
    clean, _ = attention(**inputs, rounding=rounding)
    inputs["q"][1, 7, 3, 5] = bad
    out, lse = attention(**inputs, rounding=rounding)
    expected = torch.zeros(2, 130, 4, dtype=torch.bool)
    expected[1, 7, 3] = True
    assert torch.equal(nan_rows(out), expected)
    assert torch.equal(lse.isnan(), expected)
    assert_same_bits(out[~expected], clean[~expected])


def test_a_bad_key_poisons_who_sees_it():
    spec = AttentionSpec(causal=True, window=20)
    inputs = make_attention_inputs(AttentionCase(q_len=130, spec=spec), dtype=torch.float32)
    inputs["k"][0, 50, 1] = math.nan  # read by query heads 2 and 3
    out, _ = attention(**inputs)
    expected = torch.zeros(2, 130, 4, dtype=torch.bool)
    expected[0, 50:70, 2:] = True
    assert torch.equal(nan_rows(out), expected)


@pytest.mark.parametrize("rounding", [EXACT, FP8_P], ids=["exact", "fp8"])
def test_a_bad_key_that_is_masked_does_nothing(rounding):
    inputs = make_attention_inputs(AttentionCase(q_len=20), dtype=torch.float32)
    inputs["key_mask"] = torch.ones(2, 20, dtype=torch.bool)
    inputs["key_mask"][:, 13] = False
    clean = attention(**inputs, rounding=rounding)
    inputs["k"][:, 13] = math.nan
    for ours, theirs in zip(attention(**inputs, rounding=rounding), clean, strict=True):
        assert_same_bits(ours, theirs)


def test_a_bad_value_poisons_its_channel_of_who_sees_it():
    inputs = make_attention_inputs(AttentionCase(q_len=20), dtype=torch.float32)
    inputs["v"][0, 3, 1, 9] = math.nan
    out, lse = attention(**inputs)
    expected = torch.zeros(2, 20, 4, 64, dtype=torch.bool)
    expected[0, :, 2:, 9] = True
    assert torch.equal(out.isnan(), expected)
    assert not lse.isnan().any()


def test_an_infinite_sink_takes_all_weight_or_none():
    inputs = make_attention_inputs(AttentionCase(q_len=9), dtype=torch.float32)
    without, _ = attention(**inputs)
    inputs["sinks"] = torch.tensor([-math.inf, 1e30, -1e30, -math.inf])
    out, lse = attention(**inputs)
    assert_same_bits(out[:, :, [0, 2, 3]], without[:, :, [0, 2, 3]])
    assert (out[:, :, 1] == 0).all()
    assert (lse[:, :, 1] == 1e30).all()
