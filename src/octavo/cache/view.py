"""What one batch reads and writes in one layer of a KV cache: the argument of ops and kernels."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from octavo.cache.spec import CACHE_DTYPES
from octavo.errors import ConfigError
from octavo.numerics.formats import is_fp8
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, PerToken


@dataclass(frozen=True, eq=False)
class PagedView:
    """Pages and scales of one layer, with the page table and lengths of one batch.

    key_pages, value_pages: [num_pages, num_kv_heads, page_size, head_dim], any strides, but each
    vector of head_dim contiguous. key_scale, value_scale: float32 [], [num_kv_heads] or
    [num_pages, num_kv_heads, page_size]; [] if the pages are not FP8. page_table: [num_sequences,
    max_pages] int32, the pages of each sequence in order. lengths: [num_sequences] int32, how many
    tokens of each sequence are in the cache now.

    Checked by shape alone: building a view never waits for the device.
    """

    key_pages: Tensor
    value_pages: Tensor
    key_scale: Tensor
    value_scale: Tensor
    page_table: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        self._check_pages()
        self._check_scales()
        self._check_tables()
        self._check_devices(*self.tensors)

    def for_batch(self, page_table: Tensor, lengths: Tensor) -> "PagedView":
        """The same pages with the table and lengths of another batch, which alone are checked."""
        view = object.__new__(PagedView)
        vars(view).update(vars(self), page_table=page_table, lengths=lengths)
        view._check_tables()
        view._check_devices(page_table, lengths)
        return view

    @property
    def num_pages(self) -> int:
        """How many pages the cache has, this batch's and all others."""
        return self.key_pages.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """How many heads the keys and values have."""
        return self.key_pages.shape[1]

    @property
    def page_size(self) -> int:
        """How many tokens a page holds."""
        return self.key_pages.shape[2]

    @property
    def head_dim(self) -> int:
        """How many values a head's key or value has."""
        return self.key_pages.shape[3]

    @property
    def num_sequences(self) -> int:
        """How many sequences the batch has."""
        return self.page_table.shape[0]

    @property
    def max_pages(self) -> int:
        """How many pages a sequence of this batch can have."""
        return self.page_table.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the pages."""
        return self.key_pages.dtype

    @property
    def device(self) -> torch.device:
        """The device of every tensor of the view."""
        return self.key_pages.device

    @property
    def is_fp8(self) -> bool:
        """Whether the pages are FP8, so that the scales matter."""
        return is_fp8(self.dtype)

    @property
    def scale_granularity(self) -> Granularity:
        """Which keys, or values, share a scale; PerToken means per token and head."""
        match self.key_scale.dim():
            case 0:
                return PerTensor()
            case 1:
                return PerHead()
        return PerToken()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in the order of the fields: how a view travels through torch.library."""
        return [getattr(self, field.name) for field in fields(self)]

    def slots(self, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        """Where tokens lie: page * page_size + offset, int64 [num_tokens].

        sequence_ids, positions: [num_tokens] int32 or int64, the token's row of the page table and
        its place in the sequence, below max_pages * page_size. A negative position is padding and
        has slot -1.
        """
        index = positions.clamp(min=0)
        pages = self.page_table[sequence_ids.long(), (index // self.page_size).long()].long()
        slots = pages * self.page_size + index % self.page_size
        return torch.where(positions < 0, -1, slots)

    def as_token_major(self) -> tuple[Tensor, Tensor]:
        """The same key and value memory as [page, token, kv_head, head_dim]."""
        return self.key_pages.transpose(1, 2), self.value_pages.transpose(1, 2)

    def _check_pages(self) -> None:
        key, value = self.key_pages, self.value_pages
        if key.dim() != 4 or key.shape != value.shape:
            raise ConfigError(
                "expected key and value pages of one shape [num_pages, num_kv_heads, page_size, "
                f"head_dim], got {list(key.shape)} and {list(value.shape)}"
            )
        if key.dtype not in CACHE_DTYPES or key.dtype != value.dtype:
            raise ConfigError(
                "expected key and value pages of one dtype, FP8, bfloat16, float16 or float32; got "
                f"{key.dtype} and {value.dtype}: bytes become FP8 by .view(torch.float8_e4m3fn)"
            )
        if not (_is_contiguous_at_end(key) and _is_contiguous_at_end(value)):
            raise ConfigError(
                "expected pages whose last dimension has stride 1, got strides "
                f"{key.stride()} and {value.stride()}"
            )

    def _check_scales(self) -> None:
        key, value = self.key_scale, self.value_scale
        if not key.dtype == value.dtype == torch.float32:
            raise ConfigError(f"expected float32 scales, got {key.dtype} and {value.dtype}")
        shapes = self._scale_shapes()
        if key.shape != value.shape or key.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ConfigError(
                f"{self.dtype} pages {list(self.key_pages.shape)} need key and value scales that "
                f"are both {expected}, got {list(key.shape)} and {list(value.shape)}"
            )

    def _scale_shapes(self) -> tuple[tuple[int, ...], ...]:
        if not self.is_fp8:
            return ((),)
        return (), (self.num_kv_heads,), self.key_pages.shape[:3]

    def _check_tables(self) -> None:
        table, lengths = self.page_table, self.lengths
        if not table.dtype == lengths.dtype == torch.int32:
            raise ConfigError(
                f"expected int32 page_table and lengths, got {table.dtype} and {lengths.dtype}"
            )
        if table.dim() != 2 or lengths.shape != table.shape[:1]:
            raise ConfigError(
                "expected page_table [num_sequences, max_pages] and lengths [num_sequences], got "
                f"{list(table.shape)} and {list(lengths.shape)}"
            )
        if not (_is_contiguous_at_end(table) and _is_contiguous_at_end(lengths)):
            raise ConfigError(
                "expected page_table and lengths whose last dimension has stride 1, got strides "
                f"{table.stride()} and {lengths.stride()}"
            )

    def _check_devices(self, *tensors: Tensor) -> None:
        device = self.device
        for tensor in tensors:
            if tensor.device != device:
                found = {
                    field.name: str(getattr(self, field.name).device) for field in fields(self)
                }
                raise ConfigError(f"expected all tensors of a view on one device, got {found}")


def token_major_pages(pages: Tensor) -> Tensor:
    """Foreign pages [page, token, kv_head, head_dim] as a PagedView takes them; no copy."""
    if pages.dim() != 4:
        raise ConfigError(
            f"expected pages [page, token, kv_head, head_dim], got shape {list(pages.shape)}"
        )
    return pages.transpose(1, 2)


def joint_pages(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Foreign pages [page, kv_head, token, 2 * head_dim], each key before its value; no copy.

    Returns key and value pages as a PagedView takes them.
    """
    if pages.dim() != 4 or pages.shape[3] % 2:
        raise ConfigError(
            f"expected pages [page, kv_head, token, 2 * head_dim], got shape {list(pages.shape)}"
        )
    head_dim = pages.shape[3] // 2
    return pages[..., :head_dim], pages[..., head_dim:]


def _is_contiguous_at_end(x: Tensor) -> bool:
    return x.shape[-1] <= 1 or x.stride(-1) == 1
