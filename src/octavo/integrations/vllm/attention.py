"""One layer's attention inside vLLM: octavo's ops over vLLM's pages."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from octavo import ops
from octavo.cache.view import PagedView, joint_pages
from octavo.errors import UnsupportedError
from octavo.integrations.vllm.batch import Batch, Requests
from octavo.integrations.vllm.names import BACKEND, FP8
from octavo.integrations.vllm.settings import read_settings
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.decode_plan import DecodePlan
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerTensor

PLAIN = ("auto", "bfloat16", "float16")


class OctavoAttention(AttentionImpl[Batch]):
    """Attention of a decoder layer: prompts in FP8 over an FP8 cache, else in the model's dtype.

    Queries of prompts are quantized with a scale of their own step. Decoding quantizes none.
    """

    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        config = get_current_vllm_config()
        read_settings(config)  # an error in them comes before any token
        sees_ahead = config.model_config is not None and config.model_config.is_mm_prefix_lm
        unknown = sorted(name for name, value in others.items() if value is not None)
        for is_bad, what in (
            (attn_type != AttentionType.DECODER, f"attention of type {attn_type!s}"),
            (sees_ahead, "bidirectional attention of multimodal tokens"),
            (alibi_slopes is not None, "ALiBi"),
            (kv_cache_dtype not in FP8 + PLAIN, f"a KV cache in {kv_cache_dtype}"),
            (bool(unknown), f"layers with {', '.join(unknown)}"),
        ):
            if is_bad:
                raise UnsupportedError(
                    f"{BACKEND} does not support {what}: choose another --attention-backend"
                )
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads, self.scale = num_kv_heads or num_heads, float(scale)
        self.kv_cache_dtype, self.is_fp8 = kv_cache_dtype, kv_cache_dtype in FP8
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.spec = AttentionSpec(
            causal=True,
            window=sliding_window,
            softcap=logits_soft_cap or None,
            softmax_scale=self.scale,
        )
        # The pages and scales of the last call, and the view of them without a batch.
        self._seen: tuple[Tensor, Tensor, Tensor] | None = None
        self._view: PagedView | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write a step's new keys and values into their pages."""
        num_tokens = len(slot_mapping)
        view = self._pages(layer, kv_cache)
        ops.append_kv(view, key[:num_tokens], value[:num_tokens], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step's queries [tokens, num_heads, head_size], into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                f"{BACKEND} has no quantized output: turn the fusion of attention and "
                "quantization (fuse_attn_quant) off"
            )
        if attn_metadata is None:  # the run that measures memory
            return output.zero_()
        shape = (-1, self.num_heads, self.head_size)
        query, out = query.view(shape), output.view(shape)
        pages, batch = self._pages(layer, kv_cache), attn_metadata
        if (decodes := batch.decodes) is not None:
            out[decodes.tokens] = self._decode(query[decodes.tokens], pages, decodes, batch.plans)
        if (prompts := batch.prompts) is not None:
            assert batch.cu_seqlens is not None
            out[prompts.tokens] = self._prefill(
                query[prompts.tokens], pages, prompts, batch.cu_seqlens
            )
        return output

    def _decode(
        self,
        q: Tensor,
        pages: PagedView,
        decodes: Requests,
        plans: dict[Hashable, DecodePlan],
    ) -> Tensor:
        view = pages.for_batch(decodes.page_table, decodes.lengths)
        rows = q.unflatten(0, (len(decodes), decodes.max_query_len))
        # Layers alike in these share a plan: the first of them makes it.
        key = (
            *(self.spec.window, self.num_heads, q.dtype),
            *(pages.key_pages.shape, pages.dtype, pages.key_scale.dim()),
        )
        if key not in plans:
            plans[key] = ops.plan_decode(
                view,
                self.spec,
                num_heads=self.num_heads,
                q_len=decodes.max_query_len,
                dtype=q.dtype,
            )
        out = ops.decode_attention(rows, view, self.spec, sinks=self.sinks, plan=plans[key])
        return out.flatten(0, 1)

    def _prefill(
        self, q: Tensor, pages: PagedView, prompts: Requests, cu_seqlens: Tensor
    ) -> Tensor:
        q_scale, out_dtype = None, q.dtype
        if self.is_fp8:
            quantized = ops.quantize(q, PerTensor(), E4M3)
            q, q_scale = quantized.data, quantized.scale
        return ops.prefill_attention(
            q,
            pages.for_batch(prompts.page_table, prompts.lengths),
            cu_seqlens,
            prompts.max_query_len,
            self.spec,
            q_scale,
            sinks=self.sinks,
            num_cached_tokens=prompts.num_cached_tokens,
            out_dtype=out_dtype,
        )

    def _pages(self, layer: Any, kv_cache: Tensor) -> PagedView:
        """vLLM's pages [page, kv_head, token, key and value] with this layer's scales."""
        seen = kv_cache, layer._k_scale, layer._v_scale
        if self._seen is None or any(
            new is not old for new, old in zip(seen, self._seen, strict=True)
        ):
            if kv_cache.shape[-1] != 2 * self.head_size:
                raise UnsupportedError(
                    f"{BACKEND}: expected keys and values of one size, {self.head_size} each, got "
                    f"pages of {list(kv_cache.shape)}"
                )
            joint = kv_cache.view(E4M3.dtype) if self.is_fp8 else kv_cache
            key_pages, value_pages = joint_pages(joint)
            nothing = torch.zeros(0, dtype=torch.int32, device=kv_cache.device)
            self._seen = seen
            self._view = PagedView(
                key_pages=key_pages,
                value_pages=value_pages,
                key_scale=self._scale(layer._k_scale),
                value_scale=self._scale(layer._v_scale),
                page_table=nothing.view(0, 0),
                lengths=nothing,
            )
        assert self._view is not None
        return self._view

    def _scale(self, scale: Tensor) -> Tensor:
        """A layer's scale as pages take it: [], or [num_kv_heads] if each head has its own."""
        if not self.is_fp8:
            return torch.ones((), dtype=torch.float32, device=scale.device)
        return scale.reshape(()) if scale.numel() == 1 else scale.reshape(self.num_kv_heads)
