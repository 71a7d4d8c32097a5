"""Forwards of attention modules that hand their projections to our attention without a detour.

A module of transformers rotates queries and keys in float32, rounds them and turns all three around
before it calls its attention function. Here, rotation and quantization are one op.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.transformers import fused_forward
from octavo.integrations.transformers.fused_forward import Replacement, check_implementation
from octavo.numerics.rotary import Rotary


class Family(NamedTuple):
    """A family whose towers take the packed patches of all images: (hidden_states, grid_thw).

    has_graphs: whether tables of positions can be made outside of the tower's forward. is_served:
    whether the engine reads images for its models.
    """

    attention: str
    tower: str
    has_graphs: bool = False
    is_served: bool = True


# By model_type.
FAMILIES = {
    "glm4v": Family("Glm4vVisionAttention", "Glm4vVisionModel", is_served=False),
    "qwen2_vl": Family("VisionAttention", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": Family("Qwen2_5_VLVisionAttention", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": Family("Qwen3VLVisionAttention", "Qwen3VLVisionModel", True),
    "qwen3_vl_moe": Family("Qwen3VLMoeVisionAttention", "Qwen3VLMoeVisionModel", True),
    "qwen3_5": Family("Qwen3_5VisionAttention", "Qwen3_5VisionModel", True),
    "qwen3_5_moe": Family("Qwen3_5MoeVisionAttention", "Qwen3_5MoeVisionModel", True),
}
PACKED_TOWERS = tuple(sorted(family.tower for family in FAMILIES.values()))
# The name that apply_ writes into a tower's config.
IMPLEMENTATION = "octavo_flash_vit"
# Where the layer of a module lies, among its children: moved, copied and saved with it.
CHILD = "octavo_attention"
# What attention functions read and would change the result; other keywords only pass through a
# module (use_cache, output_hidden_states, …).
READ_BY_ATTENTION = (
    "attention_mask",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
)
WHISPER = "WhisperAttention"

Forward = fused_forward.Forward


def packed_forward(
    module: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    max_seqlen: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """The forward of the Qwen families and GLM-4V: all images [tokens, hidden] in one call.

    position_embeddings: cos and sin, [tokens, head_dim]; their halves are the same.
    """
    layer = getattr(module, CHILD)
    check_implementation(module, layer, IMPLEMENTATION)
    dropout = module.attention_dropout if module.training else 0.0
    check_call(type(module).__name__, dropout, kwargs, READ_BY_ATTENTION)
    if module.scaling != layer.spec.softmax_scale:
        raise UnsupportedError(
            f"{layer}: expected scaling {layer.spec.softmax_scale}, got {module.scaling}"
        )
    if max_seqlen is None:
        # The bound that is known without asking the device. Towers pass the longest image's.
        max_seqlen = hidden_states.shape[0]
    qkv = module.qkv(hidden_states).unflatten(-1, (3, module.num_heads, module.head_dim))
    out = layer(
        *qkv.unbind(-3),
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_seqlen=max_seqlen,
        rotary=_rotary(module, position_embeddings, hidden_states.shape[0]),
    )
    return module.proj(out.flatten(-2))  # type: ignore[no-any-return]


def whisper_forward(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The forward of Whisper's attention in the encoder: no cache, no mask, keys of its own.

    Whisper multiplies queries by the softmax scale before they meet keys; here the softmax does.
    """
    refused = {
        "key_value_states": key_value_states,
        "past_key_values": past_key_values,
        "attention_mask": attention_mask,
        "output_attentions": output_attentions or None,
    }
    dropout = module.dropout if module.training else 0.0
    given, names = {**kwargs, **refused}, {*READ_BY_ATTENTION, *refused}
    check_call(type(module).__name__, dropout, given, names)
    qkv = (proj(hidden_states) for proj in (module.q_proj, module.k_proj, module.v_proj))
    return module.out_proj(getattr(module, CHILD)(*qkv)), None


def find_forward(module: nn.Module) -> Forward | None:
    """The forward that can replace a module's own; None if its class is not as we know it."""
    return fused_forward.find_forward(module, _KNOWN)


def is_fused(module: nn.Module) -> bool:
    """Whether the module runs a forward of ours."""
    return fused_forward.is_fused(module, (packed_forward, whisper_forward))


def _rotary(module: Any, tables: tuple[Tensor, Tensor] | None, num_tokens: int) -> Rotary:
    if tables is None:
        raise ConfigError(f"{type(module).__name__}: expected position_embeddings, got none")
    cos, sin = tables
    expected = (num_tokens, module.head_dim)
    if cos.shape != expected or sin.shape != expected:
        raise ConfigError(
            f"{type(module).__name__}: expected position_embeddings of shape {list(expected)}, got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    num_pairs = module.head_dim // 2
    return Rotary(cos[:, :num_pairs], sin[:, :num_pairs])


def check_call(kind: str, dropout: float, options: dict[str, Any], refused: Iterable[str]) -> None:
    """Raise for dropout and options that attention of a kind of module would not do."""
    if given := sorted(name for name in refused if options.get(name) is not None):
        raise UnsupportedError(
            f"{kind}: expected attention of tokens to their whole sequence, got {', '.join(given)}"
        )
    if dropout:
        raise UnsupportedError(f"{kind}: this attention is for inference, got dropout {dropout}")


# By the full names of the forwards that are replaced.
_KNOWN: dict[str, Replacement] = {
    f"transformers.models.{name}.modeling_{name}.{family.attention}.forward": Replacement(
        packed_forward, frozenset({"qkv", "proj"})
    )
    for name, family in FAMILIES.items()
}
_KNOWN[f"transformers.models.whisper.modeling_whisper.{WHISPER}.forward"] = Replacement(
    whisper_forward, frozenset({"q_proj", "k_proj", "v_proj", "out_proj"})
)
