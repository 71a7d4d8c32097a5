"""PagedView: shapes, slots, zero-copy views of foreign pages, and checks that never read data."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from octavo.cache.view import PagedView, joint_pages, token_major_pages
from octavo.errors import ConfigError
from octavo.numerics.granularity import PerHead, PerTensor, PerToken

FP8 = torch.float8_e4m3fn


def make_view(
    num_pages: int = 5,
    num_kv_heads: int = 3,
    page_size: int = 16,
    head_dim: int = 8,
    dtype: torch.dtype = FP8,
    scale_shape: tuple[int, ...] = (),
    num_sequences: int = 2,
    max_pages: int = 4,
    device: str = "cpu",
) -> PagedView:
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    return PagedView(
        key_pages=torch.zeros(shape, dtype=dtype, device=device),
        value_pages=torch.zeros(shape, dtype=dtype, device=device),
        key_scale=torch.ones(scale_shape, device=device),
        value_scale=torch.ones(scale_shape, device=device),
        page_table=torch.zeros(num_sequences, max_pages, dtype=torch.int32, device=device),
        lengths=torch.zeros(num_sequences, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_sizes_are_read_off_the_tensors(page_size: int, num_kv_heads: int) -> None:
    view = make_view(num_kv_heads=num_kv_heads, page_size=page_size)
    assert (view.num_pages, view.num_kv_heads, view.page_size, view.head_dim) == (
        5,
        num_kv_heads,
        page_size,
        8,
    )
    assert (view.num_sequences, view.max_pages) == (2, 4)
    assert (view.dtype, view.device, view.is_fp8) == (FP8, torch.device("cpu"), True)


@pytest.mark.parametrize(("num_pages", "num_sequences", "max_pages"), [(0, 0, 0), (1, 1, 1)])
def test_smallest_views(num_pages: int, num_sequences: int, max_pages: int) -> None:
    view = make_view(num_pages=num_pages, num_sequences=num_sequences, max_pages=max_pages)
    assert (view.num_pages, view.num_sequences, view.max_pages) == (
        num_pages,
        num_sequences,
        max_pages,
    )


@pytest.mark.parametrize(
    ("scale_shape", "granularity"),
    [((), PerTensor()), ((3,), PerHead()), ((5, 3, 16), PerToken())],
    ids=str,
)
def test_scale_granularity_follows_from_the_shape(scale_shape, granularity) -> None:
    assert make_view(scale_shape=scale_shape).scale_granularity == granularity


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_pages_have_scalar_scales(dtype: torch.dtype) -> None:
    assert not make_view(dtype=dtype).is_fp8
    with pytest.raises(ConfigError, match=r"scales that are both \[\], got \[3\]"):
        make_view(dtype=dtype, scale_shape=(3,))


def test_the_same_pages_for_another_batch() -> None:
    view = make_view(scale_shape=(3,))
    table, lengths = torch.ones(4, 7, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    other = view.for_batch(table, lengths)
    expected = replace(view, page_table=table, lengths=lengths)
    assert [x.data_ptr() for x in other.tensors] == [x.data_ptr() for x in expected.tensors]
    assert (other.num_sequences, view.num_sequences) == (4, 2)
    with pytest.raises(FrozenInstanceError):
        other.lengths = lengths  # type: ignore[misc]
    for wrong in (
        (table.long(), lengths),
        (table[0], lengths),
        (table, lengths[:3]),
        (table.T.contiguous().T, lengths),
        (table.to("meta"), lengths),
        (table, lengths.to("meta")),
    ):
        with pytest.raises(ConfigError, match="expected"):
            view.for_batch(*wrong)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
def test_slots_by_hand(page_size: int, index_dtype: torch.dtype) -> None:
    view = make_view(page_size=page_size, num_pages=12, max_pages=2)
    view.page_table.copy_(torch.tensor([[7, 2], [0, 11]]))
    sequence_ids = torch.tensor([0, 0, 0, 1, 1], dtype=index_dtype)
    positions = torch.tensor([0, page_size - 1, page_size, 1, 2 * page_size - 1], dtype=index_dtype)
    slots = view.slots(sequence_ids, positions)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [
        7 * page_size,
        7 * page_size + page_size - 1,
        2 * page_size,
        1,
        11 * page_size + page_size - 1,
    ]


def test_slots_address_every_token_once() -> None:
    view = make_view(num_pages=8, num_sequences=2, max_pages=4)
    view.page_table.copy_(torch.randperm(8).view(2, 4))
    sequence_ids = torch.arange(2).repeat_interleave(64)
    slots = view.slots(sequence_ids, torch.arange(64).repeat(2))
    assert sorted(slots.tolist()) == list(range(8 * 16))


@pytest.mark.parametrize("padding", [-1, -16, -1000])
def test_padding_has_slot_minus_one(padding: int) -> None:
    view = make_view(max_pages=1)
    slots = view.slots(torch.tensor([0, 1]), torch.tensor([padding, 3]))
    assert slots.tolist() == [-1, 3]


def test_slots_of_no_tokens() -> None:
    empty = torch.empty(0, dtype=torch.int32)
    assert make_view().slots(empty, empty).tolist() == []


def test_slots_do_not_overflow_32_bits() -> None:
    view = make_view(page_size=128, max_pages=1)
    view.page_table.fill_(2**31 - 1)
    zeros = torch.zeros(1, dtype=torch.int32)
    assert view.slots(zeros, zeros).tolist() == [(2**31 - 1) * 128]


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_token_major_pages_alias_the_same_memory(dtype: torch.dtype) -> None:
    foreign = torch.zeros(5, 16, 3, 8, dtype=dtype)
    pages = token_major_pages(foreign)
    assert pages.shape == (5, 3, 16, 8)
    assert pages.data_ptr() == foreign.data_ptr()
    view = replace(make_view(dtype=dtype), key_pages=pages, value_pages=pages)
    view.key_pages[4, 2, 15] = torch.ones(8).to(dtype)
    assert foreign[4, 15, 2].float().tolist() == [1.0] * 8
    assert foreign.float().sum() == 8


def test_as_token_major_is_the_way_back() -> None:
    foreign = torch.randn(5, 16, 3, 8).to(FP8)
    view = replace(make_view(), key_pages=token_major_pages(foreign))
    key, value = view.as_token_major()
    assert (key.data_ptr(), key.stride()) == (foreign.data_ptr(), foreign.stride())
    assert value.shape == (5, 16, 3, 8)
    assert value.data_ptr() == view.value_pages.data_ptr()


def test_joint_pages_alias_the_same_memory() -> None:
    foreign = torch.arange(5 * 3 * 16 * 16).float().view(5, 3, 16, 16)
    key, value = joint_pages(foreign)
    view = replace(make_view(dtype=torch.float32), key_pages=key, value_pages=value)
    assert view.head_dim == 8
    assert torch.equal(torch.cat([key, value], dim=-1), foreign)
    view.value_pages[1, 2, 3] = -1.0
    assert foreign[1, 2, 3].tolist()[8:] == [-1.0] * 8
    assert foreign[1, 2, 3, 7] >= 0


@pytest.mark.parametrize(
    ("function", "shape"),
    [(token_major_pages, (5, 16, 8)), (joint_pages, (3, 16, 16)), (joint_pages, (5, 3, 16, 15))],
    ids=["token-major, no heads", "joint, no heads", "joint, odd width"],
)
def test_foreign_pages_of_another_shape_are_refused(function, shape) -> None:
    with pytest.raises(ConfigError, match=r"expected pages \[page, .*got shape \[\d+, "):
        function(torch.zeros(shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"key_pages": torch.zeros(5, 3, 16, dtype=FP8)},
            r"got \[5, 3, 16\] and \[5, 3, 16, 8\]",
        ),
        (
            {"value_pages": torch.zeros(5, 2, 16, 8, dtype=FP8)},
            r"one shape .*got \[5, 3, 16, 8\] and \[5, 2, 16, 8\]",
        ),
        (
            {"value_pages": torch.zeros(5, 3, 16, 8)},
            r"one dtype.*got torch\.float8_e4m3fn and torch\.float32",
        ),
        (
            {
                "key_pages": torch.zeros(5, 3, 16, 8, dtype=torch.uint8),
                "value_pages": torch.zeros(5, 3, 16, 8, dtype=torch.uint8),
            },
            r"got torch\.uint8 and torch\.uint8: bytes become FP8 by \.view",
        ),
        (
            {"key_pages": torch.zeros(5, 3, 8, 16, dtype=FP8).transpose(2, 3)},
            r"stride 1, got strides \(384, 128, 1, 16\)",
        ),
        (
            {"value_pages": torch.zeros(5, 3, 16, 16, dtype=FP8)[..., ::2]},
            r"stride 1, got strides .* and \(768, 256, 16, 2\)",
        ),
        (
            {"key_scale": torch.ones((), dtype=torch.bfloat16)},
            r"float32 scales, got torch\.bfloat16 and torch\.float32",
        ),
        (
            {"key_scale": torch.ones(3)},
            r"are both \[\] or \[3\] or \[5, 3, 16\], got \[3\] and \[\]",
        ),
        ({"key_scale": torch.ones(2), "value_scale": torch.ones(2)}, r"got \[2\] and \[2\]"),
        (
            {"key_scale": torch.ones(5, 16, 3), "value_scale": torch.ones(5, 16, 3)},
            r"got \[5, 16, 3\]",
        ),
        (
            {"page_table": torch.zeros(2, 4, dtype=torch.int64)},
            r"int32 page_table and lengths, got torch\.int64 and torch\.int32",
        ),
        ({"lengths": torch.zeros(2)}, r"got torch\.int32 and torch\.float32"),
        ({"page_table": torch.zeros(8, dtype=torch.int32)}, r"got \[8\] and \[2\]"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"got \[2, 4\] and \[3\]"),
        ({"lengths": torch.zeros(2, 1, dtype=torch.int32)}, r"got \[2, 4\] and \[2, 1\]"),
        (
            {"page_table": torch.zeros(4, 2, dtype=torch.int32).T},
            r"stride 1, got strides \(1, 2\) and \(1,\)",
        ),
        ({"lengths": torch.zeros(2, 2, dtype=torch.int32)[:, 0]}, r"stride 1, got .* \(2,\)"),
        (
            {"value_scale": torch.ones((), device="meta")},
            r"one device, got .*'value_scale': 'meta', 'page_table': 'cpu'",
        ),
        (
            {"page_table": torch.zeros(2, 4, dtype=torch.int32, device="meta")},
            "one device, got .*'page_table': 'meta'",
        ),
        (
            {"value_pages": torch.zeros(5, 3, 16, 8, dtype=FP8, device="meta")},
            "one device, got .*'value_pages': 'meta'",
        ),
    ],
    ids=range(20),
)
def test_ill_fitting_tensors_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(make_view(), **changes)


def test_a_part_of_a_larger_page_table_is_accepted() -> None:
    buffer = torch.zeros(64, 100, dtype=torch.int32)
    view = replace(make_view(), page_table=buffer[:2, :7])
    assert (view.num_sequences, view.max_pages) == (2, 7)


def test_head_dim_one_may_have_any_stride() -> None:
    pages = torch.zeros(5, 3, 16, 2, dtype=FP8)[..., :1]
    view = replace(make_view(), key_pages=pages.transpose(2, 3).transpose(2, 3), value_pages=pages)
    assert view.head_dim == 1


def test_views_are_built_without_reading_data() -> None:
    view = make_view(device="meta", scale_shape=(3,))  # reading a meta tensor raises
    tokens = torch.zeros(7, dtype=torch.int32, device="meta")
    assert view.slots(tokens, tokens).shape == (7,)


def test_views_are_frozen_and_compare_by_identity() -> None:
    view = make_view()
    assert view == view
    assert view != make_view()
    assert len({view, make_view()}) == 2
    with pytest.raises(FrozenInstanceError):
        view.lengths = torch.zeros(2)  # type: ignore[misc]


def test_views_can_be_built_inside_a_traced_function() -> None:
    view = make_view(num_pages=9, scale_shape=(3,))
    view.page_table.copy_(torch.arange(8).view(2, 4))

    def slots_of(key, value, scale, page_table, lengths, positions):
        inner = PagedView(key, value, scale, scale, page_table, lengths)
        assert isinstance(inner.scale_granularity, PerHead)
        return inner.slots(torch.ones_like(positions), positions)

    arguments = (view.key_pages, view.value_pages, view.key_scale, view.page_table, view.lengths)
    positions = torch.tensor([0, 17, -1])
    traced = torch.compile(slots_of, backend="eager", fullgraph=True)
    assert torch.equal(traced(*arguments, positions), slots_of(*arguments, positions))
