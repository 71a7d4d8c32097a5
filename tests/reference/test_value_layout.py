"""The transposed layout of values: its order spelled out, and back again."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.numerics.value_layout import check_value_layout, columns_of_keys, num_columns
from octavo.reference.qkv import restore_values, transpose_values
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import cumulative

LENGTHS = [(1, 63, 0, 65), (), (0, 0), (16, 16), (15, 17, 1, 1, 1, 33)]
CPU = torch.device("cpu")


def test_the_order_inside_16_keys():
    columns = columns_of_keys(32, None, CPU).tolist()
    for t in range(4):
        for g in range(2):
            for e in range(2):
                assert columns[8 * g + 2 * t + e] == 4 * t + 2 * g + e
                assert columns[16 + 8 * g + 2 * t + e] == 16 + 4 * t + 2 * g + e


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_sequences_are_aligned_and_apart(lengths):
    cu_seqlens = cumulative(lengths)
    columns = columns_of_keys(sum(lengths), cu_seqlens, CPU)
    assert len(columns.unique()) == sum(lengths)
    assert (columns < num_columns(sum(lengths), len(lengths))).all()
    owners = {}
    for i, start in enumerate(cu_seqlens[:-1].tolist()):
        for group in (columns[start : start + lengths[i]] // 16).unique().tolist():
            assert owners.setdefault(group, i) == i
        if lengths[i]:
            assert columns[start] % 16 == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("num_keys", [0, 1, 63, 64])
@pytest.mark.parametrize("batch", [0, 2])
def test_dense_values_come_back(batch, num_keys, dtype):
    v = torch.randn(batch, num_keys, 3, 8).to(dtype)
    transposed = transpose_values(v)
    assert transposed.shape == (batch, 3, 8, num_columns(num_keys))
    assert_same_bits(restore_values(transposed, num_keys), v)
    assert float(transposed.float().abs().sum()) == pytest.approx(float(v.float().abs().sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_values_come_back(lengths, dtype):
    v = torch.randn(sum(lengths), 2, 8).to(dtype)
    cu_seqlens = cumulative(lengths)
    transposed = transpose_values(v, cu_seqlens)
    assert transposed.shape == (2, 8, num_columns(len(v), len(lengths)))
    assert_same_bits(restore_values(transposed, len(v), cu_seqlens), v)
    assert float(transposed.float().abs().sum()) == pytest.approx(float(v.float().abs().sum()))


def test_tokens_after_the_last_sequence_are_left_out():
    v, cu_seqlens = torch.ones(40, 1, 4), cumulative((3, 20))
    assert float(transpose_values(v, cu_seqlens).sum()) == 23 * 4


def test_a_layout_that_does_not_exist():
    check_value_layout("rows")
    check_value_layout("transposed")
    with pytest.raises(ConfigError, match="rows or transposed, got 'columns'"):
        check_value_layout("columns")
