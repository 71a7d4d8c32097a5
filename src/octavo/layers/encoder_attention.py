"""EncoderAttention: attention without a cache, in FP8 with scales of its own or as the model is."""

import torch.distributed as dist
from torch import Tensor, nn

from octavo import ops
from octavo.errors import ConfigError
from octavo.layers.scaling import DynamicScaling, StaticScaling, Three
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qkv import QkvScales
from octavo.numerics.rotary import Rotary
from octavo.ops.check import check_fp8_device
from octavo.recipe import AttentionSettings


class EncoderAttention(nn.Module):
    """softmax(q·kᵀ · scale)·v of whole sequences: images, latents, audio.

    fp8: how q, k and v are quantized; None leaves attention in their own dtype. scales: of a layer
    whose scaling is static. name: what errors and scale files call the layer. impl: of the op
    `attention`; left out, the fastest that can, and on a GPU without FP8 an error: there, the
    reference runs only by its name. group: ranks that have the layer's other heads.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        name: str = "",
        *,
        fp8: AttentionSettings | None = None,
        scales: QkvScales | None = None,
        promote_every: int | None = 1,
        impl: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(num_heads, num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads:
            raise ConfigError(
                f"expected heads that KV heads divide, and a head_dim, got {num_heads} heads, "
                f"{num_kv_heads} KV heads and head_dim {head_dim}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.name, self.impl = name, impl
        self.spec = AttentionSpec(softmax_scale=scale, promote_every=promote_every)
        self.scaling = self._scaling(fp8, scales, group)

    def _scaling(
        self,
        fp8: AttentionSettings | None,
        scales: QkvScales | None,
        group: dist.ProcessGroup | None,
    ) -> DynamicScaling | StaticScaling | None:
        is_static = fp8 is not None and fp8.scaling == "static"
        if is_static and scales is None:
            raise ConfigError(f"{self}: scaling is static: expected its scales, got none")
        if scales is not None and not is_static:
            scaling = "none" if fp8 is None else fp8.scaling
            raise ConfigError(f"{self}: expected static scaling for given scales, got {scaling}")
        heads = (self.num_heads, self.num_kv_heads)
        if scales is not None:
            return StaticScaling(scales, *heads)
        if fp8 is None:
            return None
        granularity = PerHead() if fp8.granularity == "head" else PerTensor()
        return DynamicScaling(granularity, *heads, group=group)

    def __str__(self) -> str:
        return f"attention layer {self.name or '(unnamed)'}"

    def extra_repr(self) -> str:
        """What a printed model shows of the layer."""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{self.name}: {heads}" if self.name else heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """The result, laid out as `query` is and in its dtype.

        query, key, value: [batch, length, heads, head_dim] or [batch, length, heads · head_dim].
        Packed sequences [tokens, …] or [1, tokens, …] come with cu_seqlens, int32 [sequences + 1],
        and max_seqlen, an upper bound of their lengths. rotary: queries and keys are turned first,
        in float32: on the way to FP8, or by an op of their own.
        """
        if (cu_seqlens is None) != (max_seqlen is None):
            raise ConfigError("expected cu_seqlens and max_seqlen, or neither, got one of them")
        packing = None
        if cu_seqlens is not None and max_seqlen is not None:
            packing = Packing.same(cu_seqlens, max_seqlen)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        named = zip(("query", "key", "value"), (query, key, value), heads, strict=True)
        q, k, v = (self._split(name, x, num, packing is not None) for name, x, num in named)
        return self._attend((q, k, v), packing, rotary).reshape(query.shape)

    def _attend(self, qkv: Three, packing: Packing | None, rotary: Rotary | None) -> Tensor:
        if self.scaling is None:
            q, k, v = qkv
            if rotary is not None:
                q, k = ops.rotate_qk(q, k, rotary)
            return ops.attention(q, k, v, self.spec, packing=packing, impl=self.impl)
        check_fp8_device(str(self), qkv[0].device, self.impl)
        # Transposed is what FP8 tensor cores read; the reference would only turn it back.
        is_transposed = qkv[0].is_cuda
        quantized = self.scaling.quantize(
            qkv,
            rotary=rotary,
            value_layout="transposed" if is_transposed else "rows",
            cu_seqlens=packing.cu_seqlens_k if packing is not None and is_transposed else None,
            num_tokens=None if packing is None else packing.cu_seqlens_k[-1:],
        )
        return ops.attention(
            *(quantized.q, quantized.k, quantized.v, self.spec, quantized.scales),
            packing=packing,
            out_dtype=qkv[0].dtype,
            value_layout=quantized.value_layout,
            impl=self.impl,
        )

    def _split(self, name: str, x: Tensor, num_heads: int, is_packed: bool) -> Tensor:
        """x as [batch, length, heads, head_dim], or packed [tokens, heads, head_dim]."""
        heads = (num_heads, self.head_dim)
        num_dims = 3 if is_packed else 4
        split = x
        is_joint = x.shape[-2:] != heads if is_packed else x.dim() == 3
        if is_joint and x.dim() > 1 and x.shape[-1] == num_heads * self.head_dim:
            split = x.unflatten(-1, heads)
        if is_packed and split.dim() == 4 and split.shape[0] == 1:
            split = split.squeeze(0)
        if split.dim() != num_dims or split.shape[-2:] != heads:
            first = "[tokens" if is_packed else "[batch, length"
            raise ConfigError(
                f"{self}: expected {name} of shape {first}, {num_heads}, {self.head_dim}] or with "
                f"{num_heads * self.head_dim} values side by side, got {list(x.shape)}"
            )
        return split
