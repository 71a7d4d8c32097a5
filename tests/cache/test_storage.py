"""PagedStorage: real tensors against the spec's byte counts, scales, page copies."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.errors import ConfigError
from octavo.numerics.granularity import PerHead, PerTensor, PerToken

SMALL = CacheSpec(num_layers=3, num_kv_heads=3, head_dim=8, page_size=16)
TOKEN_MAJOR = replace(SMALL, layout="token_major")
PER_HEAD = replace(SMALL, granularity=PerHead(), skip_layers=frozenset({1}))
PER_TOKEN = replace(SMALL, granularity=PerToken(), skip_layers=frozenset({1}))
BF16 = replace(SMALL, dtype=torch.bfloat16)
SPECS = [SMALL, TOKEN_MAJOR, PER_HEAD, PER_TOKEN, BF16]
SPEC_IDS = ["per tensor", "token major", "per head", "per token", "bf16"]


def tables(num_sequences: int = 2, max_pages: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    page_table = torch.zeros(num_sequences, max_pages, dtype=torch.int32)
    return page_table, torch.zeros(num_sequences, dtype=torch.int32)


def fill_with_page_numbers(storage: PagedStorage) -> None:
    """Give every page and every per-token scale values that name layer, page and kind."""
    for layer, page in product(range(storage.spec.num_layers), range(storage.num_pages)):
        storage.key_pages[layer][page] = float(page + 8 * layer)
        storage.value_pages[layer][page] = -float(page + 8 * layer)
        if storage.key_scales[layer].dim() == 3:
            storage.key_scales[layer][page] = 100.0 + page
            storage.value_scales[layer][page] = 200.0 + page


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
@pytest.mark.parametrize("num_pages", [0, 1, 7])
@pytest.mark.parametrize("page_size", [16, 128])
def test_tensors_take_the_bytes_the_spec_promises(spec, num_pages: int, page_size: int) -> None:
    spec = replace(spec, page_size=page_size)
    storage = PagedStorage(spec, num_pages, "cpu")
    tensors = [
        *storage.key_pages,
        *storage.value_pages,
        *storage.key_scales,
        *storage.value_scales,
    ]
    memory = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert memory == storage.nbytes == num_pages * spec.bytes_per_page + spec.scale_bytes
    assert spec.num_pages_in(memory) == num_pages


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_new_storage_is_zero_with_scales_of_one(spec: CacheSpec) -> None:
    storage = PagedStorage(spec, 5, "cpu")
    for layer in range(spec.num_layers):
        for pages in (storage.key_pages[layer], storage.value_pages[layer]):
            assert pages.shape == (5, 3, 16, 8)
            assert pages.dtype == spec.dtype_of(layer)
            assert not pages.float().any()
        for scale in (storage.key_scales[layer], storage.value_scales[layer]):
            assert scale.shape == spec.scale_shape(layer, 5)
            assert scale.dtype == torch.float32
            assert (scale == 1.0).all()


@pytest.mark.parametrize(
    ("spec", "strides"), [(SMALL, (384, 128, 8, 1)), (TOKEN_MAJOR, (384, 8, 24, 1))]
)
def test_layout_decides_the_strides(spec: CacheSpec, strides: tuple[int, ...]) -> None:
    storage = PagedStorage(spec, 5, "cpu")
    assert storage.key_pages[0].stride() == strides
    assert storage.value_pages[2].stride() == strides


def test_token_major_pages_are_contiguous_seen_by_token() -> None:
    key, value = PagedStorage(TOKEN_MAJOR, 5, "cpu").view(0, *tables()).as_token_major()
    assert key.shape == value.shape == (5, 16, 3, 8)
    assert key.is_contiguous()
    assert value.is_contiguous()


def test_layers_keys_and_values_do_not_share_memory() -> None:
    storage = PagedStorage(SMALL, 2, "cpu")
    pages = [*storage.key_pages, *storage.value_pages]
    assert len({tensor.data_ptr() for tensor in pages}) == 6


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_a_view_is_the_storage_itself(spec: CacheSpec) -> None:
    storage = PagedStorage(spec, 5, "cpu")
    page_table, lengths = tables()
    for layer in range(spec.num_layers):
        view = storage.view(layer, page_table, lengths)
        assert view.key_pages is storage.key_pages[layer]
        assert view.value_pages is storage.value_pages[layer]
        assert view.key_scale is storage.key_scales[layer]
        assert view.value_scale is storage.value_scales[layer]
        assert view.is_fp8 == spec.is_fp8(layer)
        expected = spec.granularity if view.is_fp8 else PerTensor()
        assert view.scale_granularity == expected


@pytest.mark.parametrize("layer", [-1, 3])
def test_unknown_layers_are_refused(layer: int) -> None:
    storage = PagedStorage(SMALL, 1, "cpu")
    with pytest.raises(ConfigError, match=rf"layer must be within 0\.\.2, got {layer}"):
        storage.view(layer, *tables())
    with pytest.raises(ConfigError, match=rf"layer must be within 0\.\.2, got {layer}"):
        storage.set_scales(layer, 1.0, 1.0)


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_pages must not be negative, got -1"):
        PagedStorage(SMALL, -1, "cpu")


def test_device_may_be_a_name_or_a_device() -> None:
    assert PagedStorage(SMALL, 1, torch.device("meta")).key_pages[0].device.type == "meta"
    assert PagedStorage(SMALL, 1, "meta").device == torch.device("meta")


def test_static_scales_per_tensor() -> None:
    storage = PagedStorage(SMALL, 2, "cpu")
    storage.set_scales(1, 0.25, torch.tensor(0.5, dtype=torch.float64))
    assert [scale.item() for scale in storage.key_scales] == [1.0, 0.25, 1.0]
    assert [scale.item() for scale in storage.value_scales] == [1.0, 0.5, 1.0]


def test_static_scales_per_head() -> None:
    storage = PagedStorage(PER_HEAD, 2, "cpu")
    key, value = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([4.0, 5.0, 6.0])
    storage.set_scales(0, key, value)
    assert torch.equal(storage.key_scales[0], key)
    assert torch.equal(storage.value_scales[0], value)


def test_static_scales_keep_their_address_and_take_no_gradient() -> None:
    storage = PagedStorage(SMALL, 2, "cpu")
    view = storage.view(0, *tables())
    storage.set_scales(0, torch.nn.Parameter(torch.tensor(0.5)), 0.25)
    assert (view.key_scale.item(), view.value_scale.item()) == (0.5, 0.25)
    assert not storage.key_scales[0].requires_grad


@pytest.mark.parametrize(
    "bad", [0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e39], ids=lambda bad: f"{bad:g}"
)
@pytest.mark.parametrize("name", ["key", "value"])
def test_scales_must_be_positive_and_finite(name: str, bad: float) -> None:
    storage = PagedStorage(SMALL, 2, "cpu")
    scales = {"key": 0.5, "value": 0.5, name: torch.tensor(bad, dtype=torch.float64)}
    with pytest.raises(ConfigError, match=f"the {name} scale of layer 2 must be positive and fin"):
        storage.set_scales(2, **scales)
    assert storage.key_scales[2] == storage.value_scales[2] == 1.0


@pytest.mark.parametrize(
    ("spec", "scale", "message"),
    [
        (SMALL, torch.ones(3), r"must have shape \[\] \(granularity tensor\), got \[3\]"),
        (SMALL, torch.ones(1), r"must have shape \[\] \(granularity tensor\), got \[1\]"),
        (PER_HEAD, torch.ones(4), r"must have shape \[3\] \(granularity head\), got \[4\]"),
        (PER_HEAD, 1.0, r"must have shape \[3\] \(granularity head\), got \[\]"),
        (PER_TOKEN, 1.0, "granularity token scales each token as it is written"),
        (BF16, 1.0, r"layer 0 is stored as torch\.bfloat16, which has no scales"),
    ],
)
def test_scales_of_another_shape_are_refused(spec: CacheSpec, scale, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagedStorage(spec, 2, "cpu").set_scales(0, scale, scale)


def test_skipped_layers_have_no_scales_to_set() -> None:
    with pytest.raises(ConfigError, match=r"layer 1 is stored as torch\.bfloat16"):
        PagedStorage(PER_HEAD, 2, "cpu").set_scales(1, torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("layout", ["head_major", "token_major"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerToken()], ids=str)
def test_copy_pages_copies_every_layer(dtype, layout, granularity) -> None:
    spec = replace(PER_TOKEN, dtype=dtype, layout=layout, granularity=granularity)
    storage = PagedStorage(spec, 6, "cpu")
    fill_with_page_numbers(storage)
    storage.copy_pages([(1, 4), (3, 5)])
    holds = [0, 1, 2, 3, 1, 3]
    for layer, page in product(range(3), range(6)):
        expected = torch.tensor(float(holds[page] + 8 * layer)).to(spec.dtype_of(layer)).float()
        assert (storage.key_pages[layer][page].float() == expected).all()
        assert (storage.value_pages[layer][page].float() == -expected).all()
    if granularity == PerToken():
        assert storage.key_scales[0][:, 2, 15].tolist() == [100.0 + page for page in holds]
        assert storage.value_scales[2][:, 0, 0].tolist() == [200.0 + page for page in holds]


@pytest.mark.parametrize(
    ("pairs", "holds"),
    [
        pytest.param([], [0, 1, 2], id="nothing"),
        pytest.param([(0, 1), (0, 2)], [0, 0, 0], id="one source twice"),
        pytest.param([(0, 1), (1, 2)], [0, 0, 1], id="a chain reads first"),
        pytest.param([(0, 1), (1, 0)], [1, 0, 2], id="a swap"),
        pytest.param([(2, 2)], [0, 1, 2], id="onto itself"),
    ],
)
@pytest.mark.parametrize("spec", [SMALL, BF16], ids=["fp8", "bf16"])
def test_copies_read_before_they_write(spec: CacheSpec, pairs, holds: list[int]) -> None:
    storage = PagedStorage(spec, 3, "cpu")
    fill_with_page_numbers(storage)
    storage.copy_pages(pairs)
    assert storage.key_pages[0][:, 1, 3, 5].float().tolist() == holds


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_copies_keep_every_bit(dtype: torch.dtype) -> None:
    spec = replace(SMALL, dtype=dtype, num_kv_heads=1, head_dim=16)
    storage = PagedStorage(spec, 2, "cpu")
    all_bytes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)  # NaN included
    storage.key_pages[0].view(torch.uint8)[0] = all_bytes
    storage.copy_pages([(0, 1)])
    assert torch.equal(storage.key_pages[0].view(torch.uint8)[1], all_bytes)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1), (3, 2)], "expected page ids below 3, got 3"),
        ([(0, -1)], "expected page ids below 3, got -1"),
        ([(0, 2), (1, 2)], r"expected each destination once, got \[2, 2\]"),
    ],
)
def test_impossible_copies_change_nothing(pairs, message: str) -> None:
    storage = PagedStorage(SMALL, 3, "cpu")
    fill_with_page_numbers(storage)
    with pytest.raises(ConfigError, match=message):
        storage.copy_pages(pairs)
    assert storage.key_pages[0][:, 0, 0, 0].float().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_copies_on_a_gpu(spec: CacheSpec) -> None:
    storage = PagedStorage(spec, 4, "cuda")
    fill_with_page_numbers(storage)
    storage.copy_pages([(1, 2), (2, 3)])
    assert storage.key_pages[0][:, 2, 15, 7].tolist() == [0.0, 1.0, 1.0, 2.0]
