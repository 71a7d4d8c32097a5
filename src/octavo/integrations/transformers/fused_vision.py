"""Forwards of attention modules that hand their projections to our attention without a detour.

A module of transformers rotates queries and keys in float32, rounds them and turns all three around
before it calls its attention function. Here, rotation and quantization are one op. A forward is put
on the instance, and only if the module's class is as transformers wrote it.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
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

Forward = Callable[..., Any]


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
    if module.config._attn_implementation != IMPLEMENTATION:
        raise ConfigError(
            f"{layer}: expected the attention implementation {IMPLEMENTATION!r} that apply_ set in "
            f"the config, got {module.config._attn_implementation!r}: restore_ the model first"
        )
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
    """The forward that can replace a module's own; None if its class is not as we know it.

    A forward that is overridden, wrapped or replaced (by hooks that move its inputs) stays.
    """
    own = type(module).forward
    name = f"{own.__module__}.{getattr(own, '__qualname__', '')}"
    forward = _FORWARDS.get(name)
    if forward is None or hasattr(own, "__wrapped__") or "forward" in vars(module):
        return None
    has_same_parameters = _parameters(own) == _parameters(forward)
    has_same_children = {child for child, _ in module.named_children()} == _CHILDREN[forward]
    return forward if has_same_parameters and has_same_children else None


def _parameters(function: Forward) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def is_fused(module: nn.Module) -> bool:
    """Whether the module runs a forward of ours."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func in _CHILDREN


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


# The full names of forwards that we know, and what replaces them.
_FORWARDS: dict[str, Forward] = {
    f"transformers.models.{name}.modeling_{name}.{family.attention}.forward": packed_forward
    for name, family in FAMILIES.items()
}
_FORWARDS[f"transformers.models.whisper.modeling_whisper.{WHISPER}.forward"] = whisper_forward
# What a module must have, and no more: a norm of queries, say, would be left out.
_CHILDREN: dict[Forward, set[str]] = {
    packed_forward: {"qkv", "proj"},
    whisper_forward: {"q_proj", "k_proj", "v_proj", "out_proj"},
}
