"""Attention layers of transformers' decoders: which modules they are, and what they have."""

from typing import Any

from torch import nn

from octavo.brief import list_names
from octavo.errors import UnsupportedError
from octavo.layers.decoder_attention import why_not_centered
from octavo.patterns import Layer

# What the attention of a decoder has, whatever its family; layer_idx is its place in a cache.
_ATTRIBUTES = ("layer_idx", "head_dim", "scaling", "is_causal", "num_key_value_groups")
# Attention over a compressed latent: keys and values of their own do not exist there.
_LATENT = ("kv_lora_rank", "kv_a_proj_with_mqa", "kv_a_layernorm")


def context_length(config: Any) -> int | None:
    """How many tokens a decoder was made for; None if its config does not say."""
    names = ("max_position_embeddings", "n_positions", "max_sequence_length")
    return next((int(found) for name in names if (found := getattr(config, name, None))), None)


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules of a decoder by name, in the order of their layers."""
    found = {name: module for name, module in model.named_modules() if is_attention(module)}
    if not found:
        kinds = sorted({type(m).__name__ for m in model.modules() if hasattr(m, "layer_idx")})
        raise UnsupportedError(
            "expected a decoder with attention over keys and values of its own (Llama, Qwen3, "
            f"Mistral, gpt-oss, Gemma, SmolLM, …), got {type(model).__name__} with "
            f"{list_names(kinds) or 'no such layer'}"
        )
    return found


def is_attention(module: Any) -> bool:
    """Whether a module is causal attention with a place in the cache, and no latent attention."""
    has_all = all(hasattr(module, name) for name in _ATTRIBUTES)
    if not has_all or any(hasattr(module, name) for name in _LATENT):
        return False
    return isinstance(module.layer_idx, int) and module.is_causal is True


def find_others(model: nn.Module) -> dict[str, str]:
    """Modules with a place in the cache that no recipe reaches, by name: their kind."""
    modules = dict(model.named_modules())
    placed = [n for n, m in modules.items() if isinstance(getattr(m, "layer_idx", None), int)]
    # A decoder layer may know its index, too: the module that attends is inside.
    innermost = [n for n in placed if not any(other.startswith(f"{n}.") for other in placed)]
    return {n: type(modules[n]).__name__ for n in innermost if not is_attention(modules[n])}


def find_decoder(model: nn.Module) -> tuple[str, nn.Module]:
    """The module that runs the layers, which every call with a cache goes through; its name too."""
    first = next(iter(find_layers(model)))
    name = first.rpartition(".layers.")[0] if ".layers." in first else ""
    decoder = model.get_submodule(name)
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise UnsupportedError(
            f"expected a list named layers, got {first} in {type(decoder).__name__}"
        )
    return name, decoder


def find_windows(model: nn.Module) -> dict[str, int | None]:
    """How many keys, their own included, queries of each layer see; None: all. By name."""
    from transformers import DynamicCache

    found, (_, decoder) = find_layers(model), find_decoder(model)
    config: Any = decoder.config
    layers = DynamicCache(config=config).layers
    return {
        name: getattr(layers[module.layer_idx], "sliding_window", None)
        for name, module in found.items()
    }


def find_uncentered(model: nn.Module) -> dict[str, str]:
    """Layers of whose keys no mean may be taken, by name: why."""
    found = {}
    for name, module in find_layers(model).items():
        has_softcap = getattr(module, "attn_logit_softcapping", None) is not None
        has_sinks = getattr(module, "sinks", None) is not None
        if reason := why_not_centered(has_softcap=has_softcap, has_sinks=has_sinks):
            found[name] = reason
    return found


def as_patterns_see(model: nn.Module) -> list[Layer]:
    """The layers as patterns (skip_layers) look at them."""
    found, windows = find_layers(model), find_windows(model)
    return [
        Layer(name, module.layer_idx, windows[name] is not None)  # type: ignore[arg-type]
        for name, module in found.items()
    ]
