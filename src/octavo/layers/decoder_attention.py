"""Attention of a decoder's layer over a paged KV cache."""

from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.cache.view import PagedView
from octavo.errors import ConfigError, UnsupportedError
from octavo.internals import require
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.buffers import Float32Buffers
from octavo.numerics.decode_plan import DecodePlan
from octavo.numerics.formats import E4M3, format_of, is_fp8
from octavo.numerics.granularity import Granularity, PerHead, PerTensor, PerToken
from octavo.numerics.hadamard import hadamard
from octavo.numerics.rotary import Rotary
from octavo.ops.check import check_fp8_device

require("torch.nn.Module._buffers", "torch.nn.Module._load_from_state_dict")

# What to do where a GPU has no FP8.
WITHOUT_FP8 = "leave kv_cache out, and keys and values are stored as they are"


def why_not_centered(*, has_softcap: bool, has_sinks: bool) -> str | None:
    """Why a mean must not be taken off the keys of such a layer; None if it may be."""
    if not (has_softcap or has_sinks):
        return None
    return (
        "expected softmax over keys alone to center keys, got "
        f"{'a soft-cap' if has_softcap else 'sinks'}, for which it matters how large scores are: "
        "leave center_keys out (rotate_keys is exact here, too), or skip the layer"
    )


class DecoderAttention(Float32Buffers):
    """How one layer stores keys and values in pages, and attends to them.

    dtype: that of the pages; None is that of the keys, and nothing is quantized.
    key_scale, value_scale: float32, one for all heads or one for each; 1.0 if left out. A cache of
    granularity token has none here: every token and head gets its own as it is written.
    query_scale: for queries of a prefill in FP8; left out, it follows the queries of each call.
    Decoding keeps queries as they are.
    rotates_keys: keys are multiplied by `hadamard` before they are rounded, and queries as well, so
    that their products stay. Needs head_dim.
    key_mean: float32 [num_kv_heads, head_dim], subtracted from every key before it is stored. All
    scores of a query become smaller by the same number, which softmax does not see; a sink or a
    soft-cap would, so layers with one are refused.
    saturated: how many keys and values lay beyond the range of their scale, int64 [2] on the
    device; counted if counts_saturation.
    changes_keys: whether keys are centered or rotated before they are stored.
    impl: the implementation of its ops by name, prefill_impl that of `prefill` if it is another.
    """

    key_scale: Tensor
    value_scale: Tensor
    query_scale: Tensor | None
    key_mean: Tensor | None
    rotation: Tensor | None
    saturated: Tensor

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        spec: AttentionSpec,
        *,
        dtype: torch.dtype | None = E4M3.dtype,
        granularity: Granularity = PerTensor(),
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        query_scale: Tensor | None = None,
        rotates_keys: bool = False,
        key_mean: Tensor | None = None,
        head_dim: int | None = None,
        counts_saturation: bool = False,
        name: str = "",
    ) -> None:
        super().__init__()
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ConfigError(
                f"{name}: expected heads that KV heads divide, got {num_heads} and {num_kv_heads}"
            )
        if dtype is not None and not is_fp8(dtype):
            raise ConfigError(f"{name}: expected an FP8 dtype or None, got {dtype}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.spec, self.dtype, self.granularity, self.name = spec, dtype, granularity, name
        self.counts_saturation = counts_saturation
        self.changes_keys = rotates_keys or key_mean is not None
        self.impl: str | None = None
        self.prefill_impl: str | None = None
        shape = (num_kv_heads,) if isinstance(granularity, PerHead) else ()
        for which, scale in (("key", key_scale), ("value", value_scale)):
            self.register_buffer(f"{which}_scale", self._checked(which, scale, shape))
        heads = (num_heads,) if query_scale is not None and query_scale.dim() else ()
        query = None if query_scale is None else self._checked("query", query_scale, heads)
        self.register_buffer("query_scale", query)
        if dtype is None and self.changes_keys:
            raise ConfigError(f"{name}: a cache with the keys' own dtype changes no keys")
        mean = None if key_mean is None else self._checked_mean(key_mean, head_dim)
        self.register_buffer("key_mean", mean)
        if rotates_keys and head_dim is None:
            raise ConfigError(f"{name}: expected a head_dim to rotate keys, got none")
        matrix = hadamard(head_dim) if rotates_keys and head_dim is not None else None
        # Not in a state dict: every layer of this version has the same one.
        self.register_buffer("rotation", matrix, persistent=False)
        self.register_buffer("saturated", torch.zeros(2, dtype=torch.int64))
        self._appended_by: tuple[torch.device, str | None] | None = None  # as last checked

    def _checked(self, which: str, scale: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        if scale is None:
            return torch.ones(shape)
        if self.dtype is None or (which != "query" and isinstance(self.granularity, PerToken)):
            kept = "the keys' own dtype" if self.dtype is None else "a scale for each token"
            raise ConfigError(f"{self.name}: a cache with {kept} takes no {which} scale")
        if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
            raise ConfigError(
                f"{self.name}: expected a float32 {which} scale of shape {list(shape)}, got "
                f"{scale.dtype} {list(scale.shape)}"
            )
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ConfigError(f"{self.name}: expected positive finite scales, got {scale.tolist()}")
        return scale.detach().clone()

    def _checked_mean(self, mean: Tensor, head_dim: int | None) -> Tensor:
        if reason := why_not_centered(has_softcap=self.spec.softcap is not None, has_sinks=False):
            raise UnsupportedError(f"{self.name}: {reason}")
        expected = [self.num_kv_heads, head_dim or mean.shape[-1]]
        if mean.dtype != torch.float32 or list(mean.shape) != expected:
            raise ConfigError(
                f"{self.name}: expected a float32 key mean of shape {expected} [num_kv_heads, "
                f"head_dim], got {mean.dtype} {list(mean.shape)}"
            )
        if not bool(mean.isfinite().all()):
            raise ConfigError(f"{self.name}: expected a finite key mean, got NaN or Inf in it")
        return mean.detach().clone()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        # It is not among what is loaded, and `to_empty` leaves nothing of it.
        if self.rotation is not None:
            self.rotation.copy_(hadamard(self.rotation.shape[-1]))

    @property
    def rotates_keys(self) -> bool:
        """Whether keys and queries are multiplied by a Hadamard matrix."""
        return self.rotation is not None

    def extra_repr(self) -> str:
        """What is not in the buffers."""
        stored = "as they are" if self.dtype is None else f"{format_of(self.dtype)}"
        stored += ", keys rotated" if self.rotates_keys else ""
        stored += ", keys centered" if self.key_mean is not None else ""
        return f"{self.num_heads} heads over {self.num_kv_heads}, keys and values {stored}"

    def check_device(self, device: torch.device) -> None:
        """UnsupportedError if the layer is in FP8 and `device` is a GPU without it.

        The reference runs there if `impl` asks for it by name.
        """
        if self.dtype is not None:
            check_fp8_device(self.name, device, self.impl, instead=WITHOUT_FP8)

    def append(
        self,
        view: PagedView,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        *,
        query: Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor | None:
        """Write keys and values [tokens, num_kv_heads, head_dim] into their slots.

        Negative slots are padding, which is neither written nor counted.
        rotary: turns keys and the query [tokens, num_heads, head_dim] first; the turned query is
        returned. Not for a layer that changes keys: its keys have been turned by others.
        """
        by = key.device, self.impl
        if torch.compiler.is_compiling() or by != self._appended_by:
            self.check_device(key.device)
            if not torch.compiler.is_compiling():
                self._appended_by = by
        if self.changes_keys:
            if rotary is not None:
                raise ConfigError(f"{self.name}: expected keys that are turned, got a rotary")
            key = self._stored(key)
        # Past Module.__getattr__, which takes long to find a buffer.
        saturated = self._buffers["saturated"] if self.counts_saturation else None
        return ops.append_kv(
            view, key, value, slots, query=query, rotary=rotary, saturated=saturated
        )

    def _stored(self, key: Tensor) -> Tensor:
        """Keys as they are quantized, in float32 if something is done to them.

        A mean may be large beside what is left without it: rounding comes after both.
        """
        if self.key_mean is not None:
            key = key.float() - self.key_mean
        return key if self.rotation is None else key.float() @ self.rotation

    def _rotated(self, q: Tensor, sinks: Tensor | None) -> Tensor:
        """Queries for stored keys, in float32 if rotated."""
        if sinks is not None and self.key_mean is not None:
            reason = why_not_centered(has_softcap=False, has_sinks=True)
            raise UnsupportedError(f"{self.name}: {reason}")
        return q if self.rotation is None else q.float() @ self.rotation

    def prefill(
        self,
        q: Tensor,
        view: PagedView,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        sinks: Tensor | None = None,
        num_cached_tokens: int | None = None,
    ) -> Tensor:
        """Attention of the newest tokens, packed [tokens, num_heads, head_dim], over the pages.

        With pages in e4m3 queries are quantized as well, and all of attention is in FP8.
        """
        scale, out_dtype = None, q.dtype
        q = self._rotated(q, sinks)
        if self.dtype == E4M3.dtype:
            given = self.query_scale
            granularity = PerHead() if given is not None and given.dim() else PerTensor()
            quantized = ops.quantize(q, granularity, E4M3, scale=given)
            q, scale = quantized.data, quantized.scale
        else:
            q = q.to(out_dtype)
        return ops.prefill_attention(
            *(q, view, cu_seqlens, max_seqlen, self.spec, scale),
            sinks=sinks,
            num_cached_tokens=num_cached_tokens,
            out_dtype=out_dtype,
            impl=self.prefill_impl or self.impl,
        )

    def decode(
        self,
        q: Tensor,
        view: PagedView,
        *,
        sinks: Tensor | None = None,
        plan: DecodePlan | None = None,
    ) -> Tensor:
        """Attention of the newest 1 … 4 tokens of each sequence, whose queries stay as they are.

        q: [batch, q_len, num_heads, head_dim].
        """
        if self.changes_keys:
            q = self._rotated(q, sinks).to(q.dtype)
        return ops.decode_attention(q, view, self.spec, sinks=sinks, plan=plan, impl=self.impl)
