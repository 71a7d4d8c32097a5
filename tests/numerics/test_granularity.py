"""Scale shapes, the largest value of each group, and the words for granularities."""

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.numerics.granularity import (
    PerBlock,
    PerChannel,
    PerHead,
    PerTensor,
    PerToken,
    parse_granularity,
)
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw

SHAPES = [
    (PerTensor(), (), ()),
    (PerTensor(), (5, 7), ()),
    (PerTensor(), (0, 7), ()),
    (PerHead(), (3, 8), (3,)),
    (PerHead(), (2, 9, 3, 8), (3,)),
    (PerHead(), (0, 3, 8), (3,)),
    (PerHead(), (2, 0, 8), (0,)),
    (PerToken(), (8,), ()),
    (PerToken(), (5, 8), (5,)),
    (PerToken(), (2, 5, 3, 8), (2, 5, 3)),
    (PerToken(), (5, 0), (5,)),
    (PerChannel(), (6, 8), (6,)),
    (PerChannel(), (2, 6, 8), (2, 6)),
    (PerBlock(128, 128), (256, 384), (2, 3)),
    (PerBlock(128, 128), (257, 1), (3, 1)),
    (PerBlock(1, 128), (3, 200), (3, 2)),
    (PerBlock(4, 4), (2, 5, 4, 9), (2, 5, 1, 3)),
    (PerBlock(4, 4), (0, 9), (0, 3)),
    (PerBlock(4, 4), (9, 0), (3, 0)),
]


@pytest.mark.parametrize(("granularity", "shape", "scale_shape"), SHAPES, ids=str)
def test_scale_shapes(granularity, shape, scale_shape):
    granularity.check(shape)
    assert granularity.scale_shape(shape) == scale_shape
    assert tuple(granularity.reduce_max(torch.ones(shape)).shape) == scale_shape


@pytest.mark.parametrize(("granularity", "shape", "scale_shape"), SHAPES, ids=str)
def test_expand_broadcasts_to_the_tensor(granularity, shape, scale_shape):
    expanded = granularity.expand(torch.ones(scale_shape), shape)
    assert torch.broadcast_shapes(expanded.shape, shape) == torch.Size(shape)


GRANULARITIES = st.one_of(
    st.sampled_from([PerTensor(), PerHead(), PerToken(), PerChannel()]),
    st.builds(PerBlock, st.integers(1, 70), st.integers(1, 70)),
)
SIZES = st.sampled_from([0, 1, 2, 5, 63, 65])


@hypothesis.given(
    granularity=GRANULARITIES,
    shape=st.lists(SIZES, min_size=2, max_size=4).filter(lambda s: math.prod(s) < 30_000),
)
def test_reduce_and_expand_agree_on_the_groups(granularity, shape):
    """Marking each group with its number, every element sees its own group's number as maximum."""
    scale_shape = granularity.scale_shape(tuple(shape))
    numbers = torch.arange(math.prod(scale_shape), dtype=torch.float32).reshape(scale_shape)
    marked = granularity.expand(numbers, tuple(shape)).broadcast_to(shape)
    if 0 not in shape:
        assert torch.equal(granularity.reduce_max(marked), numbers)
    # A value is never larger than its group's maximum, and every maximum is reached.
    x = Draw(len(shape)).normal(*shape).abs()
    largest = granularity.reduce_max(x)
    assert (x <= granularity.expand(largest, tuple(shape))).all()
    assert set(largest.flatten().tolist()) <= set(x.flatten().tolist()) | {0.0}


def test_partial_blocks_take_nothing_from_their_neighbours():
    x = torch.zeros(5, 7)
    x[4, 6] = 9.0
    x[0, 0] = 3.0
    expected = [[3.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 9.0]]
    assert PerBlock(2, 3).reduce_max(x).tolist() == expected


def test_blocks_of_a_weight_by_hand():
    x = torch.arange(24.0).reshape(4, 6)
    assert PerBlock(2, 4).reduce_max(x).tolist() == [[9.0, 11.0], [21.0, 23.0]]
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    expanded = PerBlock(2, 4).expand(scale, (4, 6))
    assert expanded[0].tolist() == [1, 1, 1, 1, 2, 2]
    assert expanded[3].tolist() == [3, 3, 3, 3, 4, 4]


def test_heads_share_a_scale_across_batch_and_tokens():
    x = torch.zeros(2, 3, 4, 5)
    x[1, 2, 3, 4] = 7.0
    x[0, 0, 1, 0] = 2.0
    assert PerHead().reduce_max(x).tolist() == [0.0, 2.0, 0.0, 7.0]


@pytest.mark.parametrize("granularity", [PerHead(), PerToken(), PerBlock(2, 2)], ids=str)
def test_strided_tensors(granularity):
    x = Draw(0).normal(6, 5, 7).abs()
    assert_same_bits(
        granularity.reduce_max(x.transpose(0, 2)),
        granularity.reduce_max(x.transpose(0, 2).contiguous()),
    )


@hypothesis.given(GRANULARITIES)
def test_words_round_trip(granularity):
    assert parse_granularity(str(granularity)) == granularity


@pytest.mark.parametrize(
    ("text", "granularity"),
    [
        ("tensor", PerTensor()),
        ("head", PerHead()),
        ("token", PerToken()),
        ("channel", PerChannel()),
        ("block 128x64", PerBlock(128, 64)),
        ("block 999999x1", PerBlock(999999, 1)),
    ],
)
def test_words(text, granularity):
    assert parse_granularity(text) == granularity
    assert str(granularity) == text


@pytest.mark.parametrize(
    "text", ["", "row", "Tensor", "block", "block 128", "block 128x", "block -1x2", "block 1x2x3"]
)
def test_unknown_words_are_told_the_known_ones(text):
    with pytest.raises(ConfigError) as error:
        parse_granularity(text)
    expected = "one of tensor, head, token, channel, block ROWSxCOLUMNS; got"
    assert f"{expected} {text!r}" in str(error.value)


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 0), (-1, 4)])
def test_blocks_have_a_size(rows, columns):
    with pytest.raises(ConfigError, match=f"at least 1x1, got {rows}x{columns}"):
        PerBlock(rows, columns)
    if rows >= 0:
        with pytest.raises(ConfigError, match="at least 1x1"):
            parse_granularity(f"block {rows}x{columns}")


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [(PerHead(), (8,)), (PerToken(), ()), (PerChannel(), ()), (PerBlock(1, 1), (8,))],
    ids=str,
)
def test_too_few_dimensions(granularity, shape):
    message = f"granularity {granularity} needs a tensor of {granularity.min_dims} or more"
    for call in (granularity.check, granularity.scale_shape):
        with pytest.raises(ConfigError) as error:
            call(shape)
        assert message in str(error.value)
        assert f"got shape {list(shape)}" in str(error.value)
    with pytest.raises(ConfigError, match="dimensions"):
        granularity.reduce_max(torch.ones(shape))


def test_granularities_are_values():
    assert PerBlock(2, 3) == PerBlock(2, 3)
    assert PerBlock(2, 3) != PerBlock(3, 2)
    assert PerToken() != PerChannel()
    assert len({PerTensor(), PerTensor(), PerHead(), PerToken(), PerChannel()}) == 4
