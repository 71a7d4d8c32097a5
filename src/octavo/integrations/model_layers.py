"""Which shapes a model's layers have, from its config.json alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError, ConfigError
from octavo.layers.warmup import linear_layers
from octavo.numerics.attention import AttentionSpec
from octavo.ops.warm_up import ROWS, AttentionLayers, Layers

KV_CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
}


def layers_to_warm_up(
    model: Path, tokens: Sequence[int], linear: Mapping[str, Any], kv_cache_dtype: str
) -> list[Layers]:
    """The layers of a model of transformers or diffusers that kernels are compiled for.

    tokens: numbers of them, beside the usual ones of a language model. linear: settings of the FP8
    linear layers.
    """
    # Without importing diffusers, which models of transformers do not need.
    file = model / "config.json" if model.is_dir() else model
    has_class = file.is_file() and '"_class_name"' in file.read_text("utf-8", "replace")
    if has_class or (model / "model_index.json").is_file():
        from octavo.integrations.diffusers.full_size import read_linear_shapes

        if not tokens:
            raise ConfigError(f"expected --tokens for {model}, of diffusers, got none")
        sizes = read_linear_shapes(model)
        return [*linear_layers([(m, k, n) for k, n in sizes for m in tokens], linear)]
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        expected = ", ".join(KV_CACHE_DTYPES)
        raise ConfigError(f"expected a KV cache dtype, one of {expected}; got {kv_cache_dtype!r}")
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"expected a model's config.json at {model}, got: {error}") from error
    text = config.get("text_config", config)
    if "num_attention_heads" not in text:
        raise CheckpointError(
            "expected num_attention_heads in the config or its text_config, got "
            f"{', '.join(sorted(text)) or 'nothing'}"
        )
    rows = tuple(sorted({*ROWS, *tokens}))
    like = linear_layers([(1, 16, 16)], linear)[0]
    layers: list[Layers] = [*_decoder(text, KV_CACHE_DTYPES[kv_cache_dtype])]
    layers += [replace(like, columns=n, depth=k, rows=rows) for n, k in _linear_shapes(text)]
    if vision := config.get("vision_config"):
        num_heads = vision.get("num_heads") or vision.get("num_attention_heads")
        if num_heads is None:
            raise CheckpointError("expected num_heads or num_attention_heads in the vision_config")
        both = {"num_heads": num_heads, "num_kv_heads": num_heads}
        head_dim = _head_dim(vision, num_heads)
        layers.append(AttentionLayers(**both, head_dim=head_dim, is_decoder=False))
    return layers


def _decoder(text: Mapping[str, Any], page_dtype: torch.dtype) -> list[AttentionLayers]:
    """Full attention, and with a window where the model has such layers."""
    num_heads = text["num_attention_heads"]
    softcap = text.get("attn_logit_softcapping")
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    is_mixed = "full_attention" in (text.get("layer_types") or ())
    windows = {window or None, None} if is_mixed else {window or None}
    return [
        AttentionLayers(
            num_heads=num_heads,
            num_kv_heads=text.get("num_key_value_heads") or num_heads,
            head_dim=_head_dim(text, num_heads),
            page_dtype=page_dtype,
            spec=AttentionSpec(causal=True, window=one, softcap=softcap),
            has_sinks=text.get("model_type") == "gpt_oss",
        )
        for one in sorted(windows, key=lambda size: size or 0)
    ]


def _linear_shapes(text: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Outputs and inputs of the projections of attention and of a gated MLP, each shape once."""
    hidden, num_heads = text["hidden_size"], text["num_attention_heads"]
    head_dim = _head_dim(text, num_heads)
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    shapes = [(num_heads * head_dim, hidden), (num_kv_heads * head_dim, hidden)]
    shapes.append((hidden, num_heads * head_dim))
    if inner := text.get("intermediate_size"):
        shapes += [(inner, hidden), (hidden, inner)]
    return list(dict.fromkeys(shapes))


def _head_dim(part: Mapping[str, Any], num_heads: int) -> int:
    head_dim: int = part.get("head_dim") or part["hidden_size"] // num_heads
    return head_dim
