"""Forwards of decoders' attention modules that hand their projections straight to paged layers.

A module of transformers turns queries and keys in a dozen small kernels, and rounds them, before it
calls its cache and its attention function. Here, turning and storing are one op, in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from octavo.integrations.transformers import fused_forward
from octavo.integrations.transformers.decoder_layers import check_call
from octavo.integrations.transformers.fused_forward import (
    Forward,
    Replacement,
    check_implementation,
)
from octavo.integrations.transformers.paged_steps import Pass, Tables

# The name that apply_ writes into a decoder's config.
IMPLEMENTATION = "octavo"
PASS = "octavo_pass"  # the keyword by which attention gets what the layers of a pass share

# What modules of a family give their attention function besides scaling and dropout.
Options = Callable[[Any], dict[str, Any]]


def rotary_forward(
    options: Options,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Tables | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The forward of Llama and its relatives; without pages to store in, the class's own.

    position_embeddings: cos and sin, [1 or batch, columns, head_dim]; their halves are the same.
    """
    run: Pass | None = kwargs.get(PASS)
    has_cache = past_key_values is not None and position_embeddings is not None
    if run is None or not has_cache or run.cache is not past_key_values:
        given = (hidden_states, position_embeddings, attention_mask, past_key_values)
        return type(module).forward(module, *given, **kwargs)  # type: ignore[no-any-return]
    if run.config is not module.config:
        check_implementation(module, type(module).__name__, IMPLEMENTATION)
        run.config = module.config
    dropout = module.attention_dropout if module.training else 0.0
    call = {"dropout": dropout, "scaling": module.scaling, **options(module), **kwargs}
    check_call(module, attention_mask, call)
    # All at once: Module.__getattr__ takes long to find a child.
    parts = dict(module.named_children())
    batch, num_columns = hidden_states.shape[:2]
    heads = batch * num_columns, -1, module.head_dim
    q = parts["q_proj"](hidden_states).view(heads)
    k = parts["k_proj"](hidden_states).view(heads)
    v = parts["v_proj"](hidden_states).view(heads)
    if "q_norm" in parts:
        q, k = parts["q_norm"](q), parts["k_norm"](k)
    layer = run.layers[module.layer_idx]
    if not layer.is_initialized:
        layer.lazy_initialization(*(x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (k, v)))
    layer.expect(num_columns)
    sinks, tables = kwargs.get("s_aux"), position_embeddings
    out = layer.attend(q, k, v, num_columns, run, mask=attention_mask, sinks=sinks, tables=tables)
    return parts["o_proj"](out.flatten(2)), None


def find_forward(module: nn.Module) -> Forward | None:
    """The forward that can replace a module's own; None if its class is not as we know it."""
    return fused_forward.find_forward(module, _KNOWN)


def is_fused(module: nn.Module) -> bool:
    """Whether the module runs a forward of ours."""
    return fused_forward.is_fused(module, (rotary_forward,))


def _no_options(module: Any) -> dict[str, Any]:
    return {}


def _own_window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


def _window_of_config(module: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(module.config, "sliding_window", None)}


def _window_and_cap(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window, "softcap": module.attn_logit_softcapping}


_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_WITH_NORMS = _PROJECTIONS | {"q_norm", "k_norm"}
# Families of models whose modules are alike: children, options, and classes by model_type.
_FAMILIES: list[tuple[frozenset[str], Options, dict[str, str]]] = [
    (
        _PROJECTIONS,
        _no_options,
        {
            "arcee": "ArceeAttention",
            "gemma": "GemmaAttention",
            "granite": "GraniteAttention",
            "granitemoe": "GraniteMoeAttention",
            "granitemoeshared": "GraniteMoeSharedAttention",
            "hyperclovax": "HyperCLOVAXAttention",
            "jais2": "Jais2Attention",
            "llama": "LlamaAttention",
            "phimoe": "PhimoeAttention",
            "qwen2_moe": "Qwen2MoeAttention",
            "solar_open": "SolarOpenAttention",
        },
    ),
    (
        _PROJECTIONS,
        _own_window,
        {"cwm": "CwmAttention", "ministral": "MinistralAttention", "qwen2": "Qwen2Attention"},
    ),
    (
        _PROJECTIONS,
        _window_of_config,
        {"mistral": "MistralAttention", "mixtral": "MixtralAttention"},
    ),
    (
        _PROJECTIONS,
        _window_and_cap,
        {"gemma2": "Gemma2Attention", "vaultgemma": "VaultGemmaAttention"},
    ),
    (
        _WITH_NORMS,
        _no_options,
        {"qwen3_vl": "Qwen3VLTextAttention", "qwen3_vl_moe": "Qwen3VLMoeTextAttention"},
    ),
    (
        _WITH_NORMS,
        _own_window,
        {
            "dots1": "Dots1Attention",
            "gemma3": "Gemma3Attention",
            "mellum": "MellumAttention",
            "qwen3": "Qwen3Attention",
            "qwen3_moe": "Qwen3MoeAttention",
        },
    ),
]
# By the full names of the forwards that are replaced.
_KNOWN: dict[str, Replacement] = {
    f"transformers.models.{name}.modeling_{name}.{kind}.forward": Replacement(
        partial(rotary_forward, options), children
    )
    for children, options, kinds in _FAMILIES
    for name, kind in kinds.items()
}
