"""Attention processors that leave norms and rotary embedding to the pass that quantizes.

A stock processor normalizes queries and keys, turns them, rounding to the model's dtype after each,
and only then calls its backend. These run the stock code with neither, and leave both for the
backend, whose `ops.quantize_qkv` does them in float32. Where text and image have projections of
their own, it also gets what both make, and needs no concatenation. A processor becomes one by its
class, and stays the same object: backends, layers that share it and copies see nothing of it. What
they cannot do, in a layer or in one call, takes the stock path.
"""

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from octavo.integrations.patch import Patch
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
# Where a processor keeps octavo's backend, which takes norms and tables; others get the stock path.
BACKEND = "_octavo_backend"
Three = tuple[Tensor, Tensor, Tensor]


class Left:
    """A layer as a stock processor sees it, and what it leaves for its backend.

    Its norms give back what they are given, and those of queries say that the backend is next:
    calls of it before that belong to others, such as hooks of projections. q, k and v of the image
    and first_q, first_k and first_v of the text are noted before a stock processor concatenates
    them. The backend quantizes them from where they are; what the processor concatenates is then
    used by nobody, and a compiler leaves it out.
    """

    def __init__(self, layer: Any, qk_norm: QkNorm, rotary: Rotary | None) -> None:
        self._layer = layer
        self.qk_norm, self.rotary = qk_norm, rotary
        self._noted: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def norm_q(self, x: Tensor) -> Tensor:
        """Queries as they are; of an image if the text has a stream of its own."""
        _CURRENT.left = self
        return self.note("q", x)

    def norm_k(self, x: Tensor) -> Tensor:
        """Keys as they are."""
        return self.note("k", x)

    def norm_added_q(self, x: Tensor) -> Tensor:
        """Queries of the text."""
        return self.note("first_q", x)

    def norm_added_k(self, x: Tensor) -> Tensor:
        """Keys of the text."""
        return self.note("first_k", x)

    def to_v(self, x: Tensor) -> Tensor:
        """Values, as the layer makes them."""
        return self.note("v", self._layer.to_v(x))

    def add_v_proj(self, x: Tensor) -> Tensor:
        """Values of the text, as the layer makes them."""
        return self.note("first_v", self._layer.add_v_proj(x))

    def note(self, name: str, x: Tensor) -> Tensor:
        """Keep x for the backend; returns it."""
        self._noted[name] = x
        return x

    def clear(self) -> None:
        """Keep nothing any longer."""
        self._noted.clear()

    def take_streams(self, whole: Three) -> tuple[Three, Three] | None:
        """Image and text of a call whose concatenation is `whole`; None if they are not all there.

        q, k and v [batch, length, heads, head_dim]. Nothing is kept.
        """
        noted = [self._noted.get(name) for name in ("q", "k", "v", "first_q", "first_k", "first_v")]
        self.clear()
        found: list[Tensor] = []
        for x, like in zip(noted, whole + whole, strict=True):
            if x is not None and x.dim() == 3 and x.shape[2] % like.shape[3] == 0:
                x = x.unflatten(-1, (-1, like.shape[3]))
            if x is None or x.dtype != like.dtype:
                return None
            num_first = self.qk_norm.num_first
            num_tokens = like.shape[1] - num_first if len(found) < 3 else num_first
            if x.shape != (like.shape[0], num_tokens, *like.shape[2:]):
                return None
            found.append(x)
        q, k, v, first_q, first_k, first_v = found
        return (q, k, v), (first_q, first_k, first_v)


class _Current(threading.local):
    """What the layer that runs has left for its backend."""

    def __init__(self) -> None:  # in each thread: a compiled block guards what it finds here
        self.left: Left | None = None


_CURRENT = _Current()


def take_left() -> Left | None:
    """What the layer that runs has left for its backend; for its one call alone."""
    found = _CURRENT.left
    _CURRENT.left = None
    return found


def _fused_kind(name: str, stock: Any, tables: str = "image_rotary_emb", text: str = "") -> type:
    """A processor like a stock one; the names of its arguments for tables and text, if it has one.

    diffusers looks at the arguments that a processor has: these are those of the stock one.
    """
    names = list(inspect.signature(stock.__call__).parameters)[2:]  # without self and the layer

    @wraps(stock.__call__)
    def call(self: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = (given["hidden_states"], given.get(text))
        with fused(self, attn, tokens, given.get(tables)) as (layer, left_tables):
            given[tables] = left_tables
            return stock.__call__(self, layer, **given)

    return type(name, (stock,), {"__call__": call, "__module__": __name__})


_TEXT = "encoder_hidden_states"
# Blocks of FLUX.1, those with one stream too.
FusedFlux = _fused_kind("FusedFlux", FluxAttnProcessor, text=_TEXT)
# Blocks of FLUX.2 with two streams, and with one, whose projections are one with the MLP's.
FusedFlux2 = _fused_kind("FusedFlux2", Flux2AttnProcessor, text=_TEXT)
FusedFlux2Single = _fused_kind("FusedFlux2Single", Flux2ParallelSelfAttnProcessor)
FusedQwenImage = _fused_kind("FusedQwenImage", QwenDoubleStreamAttnProcessor2_0, text=_TEXT)
FusedZImage = _fused_kind("FusedZImage", ZSingleStreamAttnProcessor, "freqs_cis")

# Stock processors, by their exact type, and what they become.
PROCESSORS: Mapping[type, type] = {
    FluxAttnProcessor: FusedFlux,
    Flux2AttnProcessor: FusedFlux2,
    Flux2ParallelSelfAttnProcessor: FusedFlux2Single,
    QwenDoubleStreamAttnProcessor2_0: FusedQwenImage,
    ZSingleStreamAttnProcessor: FusedZImage,
}
_STOCK = {own: stock for stock, own in PROCESSORS.items()}


def put_backend_(processor: Any, backend: Any, patch: Patch) -> None:
    """Let a processor call this backend, and leave norms and tables to it if it is of a kind."""
    unfuse_(processor)
    kind = type(processor)
    if kind in PROCESSORS:
        own = PROCESSORS[kind]
        # diffusers' hooks that skip attention are to know our class as they know the stock one.
        with suppress(ValueError):
            AttentionProcessorRegistry.register(own, AttentionProcessorRegistry.get(kind))
        patch.set(processor, "__class__", own)
    patch.set(processor, BACKEND, backend)
    patch.set(processor, "_attention_backend", backend)


def unfuse_(processor: Any) -> None:
    """Make a processor a stock one: diffusers makes new ones of the class of those it finds."""
    if type(processor) in _STOCK:
        processor.__class__ = _STOCK[type(processor)]


def is_fused(layer: nn.Module) -> bool:
    """Whether a layer's norms and rotary embedding are part of the pass that quantizes."""
    device = next((x.device for x in layer.parameters()), torch.device("cpu"))
    is_ours = hasattr(getattr(layer, "processor", None), BACKEND)
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
    processor: Any, layer: Any, tokens: tuple[Tensor, Tensor | None], tables: Any
) -> Iterator[tuple[Any, Any]]:
    """The layer and the tables for the stock processor.

    A layer without norms and no tables, while both are left for the backend; or those that were
    given, where this call cannot be fused. tokens: of the image, and of the text if it has a stream
    of its own.
    """
    left, backend = None, getattr(processor, BACKEND, None)
    if backend is not None and processor._attention_backend is backend:
        left = _prepare(layer, tokens, tables)
    if left is None:
        yield layer, tables
    else:
        try:
            yield left, None
        finally:
            take_left()  # which is there still if the backend was not reached
            left.clear()


def _prepare(layer: Any, tokens: tuple[Tensor, Tensor | None], tables: Any) -> Left | None:
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
        return Left(layer, norm, None)
    read = _read_tables(tables, image.shape[0], image.shape[1], num_text, q.shape[1])
    if read is None:
        return None
    cos, sin = (x.to(image.device) for x in read)
    return Left(layer, norm, Rotary(cos, sin, is_interleaved=True))


def _norms(layer: Any) -> tuple[Any, ...]:
    """The norms of queries and keys: those of the text first, if it has a stream of its own."""
    own = getattr(layer, "norm_q", None), getattr(layer, "norm_k", None)
    added = getattr(layer, "norm_added_q", None), getattr(layer, "norm_added_k", None)
    return own if added == (None, None) else added + own


def _read_tables(tables: Any, batch_size: int, num_image: int, num_text: int, head_dim: int) -> Any:
    """cos and sin, [tokens, head_dim / 2], of tables in a form that is known; None of others."""
    if isinstance(tables, Tensor):  # Z-Image's: each sequence has positions of its own
        if _is_table(tables, (batch_size, num_image, head_dim // 2), torch.complex64):
            return torch.view_as_real(tables).flatten(0, 1).unbind(-1)
        return None
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        return None
    first, second = tables
    shape = (num_text + num_image, head_dim)
    if all(_is_table(table, shape, *_FLOATS) for table in tables):  # FLUX's: each value twice
        return first[:, ::2], second[:, ::2]
    is_image = _is_table(first, (num_image, head_dim // 2), torch.complex64)
    if is_image and _is_table(second, (num_text, head_dim // 2), torch.complex64):  # Qwen-Image's
        return torch.cat([torch.view_as_real(second), torch.view_as_real(first)]).unbind(-1)
    return None


def _is_table(x: Any, shape: tuple[int, ...], *dtypes: torch.dtype) -> bool:
    return isinstance(x, Tensor) and x.shape == shape and x.dtype in dtypes
