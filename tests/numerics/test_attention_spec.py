"""AttentionSpec as a value and as text; QkvScales and Packing."""

import math
from dataclasses import FrozenInstanceError, fields

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.numerics.attention import AttentionSpec, Packing, parse_spec
from octavo.numerics.qkv import QkvScales

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
SIZE = st.none() | st.integers(1, 2**30)
SPECS = st.builds(
    AttentionSpec,
    causal=st.booleans(),
    window=SIZE,
    softcap=st.none() | POSITIVE,
    softmax_scale=st.none() | POSITIVE,
    promote_every=SIZE,
)


def test_a_window_that_kernels_cannot_count():
    with pytest.raises(ConfigError, match="at most 1073741824, got 2147483647: leave it out"):
        AttentionSpec(window=2**31 - 1)


@hypothesis.given(SPECS)
def test_text_round_trip(spec):
    assert parse_spec(str(spec)) == spec
    assert hash(parse_spec(str(spec))) == hash(spec)


@hypothesis.given(SPECS, SPECS)
def test_text_is_as_different_as_the_specs(one, other):
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (AttentionSpec(), ""),
        (AttentionSpec(causal=True, window=128), "causal=True window=128"),
        (AttentionSpec(promote_every=None), "promote_every=None"),
        (AttentionSpec(softcap=1e-320), "softcap=1e-320"),
        (AttentionSpec(softmax_scale=0.1, softcap=30), "softcap=30.0 softmax_scale=0.1"),
    ],
)
def test_text_names_what_is_not_default(spec, text):
    assert str(spec) == text
    assert parse_spec(text) == spec


@pytest.mark.parametrize("number", [np.float64(0.125), np.float32(0.125), 1, True])
def test_numbers_of_other_kinds_travel_too(number):
    """Model configurations hold numpy numbers; their repr() is not a literal."""
    spec = AttentionSpec(softmax_scale=number, softcap=number)
    assert parse_spec(str(spec)) == spec
    assert spec.scale_for(64) == float(number)


@pytest.mark.parametrize("number", [np.int64(7), np.int32(7)])
def test_integers_of_other_kinds_travel_too(number):
    spec = AttentionSpec(window=number, promote_every=number)
    assert parse_spec(str(spec)) == AttentionSpec(window=7, promote_every=7)


@pytest.mark.parametrize("head_dim", [32, 64, 72, 128])
def test_the_scale_of_logits(head_dim):
    assert AttentionSpec().scale_for(head_dim) == pytest.approx(1 / math.sqrt(head_dim), rel=1e-15)
    assert AttentionSpec(softmax_scale=0.3).scale_for(head_dim) == 0.3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 0}, "window must be an integer of at least 1 or None, got 0"),
        ({"window": -3}, "window must be an integer of at least 1 or None, got -3"),
        ({"promote_every": 0}, "promote_every must be an integer of at least 1 or None, got 0"),
        ({"softcap": 0.0}, "softcap must be a positive finite number or None, got 0.0"),
        ({"softcap": -1.0}, "softcap must be"),
        ({"softcap": math.inf}, "softcap must be a positive finite number or None, got inf"),
        ({"softcap": math.nan}, "softcap must be"),
        ({"softmax_scale": 0.0}, "softmax_scale must be a positive finite number"),
        ({"softmax_scale": math.nan}, "softmax_scale must be"),
        ({"exponentials": "fast"}, "exponentials must be 'codes', 'exact' or None, got 'fast'"),
        ({"window": 2.5}, "window must be an integer"),
        ({"promote_every": 1.0}, "promote_every must be an integer"),
        ({"window": "128"}, "window must be an integer"),
    ],
    ids=str,
)
def test_values_out_of_range(wrong, message):
    with pytest.raises(ConfigError, match=message):
        AttentionSpec(**wrong)


def test_a_spec_is_frozen():
    with pytest.raises(FrozenInstanceError):
        AttentionSpec().causal = True


def test_one_level_is_never_the_default():
    assert AttentionSpec().promote_every == 1
    assert {field.name for field in fields(AttentionSpec)} == {
        "causal",
        "window",
        "softcap",
        "softmax_scale",
        "promote_every",
        "exponentials",
    }


def test_scales_of_what_is_not_quantized():
    scales = QkvScales.ones()
    for scale in (scales.q, scales.k, scales.v):
        assert (scale.dtype, scale.dim(), float(scale)) == (torch.float32, 0, 1.0)
    assert QkvScales.ones("meta").q.device.type == "meta"


def test_packing_of_the_same_tokens():
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    packing = Packing.same(ends, 3)
    assert packing.cu_seqlens_q is packing.cu_seqlens_k is ends
    assert (packing.max_seqlen_q, packing.max_seqlen_k) == (3, 3)
