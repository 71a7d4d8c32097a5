"""Reference attention against softmax over the whole matrix in float64, written out here."""

import math
from dataclasses import replace
from itertools import pairwise

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.reference.attention import attention, varlen_attention
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import HEAD_DIMS, HEADS, LENGTHS, PACKED, AttentionCase, PackedCase
from octavo.testing.inputs import Draw, make_attention_inputs, make_packed_inputs, make_packing


def softmax_attention(q, k, v, spec, *, sinks=None, key_mask=None):
    """(out, lse) of one batch from the whole q_len × kv_len matrix of logits, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    (batch, q_len, num_heads, head_dim), (kv_len, num_kv_heads) = q.shape, k.shape[1:3]
    of_query_head = torch.arange(num_heads) // (num_heads // num_kv_heads)
    scale = 1 / math.sqrt(head_dim) if spec.softmax_scale is None else spec.softmax_scale
    logits = torch.einsum("bihd,bjhd->bhij", q, k[:, :, of_query_head]) * scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    hidden = [[is_hidden(i + kv_len - q_len, j, spec) for j in range(kv_len)] for i in range(q_len)]
    logits = logits.masked_fill(
        torch.tensor(hidden, dtype=torch.bool).view(q_len, kv_len), -math.inf
    )
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None, :], -math.inf)
    # A sink is one more column, without a value.
    sink = torch.full((num_heads,), -math.inf) if sinks is None else sinks
    column = sink.double().view(1, num_heads, 1, 1).expand(batch, num_heads, q_len, 1)
    logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)[..., :-1]
    out = torch.einsum("bhij,bjhd->bihd", weights, v[:, :, of_query_head])
    return out, torch.logsumexp(logits, dim=-1).transpose(1, 2)


def is_hidden(position: int, key: int, spec: AttentionSpec) -> bool:
    is_future = spec.causal and key > position
    is_far = spec.window is not None and abs(position - key) >= spec.window
    return is_future or is_far


def assert_close(actual, truth, v, tolerance):
    """Within `tolerance` of the largest value; lse as close, and −inf where the truth is."""
    (out, lse), (true_out, true_lse) = actual, truth
    assert out.shape == true_out.shape
    assert lse.shape == true_lse.shape
    limit = tolerance * float(v.double().abs().max()) if v.numel() else 0.0
    assert float((out.double() - true_out).abs().max() if out.numel() else 0.0) <= limit
    sees_nothing = true_lse == -math.inf
    assert torch.equal(lse == -math.inf, sees_nothing)
    error = torch.where(sees_nothing, 0.0, lse.double() - true_lse).abs()
    assert float(error.max() if error.numel() else 0.0) <= tolerance * 10


def float32_tolerance(q, k, spec, **_) -> float:
    """What float32 may lose, of the largest value: the error of a logit grows with its size."""
    if not q.numel() or not k.numel():
        return 1e-6
    k = k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)
    logits = torch.einsum("...ihd,...jhd->...hij", q, k) * spec.scale_for(q.shape[-1])
    return 1e-6 * max(1.0, float(logits.abs().max()))


def check_dense(case: AttentionCase, seed: int = 0) -> None:
    inputs = make_attention_inputs(case, seed=seed, dtype=torch.float32)
    truth = softmax_attention(**inputs)
    assert_close(attention(**inputs, compute=torch.float64), truth, inputs["v"], 1e-12)
    out, lse = attention(**inputs)
    assert out.dtype == lse.dtype == torch.float32
    assert_close((out, lse), truth, inputs["v"], float32_tolerance(**inputs))


def check_packed(case: PackedCase, seed: int = 0) -> None:
    inputs = make_packed_inputs(case, seed=seed, dtype=torch.float32)
    packing = inputs.pop("packing")
    spec, sinks = inputs["spec"], inputs["sinks"]
    result = varlen_attention(**inputs, packing=packing)
    precise = varlen_attention(**inputs, packing=packing, compute=torch.float64)
    starts = zip(
        pairwise(packing.cu_seqlens_q.tolist()),
        pairwise(packing.cu_seqlens_k.tolist()),
        strict=True,
    )
    for queries, keys in starts:
        q = inputs["q"][slice(*queries)].unsqueeze(0)
        k, v = (inputs[name][slice(*keys)].unsqueeze(0) for name in "kv")
        truth = softmax_attention(q, k, v, spec, sinks=sinks)
        truth = truth[0][0], truth[1][0]
        assert_close(tuple(x[slice(*queries)] for x in precise), truth, v, 1e-12)
        tolerance = float32_tolerance(q, k, spec)
        assert_close(tuple(x[slice(*queries)] for x in result), truth, v, tolerance)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"heads={heads[0]}/{heads[1]}")
@pytest.mark.parametrize("has_key_mask", [False, True], ids=["unmasked", "key_mask"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["uncapped", "softcap"])
@pytest.mark.parametrize("window", [None, 5], ids=["all-keys", "window"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_every_combination_dense(causal, window, softcap, has_sinks, has_key_mask, heads):
    spec = AttentionSpec(causal=causal, window=window, softcap=softcap)
    check_dense(
        AttentionCase(
            q_len=11,
            kv_len=14,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=32,
            spec=spec,
            has_sinks=has_sinks,
            has_key_mask=has_key_mask,
        )
    )


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"heads={heads[0]}/{heads[1]}")
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["uncapped", "softcap"])
@pytest.mark.parametrize("window", [None, 5], ids=["all-keys", "window"])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_every_combination_packed(causal, window, softcap, has_sinks, heads):
    spec = AttentionSpec(causal=causal, window=window, softcap=softcap)
    check_packed(
        PackedCase(
            q_lens=(9, 0, 1, 7),
            kv_lens=(9, 3, 12, 2),
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=32,
            spec=spec,
            has_sinks=has_sinks,
        )
    )


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim(head_dim, causal):
    spec = AttentionSpec(causal=causal)
    check_dense(AttentionCase(batch=1, q_len=17, kv_len=33, head_dim=head_dim, spec=spec))
    check_packed(PackedCase(q_lens=(3, 17), head_dim=head_dim, spec=spec))


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_lengths(case, causal):
    check_dense(replace(case, spec=AttentionSpec(causal=causal), has_sinks=causal))


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_lengths(case):
    check_packed(replace(case, spec=AttentionSpec(causal=True)))


@pytest.mark.parametrize("window", [1, 5, 127, 128, 129, 1000])
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_windows_across_tiles(window, causal):
    spec = AttentionSpec(window=window, causal=causal)
    check_dense(
        AttentionCase(batch=1, q_len=140, kv_len=300, num_heads=1, num_kv_heads=1, spec=spec)
    )


@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(5, 133), (600, 600)],
    ids=["first key ends a tile", "last key of the first 512 queries begins one"],
)
def test_windows_that_reach_one_key_into_a_tile(q_len, kv_len):
    spec = AttentionSpec(window=2)
    check_dense(
        AttentionCase(
            batch=1, q_len=q_len, kv_len=kv_len, num_heads=1, num_kv_heads=1, head_dim=32, spec=spec
        )
    )


@pytest.mark.parametrize("softmax_scale", [1e-3, 0.3])
def test_a_scale_of_ones_own(softmax_scale):
    check_dense(AttentionCase(spec=AttentionSpec(softmax_scale=softmax_scale)))


def test_a_window_of_one_copies_the_values():
    """With window=1 each query sees the key at its own position only."""
    case = AttentionCase(batch=1, q_len=130, num_heads=2, spec=AttentionSpec(window=1))
    inputs = make_attention_inputs(case, dtype=torch.float32)
    assert_same_bits(attention(**inputs)[0], inputs["v"])


def test_uniform_weights_average_the_values():
    v = Draw(0).normal(1, 300, 1, 64)
    out, lse = attention(torch.zeros(1, 1, 1, 64), torch.zeros_like(v), v, compute=torch.float64)
    torch.testing.assert_close(out[0, 0, 0], v.double().mean(dim=1)[0, 0], rtol=0, atol=1e-15)
    assert float(lse) == pytest.approx(math.log(300), rel=1e-14)


def test_a_query_that_sees_nothing_gives_zeros():
    case = AttentionCase(batch=1, q_len=9, kv_len=4, spec=AttentionSpec(causal=True))
    inputs = make_attention_inputs(case, dtype=torch.float32)
    out, lse = attention(**inputs)
    assert (out[:, :5] == 0).all()
    assert (lse[:, :5] == -math.inf).all()
    assert (out[:, 5:] != 0).all()


def test_a_sink_alone_leaves_zeros_and_its_own_logit():
    inputs = make_attention_inputs(AttentionCase(kv_len=0, has_sinks=True), dtype=torch.float32)
    out, lse = attention(**inputs)
    assert (out == 0).all()
    assert_same_bits(lse, inputs["sinks"].expand_as(lse).contiguous())


def test_packing_is_the_same_as_a_dense_batch():
    case = AttentionCase(batch=3, q_len=65, spec=AttentionSpec(causal=True, window=40))
    inputs = make_attention_inputs(case, dtype=torch.float32)
    out, lse = attention(**inputs)
    flat = {name: inputs[name].flatten(0, 1) for name in "qkv"}
    packing = make_packing((65,) * 3, (65,) * 3)
    packed_out, packed_lse = varlen_attention(**flat, packing=packing, spec=case.spec)
    assert_same_bits(packed_out, out.flatten(0, 1))
    assert_same_bits(packed_lse, lse.flatten(0, 1))


def test_tokens_after_the_last_sequence_are_padding():
    q, k, v = Draw(0).normal(3, 10, 2, 32)
    out, _ = varlen_attention(q, k, v, make_packing((3, 4), (3, 4)))
    assert (out[7:] == 0).all()
    assert (out[:7] != 0).all()


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("ends", [(1, 3), (0, 5, 3), (0, 3, 11), (0, -1)], ids=str)
def test_sequences_must_lie_within_the_tensors(ends, side):
    q, k, v = Draw(0).normal(3, 10, 2, 32)
    good = torch.zeros(len(ends), dtype=torch.int32)
    packing = Packing(good, good, 10, 10)
    packing = replace(packing, **{f"cu_seqlens_{side}": torch.tensor(ends, dtype=torch.int32)})
    with pytest.raises(ConfigError, match=f"cu_seqlens_{side} to rise from 0 to at most 10, got"):
        varlen_attention(q, k, v, packing)


@pytest.mark.parametrize(
    ("case", "sdpa"),
    [
        (AttentionCase(q_len=65, num_kv_heads=4), {}),
        (
            AttentionCase(q_len=200, num_kv_heads=4, spec=AttentionSpec(causal=True)),
            {"is_causal": True},
        ),
        (AttentionCase(q_len=63, kv_len=300, num_heads=6, num_kv_heads=2), {"enable_gqa": True}),
        (
            AttentionCase(q_len=33, num_kv_heads=4, spec=AttentionSpec(softmax_scale=0.2)),
            {"scale": 0.2},
        ),
        (
            AttentionCase(q_len=1, kv_len=129, head_dim=72, num_heads=9, num_kv_heads=3),
            {"enable_gqa": True},
        ),
    ],
    ids=str,
)
def test_torchs_own_attention_agrees(case, sdpa):
    inputs = make_attention_inputs(case, dtype=torch.float32)
    q, k, v = (inputs[name].double().transpose(1, 2) for name in "qkv")
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, **sdpa).transpose(1, 2)
    ours, _ = attention(**inputs, compute=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_of_16_bits_are_taken_as_they_are(dtype):
    inputs = make_attention_inputs(AttentionCase(), dtype=dtype)
    wide = inputs | {name: inputs[name].float() for name in "qkv"}
    assert_same_bits(attention(**inputs)[0], attention(**wide)[0])


def test_strided_inputs():
    """[batch, heads, length, head_dim] seen as [batch, length, heads, head_dim], and slices."""
    draw = Draw(0)
    q = draw.normal(2, 4, 65, 64).transpose(1, 2)
    both = draw.normal(2, 65, 2, 128)
    k, v = both[..., :64], both[..., 64:]
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous())
    for ours, theirs in zip(attention(q, k, v), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


LENGTH = st.sampled_from([0, 1, 2, 17, 63, 65, 128, 130])
SPECS = st.builds(
    AttentionSpec,
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 5, 128, 1000]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    softmax_scale=st.sampled_from([None, 0.02, 0.2]),
)


@hypothesis.given(
    batch=st.integers(0, 3),
    q_len=LENGTH,
    kv_len=LENGTH,
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from(HEAD_DIMS),
    spec=SPECS,
    has_sinks=st.booleans(),
    has_key_mask=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_dense_batch(
    batch, q_len, kv_len, heads, head_dim, spec, has_sinks, has_key_mask, seed
):
    case = AttentionCase(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        spec=spec,
        has_sinks=has_sinks,
        has_key_mask=has_key_mask,
    )
    check_dense(case, seed)


@hypothesis.given(
    lens=st.lists(st.tuples(LENGTH, LENGTH), max_size=4),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from(HEAD_DIMS),
    spec=SPECS,
    has_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_packed_batch(lens, heads, head_dim, spec, has_sinks, seed):
    case = PackedCase(
        q_lens=tuple(q_len for q_len, _ in lens),
        kv_lens=tuple(kv_len for _, kv_len in lens),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        spec=spec,
        has_sinks=has_sinks,
    )
    check_packed(case, seed)


@pytest.mark.parametrize("size", [30.0, 1e3, 1e6])
def test_large_logits_pick_one_key(size):
    draw = Draw(0)
    q, k = draw.normal(1, 7, 2, 64) * size, draw.normal(1, 300, 2, 64)
    v = draw.normal(1, 300, 2, 64)
    out, lse = attention(q, k, v)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    truth, _ = softmax_attention(q, k, v, AttentionSpec())
    out, _ = attention(q, k, v, compute=torch.float64)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-9 * max(1, size / 1e3))


def test_order_of_tiles_does_not_matter_much():
    """A rising row of logits rescales at every tile, a falling one never."""
    length = 640
    k = torch.zeros(1, length, 1, 32)
    k[0, :, 0, 0] = torch.linspace(-20, 20, length)
    v = Draw(0).normal(1, length, 1, 32)
    q = torch.zeros(1, 1, 1, 32)
    q[..., 0] = 1.0
    spec = AttentionSpec(softmax_scale=1.0)
    rising, _ = attention(q, k, v, spec)
    falling, _ = attention(q, k.flip(1), v.flip(1), spec)
    torch.testing.assert_close(rising, falling, rtol=0, atol=1e-6)
