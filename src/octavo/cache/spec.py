"""What a KV cache holds, and how many bytes that takes."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from octavo.errors import ConfigError
from octavo.numerics.formats import FORMATS, is_fp8
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, PerToken

Layout = Literal["head_major", "token_major"]

PAGE_SIZES = (16, 32, 64, 128)
PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CACHE_DTYPES = (*(fmt.dtype for fmt in FORMATS.values()), *PLAIN_DTYPES)

_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Layers, heads, page size, dtype and scales of a KV cache.

    granularity: which values of an FP8 layer share a scale; PerToken means per token and head.
    layout: how a page lies in memory, "head_major" [kv_head, token, head_dim] or "token_major"
    [token, kv_head, head_dim] (vLLM's); ops see [page, kv_head, token, head_dim] either way.
    skip_layers: layers stored as skip_dtype instead of FP8.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 64
    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = PerTensor()
    layout: Layout = "head_major"
    skip_layers: frozenset[int] = frozenset()
    skip_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        # Any collection of indices is welcome; only a frozenset keeps the spec hashable.
        object.__setattr__(self, "skip_layers", frozenset(self.skip_layers))
        self._check_sizes()
        self._check_dtypes()
        self._check_skip_layers()

    def _check_sizes(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} must be a positive integer, got {size!r}")
        if self.page_size not in PAGE_SIZES:
            raise ConfigError(f"page_size must be 16, 32, 64 or 128, got {self.page_size!r}")
        if self.layout not in get_args(Layout):
            expected = " or ".join(get_args(Layout))
            raise ConfigError(f"layout must be {expected}, got {self.layout!r}")

    def _check_dtypes(self) -> None:
        if self.dtype not in CACHE_DTYPES:
            raise ConfigError(f"dtype must be one of {_names(CACHE_DTYPES)}; got {self.dtype!r}")
        if not isinstance(self.granularity, PerTensor | PerHead | PerToken):
            raise ConfigError(
                f"a KV cache has granularity tensor, head or token, got {self.granularity}"
            )
        if not is_fp8(self.dtype) and self.granularity != PerTensor():
            raise ConfigError(
                f"granularity {self.granularity} needs an FP8 cache, got {self.dtype}, "
                "which has no scales: leave granularity out"
            )

    def _check_skip_layers(self) -> None:
        if self.skip_dtype not in PLAIN_DTYPES:
            expected = _names(PLAIN_DTYPES)
            raise ConfigError(f"skip_dtype must be one of {expected}; got {self.skip_dtype!r}")
        if self.skip_layers and not is_fp8(self.dtype):
            raise ConfigError(
                f"skip_layers takes layers out of FP8, but all are {self.dtype}: leave it out"
            )
        unknown = [layer for layer in self.skip_layers if layer not in range(self.num_layers)]
        if unknown:
            found = sorted(unknown, key=str)
            raise ConfigError(f"skip_layers must be within 0..{self.num_layers - 1}, got {found}")

    def check_layer(self, layer: int) -> None:
        """Raise unless the cache has this layer."""
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer must be within 0..{self.num_layers - 1}, got {layer}")

    def dtype_of(self, layer: int) -> torch.dtype:
        """The dtype in which this layer's keys and values are stored."""
        self.check_layer(layer)
        return self.skip_dtype if layer in self.skip_layers else self.dtype

    def is_fp8(self, layer: int) -> bool:
        """Whether this layer is stored in FP8, so that its scales matter."""
        return is_fp8(self.dtype_of(layer))

    def scale_shape(self, layer: int, num_pages: int) -> tuple[int, ...]:
        """The shape of this layer's key scale, and of its value scale."""
        if not self.is_fp8(layer) or isinstance(self.granularity, PerTensor):
            return ()
        if isinstance(self.granularity, PerHead):
            return (self.num_kv_heads,)
        return (num_pages, self.num_kv_heads, self.page_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, with their per-token scales."""
        vector_bytes = sum(self._vector_bytes(layer) for layer in range(self.num_layers))
        return 2 * self.num_kv_heads * vector_bytes

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in all layers."""
        return self.page_size * self.bytes_per_token

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales that every page shares; per-token scales count with their tokens."""
        num_scales = 0
        for layer in range(self.num_layers):
            match self.scale_shape(layer, num_pages=0):
                case ():
                    num_scales += 2
                case (num_heads,):
                    num_scales += 2 * num_heads
        return num_scales * _SCALE_BYTES

    def num_pages_for(self, num_tokens: int) -> int:
        """How many pages one sequence of this many tokens takes."""
        if num_tokens < 0:
            raise ConfigError(f"num_tokens must not be negative, got {num_tokens}")
        return -(-num_tokens // self.page_size)

    def num_pages_in(self, memory_bytes: int) -> int:
        """How many pages fit into this much memory; 0 if not even one does."""
        return max(0, (memory_bytes - self.scale_bytes) // self.bytes_per_page)

    def _vector_bytes(self, layer: int) -> int:
        """Bytes of one head's key or value of one token."""
        has_own_scale = self.is_fp8(layer) and isinstance(self.granularity, PerToken)
        own_scale_bytes = _SCALE_BYTES if has_own_scale else 0
        return self.head_dim * self.dtype_of(layer).itemsize + own_scale_bytes


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
