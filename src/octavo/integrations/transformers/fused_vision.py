"""Forwards of attention modules that hand their projections to our attention without a detour.

A module of transformers rotates queries and keys in float32, rounds them, turns all three around
and only then calls its attention function. These forwards give the projections, as views, to the
module's layer: rotation and quantization are one op there, and rotation is one where attention
stays in BF16. A forward is put on the instance, where it hides the class's own; it is found by
class, and only if the class is as transformers wrote it.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.numerics.rotary import Rotary

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

    position_embeddings: cos and sin, [tokens, head_dim], whose halves are the same; the first is
    the table of our op as it lies there.
    """
    layer = getattr(module, CHILD)
    if module.config._attn_implementation != IMPLEMENTATION:
        raise ConfigError(
            f"{layer}: expected the attention implementation {IMPLEMENTATION!r} that apply_ set in "
            f"the config, got {module.config._attn_implementation!r}: restore_ the model first"
        )
    _check_call(module, module.attention_dropout, kwargs)
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
    _check_call(module, module.dropout, {**kwargs, **refused}, (*READ_BY_ATTENTION, *refused))
    qkv = (proj(hidden_states) for proj in (module.q_proj, module.k_proj, module.v_proj))
    return module.out_proj(getattr(module, CHILD)(*qkv)), None


def find_forward(module: nn.Module) -> Forward | None:
    """The forward that can replace a module's own; None if its class is not as we know it.

    A class that overrides or wraps forward, and a module whose forward was replaced (by hooks that
    move its inputs, for example), keep theirs.
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


def fuse(module: nn.Module, forward: Forward) -> None:
    """Let a module run `forward` instead of its class's own."""
    # A partial, not a method: those lose themselves when a module is pickled.
    vars(module)["forward"] = partial(forward, module)


def is_fused(module: nn.Module) -> bool:
    """Whether the module runs a forward of ours."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func in _CHILDREN


def unfuse(module: nn.Module) -> None:
    """Let a module run its class's forward again."""
    del vars(module)["forward"]


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


def _check_call(
    module: Any,
    dropout: float,
    options: dict[str, Any],
    refused: tuple[str, ...] = READ_BY_ATTENTION,
) -> None:
    """Whatever the layer would not do is refused, never dropped."""
    kind = type(module).__name__
    if given := sorted({name for name in refused if options.get(name) is not None}):
        raise UnsupportedError(
            f"{kind}: expected attention of all tokens to all of their sequence, got "
            f"{', '.join(given)}"
        )
    if module.training and dropout:
        raise UnsupportedError(f"{kind}: this attention is for inference, got dropout {dropout}")


_FAMILIES = {
    "glm4v": "Glm4vVisionAttention",
    "qwen2_5_vl": "Qwen2_5_VLVisionAttention",
    "qwen2_vl": "VisionAttention",
    "qwen3_5": "Qwen3_5VisionAttention",
    "qwen3_5_moe": "Qwen3_5MoeVisionAttention",
    "qwen3_vl": "Qwen3VLVisionAttention",
    "qwen3_vl_moe": "Qwen3VLMoeVisionAttention",
}
# The full names of forwards that we know, and what replaces them.
_FORWARDS: dict[str, Forward] = {
    f"transformers.models.{family}.modeling_{family}.{kind}.forward": packed_forward
    for family, kind in _FAMILIES.items()
}
_FORWARDS[f"transformers.models.whisper.modeling_whisper.{WHISPER}.forward"] = whisper_forward
# What a module must have, and no more: a norm of queries, say, would be left out.
_CHILDREN: dict[Forward, set[str]] = {
    packed_forward: {"qkv", "proj"},
    whisper_forward: {"q_proj", "k_proj", "v_proj", "out_proj"},
}
