"""DecoderAttention: what it stores, and what it counts on the way."""

import pytest
import torch

from octavo.layers.decoder_attention import DecoderAttention
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3, E5M2, format_of
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.testing.cases import PagedCase
from octavo.testing.inputs import Draw, make_paged_view

SLOTS = torch.tensor([3, -1, 70])


def append(case, *, counts_saturation=True):
    """A layer over a view of a case, after keys and values of three tokens."""
    view = make_paged_view(case)
    is_fp8 = case.dtype.itemsize == 1
    has_scales = is_fp8 and not isinstance(case.granularity, PerToken)
    scales = {"key_scale": view.key_scale, "value_scale": view.value_scale} if has_scales else {}
    layer = DecoderAttention(
        case.num_heads,
        case.num_kv_heads,
        AttentionSpec(),
        dtype=case.dtype if is_fp8 else None,
        granularity=case.granularity,
        counts_saturation=counts_saturation,
        **scales,
    )
    key, value = Draw(0).normal(2, 3, case.num_kv_heads, case.head_dim, dtype=torch.bfloat16)
    if has_scales:
        key = key * (view.key_scale.view(-1, 1) * format_of(case.dtype).max)
    key[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    key[1] = torch.inf  # padding
    layer.append(view, key, value, SLOTS)
    layer.append(view, key, value, SLOTS)
    return layer, view, key


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_values_beyond_the_range_are_counted(fmt, granularity):
    layer, view, key = append(PagedCase(dtype=fmt.dtype, granularity=granularity))
    step = 2.0 ** -(fmt.mantissa_bits + 2)
    limit = view.key_scale.view(-1, 1) * fmt.max
    expected = 2 * int((key[[0, 2]].abs() > limit * (1 + step)).sum())
    assert layer.saturated.tolist() == [expected, 0]
    assert expected > 2 * 2


@pytest.mark.parametrize(
    ("case", "counts_saturation"),
    [
        (PagedCase(), False),
        (PagedCase(granularity=PerToken()), True),
        (PagedCase(dtype=torch.bfloat16), True),
    ],
    ids=str,
)
def test_nothing_is_counted(case, counts_saturation):
    layer, _, _ = append(case, counts_saturation=counts_saturation)
    assert layer.saturated.tolist() == [0, 0]
