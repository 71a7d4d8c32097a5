"""CacheSpec: what it accepts, and its byte counts by hand."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from octavo.cache.spec import CACHE_DTYPES, CacheSpec
from octavo.errors import ConfigError
from octavo.numerics.granularity import PerBlock, PerChannel, PerHead, PerTensor, PerToken

SMALL = CacheSpec(num_layers=4, num_kv_heads=3, head_dim=64)


@pytest.mark.parametrize(
    ("changes", "bytes_per_token"),
    [
        pytest.param({}, 4 * 2 * 3 * 64, id="fp8"),
        pytest.param({"dtype": torch.float8_e5m2}, 4 * 2 * 3 * 64, id="e5m2"),
        pytest.param({"dtype": torch.bfloat16}, 4 * 2 * 3 * 128, id="bf16"),
        pytest.param({"dtype": torch.float32}, 4 * 2 * 3 * 256, id="fp32"),
        pytest.param({"granularity": PerHead()}, 4 * 2 * 3 * 64, id="per head"),
        pytest.param({"granularity": PerToken()}, 4 * 2 * 3 * (64 + 4), id="per token"),
        pytest.param({"skip_layers": frozenset({0})}, 2 * 3 * (3 * 64 + 128), id="one skipped"),
        pytest.param(
            {"skip_layers": frozenset({1, 3}), "granularity": PerToken()},
            2 * 3 * (2 * (64 + 4) + 2 * 128),
            id="skipped layers have no scales",
        ),
        pytest.param(
            {"skip_layers": frozenset({2}), "skip_dtype": torch.float32},
            2 * 3 * (3 * 64 + 256),
            id="skipped in fp32",
        ),
    ],
)
def test_bytes_per_token(changes: dict, bytes_per_token: int) -> None:
    spec = replace(SMALL, **changes)
    assert spec.bytes_per_token == bytes_per_token
    assert spec.bytes_per_page == 64 * bytes_per_token


def test_llama_8b_takes_64_kib_per_token_in_fp8_and_128_in_bf16() -> None:
    spec = CacheSpec(num_layers=32, num_kv_heads=8, head_dim=128)
    assert spec.bytes_per_token == 64 * 1024
    assert replace(spec, dtype=torch.bfloat16).bytes_per_token == 128 * 1024


@pytest.mark.parametrize(
    ("granularity", "skip_layers", "scale_bytes"),
    [
        (PerTensor(), frozenset(), 4 * 2 * 4),
        (PerHead(), frozenset(), 4 * 2 * 3 * 4),
        (PerHead(), frozenset({0, 1}), 2 * 2 * 3 * 4 + 2 * 2 * 4),
        (PerToken(), frozenset(), 0),
        (PerToken(), frozenset({2}), 2 * 4),
    ],
    ids=str,
)
def test_scale_bytes(granularity, skip_layers, scale_bytes: int) -> None:
    spec = replace(SMALL, granularity=granularity, skip_layers=skip_layers)
    assert spec.scale_bytes == scale_bytes


def test_skipped_layers_have_their_own_dtype_and_scalar_scales() -> None:
    spec = replace(SMALL, skip_layers=frozenset({1}), granularity=PerHead())
    assert [spec.dtype_of(layer) for layer in range(4)] == [
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fn,
    ]
    assert [spec.is_fp8(layer) for layer in range(4)] == [True, False, True, True]
    assert [spec.scale_shape(layer, 7) for layer in range(4)] == [(3,), (), (3,), (3,)]


def test_scale_shape_per_token_has_one_scale_per_slot_and_head() -> None:
    spec = replace(SMALL, granularity=PerToken(), page_size=16)
    assert spec.scale_shape(0, num_pages=7) == (7, 3, 16)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_num_pages_for_rounds_up(page_size: int) -> None:
    spec = replace(SMALL, page_size=page_size)
    tokens = [0, 1, page_size - 1, page_size, page_size + 1, 10 * page_size]
    assert [spec.num_pages_for(num_tokens) for num_tokens in tokens] == [0, 1, 1, 1, 2, 10]


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
@pytest.mark.parametrize("num_pages", [1, 2, 1000])
def test_num_pages_in_is_exact_to_the_byte(granularity, num_pages: int) -> None:
    spec = replace(SMALL, granularity=granularity)
    exact = spec.scale_bytes + num_pages * spec.bytes_per_page
    assert spec.num_pages_in(exact) == num_pages
    assert spec.num_pages_in(exact - 1) == num_pages - 1


@pytest.mark.parametrize("memory_bytes", [-(10**9), 0, 1, SMALL.scale_bytes])
def test_too_little_memory_holds_no_page(memory_bytes: int) -> None:
    assert SMALL.num_pages_in(memory_bytes) == 0


def test_negative_token_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_tokens must not be negative, got -1"):
        SMALL.num_pages_for(-1)


@pytest.mark.parametrize("layer", [-1, 4])
def test_unknown_layers_are_refused(layer: int) -> None:
    for method in (SMALL.dtype_of, SMALL.is_fp8, lambda layer: SMALL.scale_shape(layer, 1)):
        with pytest.raises(ConfigError, match=rf"layer must be within 0\.\.3, got {layer}"):
            method(layer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"num_kv_heads": -1}, "num_kv_heads must be a positive integer, got -1"),
        ({"head_dim": 64.0}, r"head_dim must be a positive integer, got 64\.0"),
        ({"page_size": 48}, "page_size must be 16, 32, 64 or 128, got 48"),
        ({"layout": "nhd"}, "layout must be head_major or token_major, got 'nhd'"),
        ({"dtype": torch.uint8}, r"dtype must be one of .*float8_e4m3fn.*; got torch\.uint8"),
        ({"dtype": "fp8"}, "dtype must be one of .*; got 'fp8'"),
        ({"granularity": PerChannel()}, "granularity tensor, head or token, got channel"),
        ({"granularity": PerBlock(1, 64)}, "granularity tensor, head or token, got block 1x64"),
        (
            {"dtype": torch.bfloat16, "granularity": PerHead()},
            r"granularity head needs an FP8 cache, got torch\.bfloat16.*leave granularity out",
        ),
        ({"skip_layers": {1, 4, -1}}, r"skip_layers must be within 0\.\.3, got \[-1, 4\]"),
        ({"skip_layers": {"sliding_window", 7}}, r"got \[7, 'sliding_window'\]"),
        ({"skip_dtype": torch.float8_e5m2}, r"skip_dtype must be one of .*; got .*e5m2"),
        (
            {"dtype": torch.float16, "skip_layers": {0}},
            r"takes layers out of FP8, but all are torch\.float16: leave it out",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else ",".join(value),
)
def test_contradictions_are_refused_with_the_values(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_every_cache_dtype_is_accepted(dtype: torch.dtype) -> None:
    spec = replace(SMALL, dtype=dtype)
    assert spec.dtype_of(0) == dtype
    assert spec.is_fp8(0) == (dtype.itemsize == 1)


def test_a_spec_is_a_value() -> None:
    same = replace(SMALL, skip_layers=frozenset())
    assert same == SMALL
    assert hash(same) == hash(SMALL)
    assert hash(replace(SMALL, skip_layers={1, 2})) == hash(replace(SMALL, skip_layers=[2, 1]))
    with pytest.raises(FrozenInstanceError):
        SMALL.page_size = 16  # type: ignore[misc]
