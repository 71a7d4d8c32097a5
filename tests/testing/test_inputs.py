"""Inputs come from their seed alone, with the shapes, dtypes and layouts that a case names."""

import pytest
import torch

from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerBlock, PerHead, PerTensor, PerToken
from octavo.reference.paged import gather_kv
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import AttentionCase, MatmulCase, PackedCase, PagedCase
from octavo.testing.inputs import (
    Draw,
    cumulative,
    make_attention_inputs,
    make_decode_inputs,
    make_matmul_inputs,
    make_packed_inputs,
    make_paged_view,
    make_prefill_inputs,
)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (AttentionCase(), "default"),
        (AttentionCase(q_len=3, kv_len=9), "q_len=3-kv_len=9"),
        (AttentionCase(spec=AttentionSpec(causal=True, window=4)), "spec=causal=Truewindow=4"),
        (PackedCase(q_lens=(1, 2)), "q_lens=(1,2)"),
        (PagedCase(granularity=PerToken()), "granularity=token"),
        (MatmulCase(a=None, b=PerBlock(2, 4)), "a=None-b=block2x4"),
    ],
)
def test_a_case_is_named_by_what_is_special(case, name):
    assert str(case) == name


def test_a_seed_gives_the_same_inputs_again():
    one, two = (make_attention_inputs(AttentionCase(), seed=5) for _ in range(2))
    other = make_attention_inputs(AttentionCase(), seed=6)
    for name in "qkv":
        assert_same_bits(one[name], two[name])
        assert not torch.equal(one[name], other[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3.dtype, E5M2.dtype], ids=str)
def test_dense_inputs(dtype):
    case = AttentionCase(batch=3, q_len=5, kv_len=7, has_sinks=True, has_key_mask=True)
    inputs = make_attention_inputs(case, dtype=dtype, granularity=PerToken())
    assert inputs["q"].shape == (3, 5, 4, 64)
    assert inputs["k"].shape == inputs["v"].shape == (3, 7, 2, 64)
    assert {inputs[name].dtype for name in "qkv"} == {dtype}
    assert inputs["sinks"].shape == (4,)
    assert inputs["key_mask"].shape == (3, 7)
    assert not inputs["key_mask"][-1].any()
    assert inputs["key_mask"][:-1].any()
    if "scales" in inputs:
        shapes = [inputs["scales"].q.shape, inputs["scales"].k.shape, inputs["scales"].v.shape]
        assert shapes == [(4,), (3, 7, 2), (3, 7, 2)]
    assert ("scales" in inputs) == (dtype.itemsize == 1)


def test_packed_inputs():
    inputs = make_packed_inputs(PackedCase(q_lens=(3, 0, 2), kv_lens=(4, 1, 2)))
    assert (len(inputs["q"]), len(inputs["k"])) == (5, 7)
    packing = inputs["packing"]
    assert packing.cu_seqlens_q.tolist() == [0, 3, 3, 5]
    assert packing.cu_seqlens_k.tolist() == [0, 4, 5, 7]
    assert (packing.max_seqlen_q, packing.max_seqlen_k) == (3, 4)
    assert packing.cu_seqlens_q.dtype == torch.int32


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
def test_a_view_holds_the_sequences_and_garbage_elsewhere(granularity):
    case = PagedCase(lengths=(0, 1, 65, 64), granularity=granularity, head_dim=32)
    view = make_paged_view(case)
    assert view.lengths.tolist() == [0, 1, 65, 64]
    used = [
        int(page)
        for row, count in ((1, 1), (2, 2), (3, 1))
        for page in view.page_table[row, :count]
    ]
    assert len(set(used)) == 4
    unused = set(view.page_table.flatten().tolist()) - set(used)
    assert len(unused) == 1
    assert (view.key_pages[unused.pop()].float() == 448).all()
    last = view.key_pages[view.page_table[2, 1]].float()
    assert (last[:, 1:] == 448).all()
    assert not (last[:, 0] == 448).all()
    assert gather_kv(view, 2)[0].shape == (65, 2, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3.dtype], ids=str)
def test_inputs_over_pages(dtype):
    case = PagedCase(lengths=(5, 9), q_lens=(3, 3))
    prefill = make_prefill_inputs(case, dtype=dtype)
    assert prefill["q"].dtype == dtype
    assert prefill["cu_seqlens_q"].tolist() == [0, 3, 6]
    assert ("q_scale" in prefill) == (dtype == E4M3.dtype)
    assert make_decode_inputs(case)["q"].shape == (2, 3, 4, 64)


def test_matmul_inputs():
    inputs = make_matmul_inputs(MatmulCase(a=None, b=PerBlock(64, 64), has_bias=True))
    assert inputs["a"].shape == (63, 192)
    assert inputs["b"].scale.shape == (2, 3)
    assert inputs["bias"].shape == (65,)


def test_wide_values_are_wide():
    x = Draw(0).wide(1000).abs()
    assert x.max() / x.median() > 50
    assert cumulative(()).tolist() == [0]
