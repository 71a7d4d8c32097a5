"""Attention processors that leave norms and rotary embedding to the pass that quantizes.

A stock processor normalizes queries and keys, turns them, rounding to the model's dtype after each,
and only then calls its backend. These run the stock code with neither, and leave both for the
backend, whose `ops.quantize_qkv` does them in float32. Where text and image have projections of
their own, it also gets what both make, and needs no concatenation. A processor becomes one by its
class, and stays the same object: backends, layers that share it and copies see nothing of it. What
they cannot do, in a layer or in one call, takes the stock path.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from octavo.integrations.diffusers.current_layer import Left, leave, take_left
from octavo.integrations.diffusers.two_streams import Streams
from octavo.internals import internals, require
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.rotary import Rotary

with internals("diffusers"):
    from diffusers.hooks._helpers import AttentionProcessorRegistry
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
    from diffusers.models.transformers.transformer_flux2 import (
        Flux2AttnProcessor,
        Flux2ParallelSelfAttnProcessor,
    )
    from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
    from diffusers.models.transformers.transformer_z_image import ZSingleStreamAttnProcessor

require(
    "diffusers.models.attention.AttentionModuleMixin._attention_backend",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
)

# What the kernel normalizes in one pass; the reference on a CPU takes any.
HEAD_DIMS = (32, 64, 128)
NORMS = (nn.RMSNorm, RMSNorm)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Where a processor keeps the backend that takes norms and tables; others get the stock path.
_BACKEND = "_octavo_fused_backend"

# Batch, tokens and head_dim of a call, and the number of its tokens that are text.
Sizes = tuple[int, int, int, int]
ReadTables = Callable[[Any, Sizes], tuple[Tensor, Tensor] | None]


def real_tables(tables: Any, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """FLUX's cos and sin, [tokens, head_dim], each value twice; None if they are others."""
    _, length, head_dim, _ = sizes
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        return None
    for table in tables:
        if not isinstance(table, Tensor) or table.shape != (length, head_dim):
            return None
        if table.dtype not in _FLOATS:
            return None
    cos, sin = tables
    return cos[:, ::2], sin[:, ::2]


def two_complex_tables(tables: Any, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """Qwen-Image's, complex [tokens, head_dim / 2] of the image and of the text."""
    _, length, head_dim, num_text = sizes
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        return None
    for table, rows in zip(tables, (length - num_text, num_text), strict=True):
        if not isinstance(table, Tensor) or table.dtype != torch.complex64:
            return None
        if table.shape != (rows, head_dim // 2):
            return None
    image, text = tables
    cos, sin = torch.cat([torch.view_as_real(text), torch.view_as_real(image)]).unbind(-1)
    return cos, sin


def complex_table(tables: Any, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """Z-Image's, complex [batch, tokens, head_dim / 2]: each sequence has positions of its own."""
    batch_size, length, head_dim, _ = sizes
    if not isinstance(tables, Tensor) or tables.dtype != torch.complex64:
        return None
    if tables.shape != (batch_size, length, head_dim // 2):
        return None
    cos, sin = torch.view_as_real(tables).flatten(0, 1).unbind(-1)
    return cos, sin


class _TwoStreams:
    """What FLUX.1 and FLUX.2 have in common."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """As the stock processor."""
        tokens = (hidden_states, encoder_hidden_states)
        with fused(self, attn, tokens, image_rotary_emb, real_tables) as (layer, tables):
            return super().__call__(layer, *tokens, attention_mask, tables)  # type: ignore[misc]


class FusedFlux(_TwoStreams, FluxAttnProcessor):  # type: ignore[misc]
    """Blocks of FLUX.1, those with one stream too."""


class FusedFlux2(_TwoStreams, Flux2AttnProcessor):  # type: ignore[misc]
    """Blocks of FLUX.2 with two streams."""


class FusedFlux2Single(Flux2ParallelSelfAttnProcessor):  # type: ignore[misc]
    """Blocks of FLUX.2 with one stream, whose projections are one with those of the MLP."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """As the stock processor."""
        tokens = (hidden_states, None)
        with fused(self, attn, tokens, image_rotary_emb, real_tables) as (layer, tables):
            return super().__call__(layer, hidden_states, attention_mask, tables)


class FusedQwenImage(QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]
    """Blocks of Qwen-Image."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """As the stock processor."""
        tokens = (hidden_states, encoder_hidden_states)
        masks = (encoder_hidden_states_mask, attention_mask)
        with fused(self, attn, tokens, image_rotary_emb, two_complex_tables) as (layer, tables):
            return super().__call__(layer, *tokens, *masks, tables)


class FusedZImage(ZSingleStreamAttnProcessor):  # type: ignore[misc]
    """Blocks of Z-Image."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Any = None,
    ) -> Any:
        """As the stock processor."""
        tokens = (hidden_states, None)
        with fused(self, attn, tokens, freqs_cis, complex_table) as (layer, tables):
            return super().__call__(
                layer, hidden_states, encoder_hidden_states, attention_mask, tables
            )


# Stock processors, by their exact type, and what they become.
PROCESSORS: Mapping[type, type] = {
    FluxAttnProcessor: FusedFlux,
    Flux2AttnProcessor: FusedFlux2,
    Flux2ParallelSelfAttnProcessor: FusedFlux2Single,
    QwenDoubleStreamAttnProcessor2_0: FusedQwenImage,
    ZSingleStreamAttnProcessor: FusedZImage,
}
_STOCK = {own: stock for stock, own in PROCESSORS.items()}


def fuse_(processor: Any, backend: Any) -> None:
    """Let a processor leave norms and tables for this backend, if it is of a kind that can."""
    # diffusers makes new processors of the class of others, which is ours then, without a backend.
    kind = _STOCK.get(type(processor), type(processor))
    if kind in PROCESSORS:
        _introduce(kind)
        processor.__class__ = PROCESSORS[kind]
        setattr(processor, _BACKEND, backend)


def unfuse_(processor: Any) -> None:
    """Make a processor what it was before `fuse_`."""
    if type(processor) in _STOCK:
        processor.__class__ = _STOCK[type(processor)]
        vars(processor).pop(_BACKEND, None)


def is_ours(processor: Any) -> bool:
    """Whether a processor is of a class that `fuse_` gives."""
    return type(processor) in _STOCK


def _introduce(kind: type) -> None:
    """Let diffusers' hooks that skip attention know our class as they know the stock one."""
    try:
        known = AttentionProcessorRegistry.get(kind)
    except ValueError:
        return
    AttentionProcessorRegistry.register(PROCESSORS[kind], known)


def is_fused(layer: nn.Module) -> bool:
    """Whether a layer's norms and rotary embedding are part of the pass that quantizes."""
    device = next((x.device for x in layer.parameters()), torch.device("cpu"))
    is_ours = hasattr(getattr(layer, "processor", None), _BACKEND)
    return is_ours and fusion_objection(layer, device) is None


def fusion_objection(layer: Any, device: torch.device) -> str | None:
    """Why a layer cannot leave its norms to the pass that quantizes; None if it can."""
    kind = type(getattr(layer, "processor", None))
    if kind not in PROCESSORS and kind not in _STOCK:
        known = "FLUX, Qwen-Image or Z-Image"
        return f"expected a stock processor of {known}, got {kind.__name__}"
    norms = _norms(layer)
    for norm in norms:
        if type(norm) not in NORMS:
            return f"expected RMS norms of queries and keys, got {type(norm).__name__}"
        if norm.weight is None or getattr(norm, "bias", None) is not None:
            return "expected norms with a weight and no bias"
        if norm.eps is None or norm.eps <= 0 or norm.eps != norms[0].eps:
            return "expected norms with one eps above 0"
        # Such as those that move a weight to the device when its module is called.
        if norm._forward_pre_hooks or norm._forward_hooks or "forward" in norm.__dict__:
            return "expected norms without hooks and with a forward of their class"
        weight, first = norm.weight, norms[0].weight
        if weight.dim() != 1 or weight.shape != first.shape or weight.dtype != first.dtype:
            return "expected norms of single heads, with weights of one shape and dtype"
        if weight.device != device or weight.dtype not in _FLOATS:
            return f"expected norm weights in 16 or 32 bits on {device}"
    head_dim = len(norms[0].weight)
    if device.type == "cuda" and head_dim not in HEAD_DIMS:
        return f"expected head_dim of {', '.join(map(str, HEAD_DIMS))} on a GPU, got {head_dim}"
    return None


@contextmanager
def fused(
    processor: Any,
    layer: Any,
    tokens: tuple[Tensor, Tensor | None],
    tables: Any,
    read_tables: ReadTables,
) -> Iterator[tuple[Any, Any]]:
    """The layer and the tables for the stock processor.

    A layer without norms and no tables, while both are left for the backend; or those that were
    given, where this call cannot be fused. tokens: of the image, and of the text if it has a stream
    of its own.
    """
    prepared, backend = None, getattr(processor, _BACKEND, None)
    if backend is not None and processor._attention_backend is backend:
        prepared = _prepare(layer, tokens, tables, read_tables)
    if prepared is None:
        yield layer, tables
    else:
        left = Left(*prepared, Streams())
        kind = _WithoutNorms if tokens[1] is None else _TwoStreamsLayer
        try:
            yield kind(layer, left), None
        finally:
            take_left()  # which is there still if the backend was not reached
            left.streams.clear()


def _prepare(
    layer: Any, tokens: tuple[Tensor, Tensor | None], tables: Any, read_tables: ReadTables
) -> tuple[QkNorm, Rotary | None] | None:
    """The norms and tables of a call; None if it cannot be fused."""
    image, text = tokens
    if fusion_objection(layer, image.device) is not None:
        return None
    norms, num_text = _norms(layer), 0
    if (text is not None) != (len(norms) == 4):
        return None
    if text is not None:
        num_text = text.shape[1]
        q, k = (torch.stack([norms[i].weight, norms[i + 2].weight]) for i in (0, 1))
    else:
        q, k = (norm.weight[None] for norm in norms)
    norm = QkNorm(q, k, norms[0].eps, num_text)
    if tables is None:
        return norm, None
    sizes = (image.shape[0], num_text + image.shape[1], q.shape[1], num_text)
    read = read_tables(tables, sizes)
    if read is None:
        return None
    cos, sin = (x.to(image.device) for x in read)
    return norm, Rotary(cos, sin, is_interleaved=True)


def _norms(layer: Any) -> tuple[Any, ...]:
    """The norms of queries and keys: those of the text first, if it has a stream of its own."""
    own = getattr(layer, "norm_q", None), getattr(layer, "norm_k", None)
    added = getattr(layer, "norm_added_q", None), getattr(layer, "norm_added_k", None)
    return own if added == (None, None) else added + own


class _WithoutNorms:
    """A layer as a stock processor sees it, whose norms give back what they are given.

    They say that the backend is next: its calls before belong to others, such as hooks of
    projections.
    """

    def __init__(self, layer: Any, left: Left) -> None:
        self._layer = layer
        self._left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def norm_q(self, x: Tensor) -> Tensor:
        """Queries as they are; of an image if the text has a stream of its own."""
        leave(self._left)
        return x

    def norm_k(self, x: Tensor) -> Tensor:
        """Keys as they are."""
        return x


class _TwoStreamsLayer(_WithoutNorms):
    """One whose text has projections of its own: those of both are noted for the backend."""

    def norm_q(self, x: Tensor) -> Tensor:
        """Queries of the image."""
        leave(self._left)
        return self._left.streams.note("q", x)

    def norm_k(self, x: Tensor) -> Tensor:
        """Keys of the image."""
        return self._left.streams.note("k", x)

    def norm_added_q(self, x: Tensor) -> Tensor:
        """Queries of the text."""
        return self._left.streams.note("first_q", x)

    def norm_added_k(self, x: Tensor) -> Tensor:
        """Keys of the text."""
        return self._left.streams.note("first_k", x)

    def to_v(self, x: Tensor) -> Tensor:
        """Values of the image, as the layer makes them."""
        return self._left.streams.note("v", self._layer.to_v(x))

    def add_v_proj(self, x: Tensor) -> Tensor:
        """Values of the text, as the layer makes them."""
        return self._left.streams.note("first_v", self._layer.add_v_proj(x))
