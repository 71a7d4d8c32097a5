"""The memory of a paged KV cache: page and scale tensors of every layer."""

import torch
from torch import Tensor

from octavo.cache.spec import CacheSpec
from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.numerics.granularity import PerToken
from octavo.numerics.scales import MIN_SCALE


class PagedStorage:
    """Pages and scales of every layer, allocated once.

    key_pages, value_pages: per layer [num_pages, num_kv_heads, page_size, head_dim], zeros at
    first, so that a slot never written is finite. key_scales, value_scales: per layer float32,
    shaped as `spec.scale_shape` says, 1.0 at first. The tensors never move: CUDA graphs may keep
    their addresses.
    """

    def __init__(self, spec: CacheSpec, num_pages: int, device: torch.device | str) -> None:
        if num_pages < 0:
            raise ConfigError(f"num_pages must not be negative, got {num_pages}")
        self.spec = spec
        self.num_pages = num_pages
        self.device = torch.device(device)
        layers = range(spec.num_layers)
        self.key_pages = [self._new_pages(layer) for layer in layers]
        self.value_pages = [self._new_pages(layer) for layer in layers]
        self.key_scales = [self._new_scale(layer) for layer in layers]
        self.value_scales = [self._new_scale(layer) for layer in layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and scales."""
        groups = (self.key_pages, self.value_pages, self.key_scales, self.value_scales)
        return sum(tensor.nbytes for group in groups for tensor in group)

    def view(self, layer: int, page_table: Tensor, lengths: Tensor) -> PagedView:
        """One layer with a batch's page table [num_sequences, max_pages] and lengths, int32."""
        self.spec.check_layer(layer)
        return PagedView(
            key_pages=self.key_pages[layer],
            value_pages=self.value_pages[layer],
            key_scale=self.key_scales[layer],
            value_scale=self.value_scales[layer],
            page_table=page_table,
            lengths=lengths,
        )

    def set_scales(self, layer: int, key: Tensor | float, value: Tensor | float) -> None:
        """Set the static scales of an FP8 layer, before its first page is written.

        key, value: positive and finite, [] per tensor or [num_kv_heads] per head.
        """
        if not self.spec.is_fp8(layer):
            raise ConfigError(
                f"layer {layer} is stored as {self.spec.dtype_of(layer)}, which has no scales"
            )
        if isinstance(self.spec.granularity, PerToken):
            raise ConfigError(
                "a cache of granularity token scales each token as it is written: "
                "static scales need granularity tensor or head"
            )
        new_key = self._checked_scale("key", layer, key)
        new_value = self._checked_scale("value", layer, value)
        self.key_scales[layer].copy_(new_key)
        self.value_scales[layer].copy_(new_value)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy pages (source, destination) in every layer, with their per-token scales.

        All sources are read before any destination is written.
        """
        if not pairs:
            return
        self._check_pairs(pairs)
        sources, destinations = torch.tensor(pairs, device=self.device).unbind(1)
        for tensor in self._paged_tensors():
            tensor[destinations] = tensor[sources]

    def _new_pages(self, layer: int) -> Tensor:
        spec, dtype = self.spec, self.spec.dtype_of(layer)
        if spec.layout == "token_major":
            shape = (self.num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
            return torch.zeros(shape, dtype=dtype, device=self.device).transpose(1, 2)
        shape = (self.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _new_scale(self, layer: int) -> Tensor:
        shape = self.spec.scale_shape(layer, self.num_pages)
        return torch.ones(shape, dtype=torch.float32, device=self.device)

    def _checked_scale(self, name: str, layer: int, scale: Tensor | float) -> Tensor:
        scale = torch.as_tensor(scale, dtype=torch.float32, device=self.device).detach()
        shape = self.spec.scale_shape(layer, self.num_pages)
        if tuple(scale.shape) != shape:
            raise ConfigError(
                f"the {name} scale of layer {layer} must have shape {list(shape)} "
                f"(granularity {self.spec.granularity}), got {list(scale.shape)}"
            )
        if not bool(((scale >= MIN_SCALE) & (scale < torch.inf)).all()):
            raise ConfigError(
                f"the {name} scale of layer {layer} must be positive and finite, at least "
                f"{MIN_SCALE:.3g}, got {scale.tolist()}"
            )
        return scale

    def _check_pairs(self, pairs: list[tuple[int, int]]) -> None:
        for page in (page for pair in pairs for page in pair):
            if not 0 <= page < self.num_pages:
                raise ConfigError(f"expected page ids below {self.num_pages}, got {page}")
        destinations = [destination for _, destination in pairs]
        if len(set(destinations)) < len(destinations):
            raise ConfigError(f"expected each destination once, got {destinations}")

    def _paged_tensors(self) -> list[Tensor]:
        """Every tensor whose first dimension is the page, FP8 ones as bytes."""
        pages = [*self.key_pages, *self.value_pages]
        scales = [scale for scale in (*self.key_scales, *self.value_scales) if scale.dim() == 3]
        # Indexed writes are not implemented for FP8 on every device.
        return [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in pages] + scales
