"""What a decoder computes for each token, from its config alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.linear import plan_linear
from octavo.integrations.traced_work import LinearWork
from octavo.integrations.transformers import decoder, text, vision_tower
from octavo.integrations.transformers.cache_layers import CacheLayer
from octavo.integrations.transformers.engine_images import has_vision
from octavo.integrations.transformers.engine_model import why_not_paged, why_not_served
from octavo.integrations.transformers.gguf_file import pretrained_source
from octavo.integrations.transformers.load import loading

# Beside those of decoder.CONFIGS, which benchmarks can make; towers are in vision_tower.CONFIGS.
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
}
_QWEN3 = {"head_dim": 128, "vocab_size": 151936, "num_attention_heads": 32}
LANGUAGE_MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "qwen3-vl-30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "max_position_embeddings": 262144,
    },
    "qwen3-vl-8b": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
    },
}


@dataclass(frozen=True)
class ExpertWork:
    """Experts that are kept in one tensor for each layer, which no recipe reaches."""

    num_layers: int
    num_experts: int
    num_per_token: int
    num_weights: int  # of one expert

    def num_read(self, num_tokens: int) -> float:
        """How many experts of a layer so many tokens need, if each chooses at random."""
        return self.num_experts * (1 - (1 - self.num_per_token / self.num_experts) ** num_tokens)


@dataclass(frozen=True)
class DecoderWork:
    """A decoder's layers; linear: those of one token, without the head."""

    layers: tuple[CacheLayer, ...]
    num_heads: int
    linear: tuple[LinearWork, ...]
    head: LinearWork
    weight_bytes: int  # in BF16
    experts: ExpertWork | None = None
    has_qk_norm: bool = False
    has_sinks: bool = False
    max_length: int | None = None
    other_parts: tuple[str, ...] = ()  # with linear layers beside the decoder's: a vision tower

    @property
    def head_dim(self) -> int:
        """The largest of all layers."""
        return max(layer.head_dim for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """The different windows, smallest first."""
        return tuple(sorted({layer.window for layer in self.layers if layer.window is not None}))

    @property
    def fp8_weight_bytes(self) -> int:
        """In FP8 where a recipe reaches; a scale for each output of a layer."""
        reached = [one for one in self.linear if one.is_reached]
        return self.weight_bytes - sum(one.num_weights - 4 * one.outputs for one in reached)


@dataclass(frozen=True)
class LanguageWork:
    """A language model, and what octavo can do with it.

    decoder: None if its layers have no keys and values of their own, which times are computed from.
    refused: why the engine does not run it, uncached: why `apply_` cannot give it an FP8 cache;
    None if they can. reads_images: whether the engine does, for such a model.
    """

    decoder: DecoderWork | None
    weight_bytes: int  # in BF16
    fp8_weight_bytes: int
    refused: str | None
    uncached: str | None
    reads_images: bool


def named_decoder(name: str) -> DecoderWork:
    """That of a name of `decoder.CONFIGS` or `LANGUAGE_MODELS`."""
    if name in decoder.CONFIGS:
        return decoder_work(decoder.make_decoder(name, torch.device("meta")))
    if name not in LANGUAGE_MODELS:
        known = ", ".join((*decoder.CONFIGS, *LANGUAGE_MODELS))
        raise ConfigError(f"expected a decoder of {known}; got {name!r}")
    from transformers import AutoConfig

    sizes = dict(LANGUAGE_MODELS[name])
    work = decoder_work(_make(AutoConfig.for_model(sizes.pop("model_type"), **sizes)))
    return replace(work, other_parts=("visual",)) if name in vision_tower.CONFIGS else work


def language_of_config(config: Any) -> LanguageWork:
    """That of a config of transformers."""
    model = _make(config)
    refused, decoder, uncached = why_not_served(model), None, None
    try:
        decoder = decoder_work(model)
    except UnsupportedError as error:
        uncached = str(error)
    if refused is not None and decoder is not None:
        uncached = why_not_paged(model)
    return LanguageWork(decoder, *_weight_bytes(model), refused, uncached, has_vision(model))


def _weight_bytes(model: Any) -> tuple[int, int]:
    """In BF16, and with linear layers in FP8 where a recipe reaches."""
    num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    try:
        chosen = plan_linear(model).chosen
    except ConfigError:  # nothing to quantize: GPT-2's layers are no nn.Linear
        return num_bytes, num_bytes
    weights = [model.get_submodule(name).weight for name in chosen]
    return num_bytes, num_bytes - sum(weight.numel() - 4 * len(weight) for weight in weights)


def _make(config: Any) -> Any:
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
    # Others look at which experts the tokens chose, which the meta device cannot say.
    model.set_experts_implementation("batched_mm")
    return model


def decoder_work(model: Any) -> DecoderWork:
    """That of a model, which may be on the meta device."""
    windows, modules = text.find_windows(model), text.find_layers(model)
    prefix, language = text.find_decoder(model)
    chosen = plan_linear(model).chosen
    head_name = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    found = [
        LinearWork(name, module.in_features, module.out_features, is_reached=name in chosen)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (name == head_name or _is_in(name, prefix))
    ]
    config: Any = language.config
    attention: Any = list(modules.values())
    parameters = {id(p): p.numel() for p in model.parameters()}
    embedding = model.get_input_embeddings().weight
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    if is_tied:
        parameters.pop(id(model.get_output_embeddings().weight), None)
        parameters[id(embedding)] = embedding.numel()
    return DecoderWork(
        layers=tuple(
            CacheLayer(
                name,
                module.layer_idx,  # type: ignore[arg-type]
                module.config.num_key_value_heads,  # type: ignore[union-attr, arg-type]
                module.head_dim,  # type: ignore[arg-type]
                windows[name],
            )
            for name, module in modules.items()
        ),
        num_heads=config.num_attention_heads,
        linear=tuple(one for one in found if one.name != head_name),
        head=next(one for one in found if one.name == head_name),
        weight_bytes=2 * sum(parameters.values()),
        experts=_experts(language, config),
        has_qk_norm=all(hasattr(module, "q_norm") for module in attention),
        has_sinks=any(getattr(module, "sinks", None) is not None for module in attention),
        max_length=getattr(config, "max_position_embeddings", None),
        other_parts=_other_parts(prefix, [name for name in chosen if not _is_in(name, prefix)]),
    )


def _other_parts(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    """The components beside the decoder's own that layers of these names are in."""
    depth = prefix.count(".")
    return tuple(dict.fromkeys(name.split(".")[depth] for name in names))


def _is_in(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def _experts(model: nn.Module, config: Any) -> ExpertWork | None:
    """Those in one tensor [experts, …]; experts that are linear layers are among these."""
    number = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    sizes = [
        sum(p.numel() // number for p in own)
        for module in model.modules()
        if number
        and (own := [p for p in module.parameters(recurse=False) if p.dim() == 3])
        and all(p.shape[0] == number for p in own)
    ]
    if not number or not sizes:
        return None
    return ExpertWork(len(sizes), number, config.num_experts_per_tok, max(sizes))


def read_config(folder: Path) -> Any:
    """The config of a model's folder or GGUF file."""
    from transformers import AutoConfig

    source, options = pretrained_source(str(folder))
    with loading(folder, "a model's config.json"):
        return AutoConfig.from_pretrained(source, **options, trust_remote_code=False)
