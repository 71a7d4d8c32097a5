"""Appending to pages, gathering them, and attention over them."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.cache.view import PagedView, joint_pages, token_major_pages
from octavo.errors import ConfigError
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3, E5M2, is_fp8
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import dequantize, quantize, saturating_cast
from octavo.reference.attention import attend_sequence, attention
from octavo.reference.paged import append_kv, gather_kv, paged_attention
from octavo.reference.softmax import kernel_rounding
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import PagedCase
from octavo.testing.inputs import Draw, cumulative, make_paged_view, make_prefill_inputs

PAGE_SIZES = [16, 32, 64, 128]
GRANULARITIES = [PerTensor(), PerHead(), PerToken()]
# Pages of every kind: dtype, granularity.
CONTENTS = [
    *((fmt.dtype, granularity) for fmt in (E4M3, E5M2) for granularity in GRANULARITIES),
    *((dtype, PerTensor()) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
]


def draw_kv(case: PagedCase, num_tokens: int, seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    draw = Draw(seed)
    shape = (num_tokens, case.num_kv_heads, case.head_dim)
    return draw.normal(*shape), draw.normal(*shape)


def token_slots(view: PagedView, sequence: int, positions: torch.Tensor) -> torch.Tensor:
    return view.slots(torch.full_like(positions, sequence), positions)


def dequantized_kv(view: PagedView, sequence: int, dtype=torch.float64):
    """The keys and values of a sequence, [length, heads, head_dim], as numbers."""
    k, v, k_scale, v_scale = gather_kv(view, sequence)
    granularity = view.scale_granularity
    return dequantize(k, k_scale, granularity, dtype), dequantize(v, v_scale, granularity, dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(-1).view(torch.uint8)


def snapshot(view: PagedView) -> list[torch.Tensor]:
    tensors = (view.key_pages, view.value_pages, view.key_scale, view.value_scale)
    return [bits(x).clone() for x in (*tensors, view.page_table, view.lengths)]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("dtype", "granularity"), CONTENTS, ids=str)
@pytest.mark.parametrize("layout", ["head_major", "token_major"])
def test_what_is_appended_is_gathered(page_size, dtype, granularity, layout):
    lengths = (0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size + 3)
    case = PagedCase(
        lengths=lengths,
        page_size=page_size,
        num_kv_heads=3,
        head_dim=40,
        dtype=dtype,
        granularity=granularity,
        layout=layout,
    )
    view = make_paged_view(case)
    for sequence, length in enumerate(lengths):
        key, value = draw_kv(case, length, seed=sequence)
        append_kv(view, key, value, token_slots(view, sequence, torch.arange(length)))
    for sequence, length in enumerate(lengths):
        key, value = draw_kv(case, length, seed=sequence)
        k, v, k_scale, v_scale = gather_kv(view, sequence)
        for x, data, scale in ((key, k, k_scale), (value, v, v_scale)):
            assert data.shape == x.shape
            if not is_fp8(dtype):
                assert_same_bits(data, x.to(dtype))
                continue
            if isinstance(granularity, PerToken):
                expected = quantize(x, PerToken(), E4M3 if dtype == E4M3.dtype else E5M2)
                assert_same_bits(scale, expected.scale)
            else:
                expected = quantize(
                    x, granularity, E4M3 if dtype == E4M3.dtype else E5M2, scale=scale
                )
            assert_same_bits(data, expected.data)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_a_token_is_written_nowhere_else(granularity):
    case = PagedCase(lengths=(70, 3), granularity=granularity, num_kv_heads=2, head_dim=8)
    view = make_paged_view(case)
    before = snapshot(view)
    key, value = draw_kv(case, 1)
    slot = token_slots(view, 0, torch.tensor([69]))
    append_kv(view, key, value, slot)
    page, offset = divmod(int(slot), view.page_size)
    for old, new in zip(before[:2], (view.key_pages, view.value_pages), strict=True):
        changed = (old != bits(new)).nonzero()
        assert set(map(tuple, changed[:, [0, 2]].tolist())) == {(page, offset)}
    for old, new in zip(before[2:4], (view.key_scale, view.value_scale), strict=True):
        is_changed = not torch.equal(old, bits(new))
        assert is_changed == isinstance(granularity, PerToken)
    assert torch.equal(before[4], bits(view.page_table))
    assert torch.equal(before[5], bits(view.lengths))


def test_negative_slots_are_padding():
    case = PagedCase(lengths=(20,), granularity=PerToken())
    view, other = make_paged_view(case), make_paged_view(case)
    key, value = draw_kv(case, 5)
    slots = token_slots(view, 0, torch.arange(3))
    padded = torch.stack([slots[0], torch.tensor(-1), slots[1], torch.tensor(-64), slots[2]])
    append_kv(view, key, value, padded)
    append_kv(other, key[[0, 2, 4]], value[[0, 2, 4]], slots)
    for ours, theirs in zip(snapshot(view), snapshot(other), strict=True):
        assert torch.equal(ours, theirs)
    before = snapshot(view)
    append_kv(view, key, value, torch.full((5,), -1))
    append_kv(view, key[:0], value[:0], slots[:0])
    for ours, theirs in zip(snapshot(view), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("head_dim", [1, 3])
@pytest.mark.parametrize(("dtype", "granularity"), CONTENTS, ids=str)
def test_no_tokens(dtype, granularity, head_dim):
    case = PagedCase(
        lengths=(0, 2), num_kv_heads=2, head_dim=head_dim, dtype=dtype, granularity=granularity
    )
    view = make_paged_view(case)
    before = snapshot(view)
    for slots in (torch.arange(0), torch.full((3,), -1)):
        key, value = draw_kv(case, len(slots))
        append_kv(view, key, value, slots)
    for x, y in zip(before, snapshot(view), strict=True):
        assert_same_bits(x, y)
    k, v, _, _ = gather_kv(view, 0)
    assert k.shape == v.shape == (0, 2, head_dim) and k.dtype == v.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_foreign_pages_are_written_in_place(dtype):
    """vLLM's [page, token, head, dim], and keys and values in one page: no copies."""
    shape = (4, 16, 3, 24)
    foreign_key, foreign_value = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    joint = torch.zeros(4, 3, 16, 48, dtype=dtype)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    rest = {
        "key_scale": torch.tensor(0.01),
        "value_scale": torch.tensor(0.02),
        "page_table": table,
        "lengths": torch.tensor([40], dtype=torch.int32),
    }
    if not is_fp8(dtype):
        rest |= {"key_scale": torch.ones(()), "value_scale": torch.ones(())}
    token_major = PagedView(
        token_major_pages(foreign_key), token_major_pages(foreign_value), **rest
    )
    keys, values = joint_pages(joint)
    both = PagedView(keys, values, **rest)
    draw = Draw(0)
    key, value = draw.normal(40, 3, 24), draw.normal(40, 3, 24)
    for view in (token_major, both):
        append_kv(view, key, value, token_slots(view, 0, torch.arange(40)))

    def stored(x, scale):
        return saturating_cast(x / scale) if is_fp8(dtype) else x.to(dtype)

    k, v = stored(key, rest["key_scale"]), stored(value, rest["value_scale"])
    in_order = [2] * 16 + [0] * 16 + [3] * 8
    for token, page in enumerate(in_order):
        assert_same_bits(foreign_key[page, token % 16], k[token])
        assert_same_bits(foreign_value[page, token % 16], v[token])
        assert_same_bits(joint[page, :, token % 16, :24], k[token])
        assert_same_bits(joint[page, :, token % 16, 24:], v[token])
    for view in (token_major, both):
        assert_same_bits(gather_kv(view, 0)[0], k)
        assert_same_bits(gather_kv(view, 0)[1], v)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_token_stays_its_own_problem(bad):
    case = PagedCase(lengths=(20,), granularity=PerToken(), num_kv_heads=2, head_dim=8)
    view = make_paged_view(case)
    key, value = draw_kv(case, 3)
    key[1, 0, 0] = bad
    append_kv(view, key, value, token_slots(view, 0, torch.arange(3)))
    k, v = dequantized_kv(view, 0, torch.float32)
    assert k.isfinite().all() == (bad == math.inf)
    assert k[[0, 2]].isfinite().all()
    assert v.isfinite().all()
    scale = gather_kv(view, 0)[2]
    assert scale.isfinite().all()


CASES = [
    *(PagedCase(page_size=page_size) for page_size in PAGE_SIZES),
    *(PagedCase(dtype=dtype, granularity=granularity) for dtype, granularity in CONTENTS),
    PagedCase(layout="token_major", granularity=PerToken()),
    PagedCase(lengths=(), q_lens=()),
    PagedCase(lengths=(0, 0), q_lens=(0, 0)),
    PagedCase(lengths=(0, 64, 1), q_lens=(1, 1, 1), has_sinks=True),
    PagedCase(lengths=(2, 65, 130), q_lens=(2, 2, 2)),
    PagedCase(lengths=(4, 65, 130), q_lens=(4, 4, 4)),
    PagedCase(lengths=(70, 65, 130), q_lens=(70, 0, 33)),
    PagedCase(lengths=(2, 3), q_lens=(5, 1)),
    PagedCase(num_heads=9, num_kv_heads=3, head_dim=72),
    PagedCase(num_heads=7, num_kv_heads=1, head_dim=128),
    PagedCase(spec=AttentionSpec(causal=True, window=20), q_lens=(1, 3, 64, 2, 1)),
    PagedCase(spec=AttentionSpec(causal=True, softcap=3.0, softmax_scale=0.2), has_sinks=True),
    PagedCase(spec=AttentionSpec(), q_lens=(1, 3, 2, 2, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_pages_is_attention_over_what_they_hold(case):
    inputs = make_prefill_inputs(case, dtype=torch.float32)
    view = inputs["view"]
    inputs.pop("max_seqlen_q")
    out, lse = paged_attention(**inputs, compute=torch.float64)
    assert out.shape == inputs["q"].shape
    for sequence, (start, stop) in enumerate(pairwise(cumulative(case.q_lens).tolist())):
        k, v = dequantized_kv(view, sequence)
        true_out, true_lse = attention(
            inputs["q"][None, start:stop],
            k[None],
            v[None],
            case.spec,
            sinks=inputs["sinks"],
            compute=torch.float64,
        )
        torch.testing.assert_close(out[start:stop], true_out[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[start:stop], true_lse[0], rtol=0, atol=1e-11)
    single, _ = paged_attention(**inputs)
    torch.testing.assert_close(single.double(), out, rtol=0, atol=5e-6)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_fp8_queries_round_as_in_dense_attention(granularity):
    case = PagedCase(lengths=(70, 130), q_lens=(70, 5), granularity=granularity)
    inputs = make_prefill_inputs(case, dtype=E4M3.dtype)
    view, spec = inputs["view"], inputs["spec"]
    rounding = kernel_rounding(E4M3.dtype, spec)
    inputs.pop("max_seqlen_q")
    out, lse = paged_attention(**inputs, rounding=rounding)
    for sequence, queries in enumerate((slice(0, 70), slice(70, 75))):
        k, v, k_scale, v_scale = gather_kv(view, sequence)
        scales = QkvScales(inputs["q_scale"], k_scale, v_scale)
        expected = attend_sequence(inputs["q"][queries], k, v, spec, scales, rounding=rounding)
        assert_same_bits(out[queries], expected[0])
        assert_same_bits(lse[queries], expected[1])


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("chunks", [(100, 97), (64, 64, 69), (1, 195, 1)], ids=str)
def test_a_prefill_in_chunks_is_one_prefill(chunks, granularity):
    total = sum(chunks)
    case = PagedCase(
        lengths=(total,), q_lens=(total,), granularity=granularity, spec=AttentionSpec(causal=True)
    )
    inputs = make_prefill_inputs(case, dtype=torch.float32)
    view, q = inputs["view"], inputs["q"]
    whole, whole_lse = paged_attention(q, view, inputs["cu_seqlens_q"], compute=torch.float64)
    start = 0
    for chunk in chunks:
        now = replace(view, lengths=torch.tensor([start + chunk], dtype=torch.int32))
        part, part_lse = paged_attention(
            q[start : start + chunk], now, cumulative((chunk,)), compute=torch.float64
        )
        torch.testing.assert_close(part, whole[start : start + chunk], rtol=0, atol=1e-13)
        torch.testing.assert_close(part_lse, whole_lse[start : start + chunk], rtol=0, atol=1e-12)
        start += chunk


@pytest.mark.parametrize("num_new", [1, 2, 3, 4])
def test_decoding_goes_on_where_the_prompt_ended(num_new):
    """Append and decode, step by step, against attention over everything at once."""
    length, steps = 61, 3
    case = PagedCase(lengths=(length + steps * num_new,), dtype=torch.float32)
    view = make_paged_view(case)
    total = length + steps * num_new
    key, value = draw_kv(case, total)
    q = Draw(1).normal(total, 4, 64)
    append_kv(view, key[:length], value[:length], token_slots(view, 0, torch.arange(length)))
    spec = AttentionSpec(causal=True)
    truth, _ = attention(q[None], key[None], value[None], spec, compute=torch.float64)
    for step in range(steps):
        new = torch.arange(length + step * num_new, length + (step + 1) * num_new)
        append_kv(view, key[new], value[new], token_slots(view, 0, new))
        now = replace(view, lengths=torch.tensor([int(new[-1]) + 1], dtype=torch.int32))
        out, _ = paged_attention(q[new], now, cumulative((num_new,)), compute=torch.float64)
        torch.testing.assert_close(out, truth[0, new], rtol=0, atol=1e-13)


def test_pages_may_be_shared():
    """Two sequences with one prefix: the same page twice in the table."""
    spec = CacheSpec(num_layers=1, num_kv_heads=2, head_dim=16, page_size=16, dtype=torch.float32)
    storage = PagedStorage(spec, 3, "cpu")
    table = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
    view = storage.view(0, table, torch.tensor([20, 20], dtype=torch.int32))
    draw = Draw(0)
    key = draw.normal(24, 2, 16)
    first = token_slots(view, 0, torch.arange(20))
    second = token_slots(view, 1, torch.arange(16, 20))
    append_kv(view, key, key, torch.cat([first, second]))
    one, two = gather_kv(view, 0)[0], gather_kv(view, 1)[0]
    assert_same_bits(one, key[:20])
    assert_same_bits(two, torch.cat([key[:16], key[20:]]))


def test_a_length_beyond_the_page_table_is_an_error():
    view = make_paged_view(PagedCase(lengths=(64,), q_lens=(1,)))
    room = view.max_pages * view.page_size
    too_long = replace(view, lengths=torch.tensor([room + 1], dtype=torch.int32))
    with pytest.raises(ConfigError, match=f"at most {room} tokens.*got a length of {room + 1}"):
        gather_kv(too_long, 0)


@pytest.mark.parametrize("ends", [(1, 3), (0, 5, 3, 6), (0, 3, 7)], ids=str)
def test_queries_must_lie_within_q(ends):
    case = PagedCase(lengths=(64,) * (len(ends) - 1), q_lens=(2,) * (len(ends) - 1))
    view = make_paged_view(case)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ConfigError, match="cu_seqlens_q to rise from 0 to at most 6, got"):
        paged_attention(torch.zeros(6, 4, 64), view, cu_seqlens)


def test_a_slot_beyond_the_cache_is_an_error():
    view = make_paged_view(PagedCase(lengths=(64,), q_lens=(1,)))
    key, value = draw_kv(PagedCase(), 1)
    with pytest.raises(IndexError):
        append_kv(view, key, value, torch.tensor([view.num_pages * view.page_size]))
