"""What a decoder computes for each token, and a tower for each patch, from their configs alone."""

import copy
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.linear import plan_linear
from octavo.integrations.traced_work import LinearWork, trace
from octavo.integrations.transformers import decoder, text, vision_tower
from octavo.integrations.transformers.cache_layers import CacheLayer, empty_model, find_cache_layers
from octavo.integrations.transformers.engine_images import has_vision
from octavo.integrations.transformers.engine_model import why_not_paged, why_not_served
from octavo.internals import require

# Patches of a side of the image that is traced: what is counted grows with their number.
_SIDE = 8


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

    decoder: None if its layers have no keys and values. refused: why the engine does not run it.
    uncached: why `apply_` gives it no FP8 cache. reads_images: whether the engine does.
    """

    decoder: DecoderWork | None
    weight_bytes: int  # in BF16
    fp8_weight_bytes: int
    refused: str | None
    uncached: str | None
    reads_images: bool


def named_decoder(name: str) -> DecoderWork:
    """That of a name of `decoder.CONFIGS` or `decoder.LANGUAGE_MODELS`."""
    if name in decoder.CONFIGS:
        return decoder_work(decoder.make_decoder(name, torch.device("meta")))
    if name not in decoder.LANGUAGE_MODELS:
        known = ", ".join((*decoder.CONFIGS, *decoder.LANGUAGE_MODELS))
        raise ConfigError(f"expected a decoder of {known}; got {name!r}")
    from transformers import AutoConfig

    sizes = dict(decoder.LANGUAGE_MODELS[name])
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
    weights: list[Any] = []
    with suppress(ConfigError):  # nothing to quantize: GPT-2's layers are no nn.Linear
        weights = [model.get_submodule(name).weight for name in plan_linear(model).chosen]
    weight_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    fp8_weight_bytes = weight_bytes - sum(x.numel() - 4 * len(x) for x in weights)
    has_images = has_vision(model)
    return LanguageWork(decoder, weight_bytes, fp8_weight_bytes, refused, uncached, has_images)


def _make(config: Any) -> Any:
    model = empty_model(config)
    # Others look at which experts the tokens chose, which the meta device cannot say.
    model.set_experts_implementation("batched_mm")
    return model


def decoder_work(model: Any) -> DecoderWork:
    """That of a model, which may be on the meta device."""
    attention: list[Any] = list(text.find_layers(model).values())
    prefix, language = text.find_decoder(model)
    chosen = plan_linear(model).chosen
    head = model.get_output_embeddings()
    linear = {
        id(module): LinearWork(
            name, module.in_features, module.out_features, is_reached=name in chosen
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (module is head or _is_in(name, prefix))
    }
    outside, depth = [name for name in chosen if not _is_in(name, prefix)], prefix.count(".")
    config: Any = language.config
    parameters = {id(p): p.numel() for p in model.parameters()}
    if getattr(config, "tie_word_embeddings", False):
        embedding = model.get_input_embeddings().weight
        parameters.pop(id(head.weight), None)
        parameters[id(embedding)] = embedding.numel()
    return DecoderWork(
        layers=find_cache_layers(model),
        num_heads=config.num_attention_heads,
        head=linear.pop(id(head)),
        linear=tuple(linear.values()),
        weight_bytes=2 * sum(parameters.values()),
        experts=_experts(language, config),
        has_qk_norm=all(hasattr(module, "q_norm") for module in attention),
        has_sinks=any(getattr(module, "sinks", None) is not None for module in attention),
        max_length=getattr(config, "max_position_embeddings", None),
        other_parts=tuple(dict.fromkeys(n.split(".")[depth] for n in outside)),
    )


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


@dataclass(frozen=True)
class TowerWork:
    """A vision tower; linear: of all its layers, with `rows` for each patch of an image.

    attention_bytes, other_bytes: what ops of a block that are no products read and write for each
    patch, inside attention and outside, without a compiler.
    """

    depth: int
    num_heads: int
    head_dim: int
    unit: int  # pixels that sides of an image are multiples of
    patch: int
    linear: tuple[tuple[LinearWork, float], ...]  # with rows for each patch
    attention_bytes: float
    other_bytes: float
    weight_bytes: int

    def num_patches(self, height: int, width: int) -> int:
        """Of an image of this size, after it is made a multiple of the unit."""
        rows, columns = vision_tower.resized(height, width, self.unit)
        return (rows // self.patch) * (columns // self.patch)


def named_tower(name: str) -> TowerWork:
    """That of a name of `vision_tower.CONFIGS`."""
    return tower_of_config(vision_tower.named_config(name))


@torch.no_grad()
def tower_of_config(config: Any) -> TowerWork:
    """That of a vision config of transformers: one block is run, on a small image."""
    require("transformers.PreTrainedConfig._attn_implementation")
    config, depth = copy.deepcopy(config), getattr(config, "depth", 0)
    if indexes := getattr(config, "deepstack_visual_indexes", None) or []:
        config.deepstack_visual_indexes = [0]
    with torch.device("meta"):
        tower = vision_tower.tower_of(config, num_layers=1)
    tower.config._attn_implementation = "sdpa"
    # Positions are computed from numbers of the grid, which the meta device has not; what the
    # weights are does not matter.
    tower = tower.to_empty(device="cpu")
    num_values = tower.patch_embed.proj.weight[0].numel()
    pixels = torch.zeros(_SIDE**2, num_values, dtype=torch.bfloat16)
    grid = torch.tensor([[1, _SIDE, _SIDE]])
    places = {"blocks.0": "block", "blocks.0.attn": "attention"}
    seen = trace(tower, lambda: tower(pixels, grid_thw=grid), places, has_bytes=True)
    counts = {True: depth, False: 1}
    linear = []
    for one in seen.linear:
        is_deep = one.name.startswith("deepstack")
        count = len(indexes) if is_deep else counts[one.name.startswith("blocks.")]
        linear += [(one, one.rows / _SIDE**2)] * count
    heads = seen.attention[0]
    return TowerWork(
        depth=depth,
        num_heads=heads.num_heads,
        head_dim=heads.head_dim,
        unit=config.patch_size * config.spatial_merge_size,
        patch=config.patch_size,
        linear=tuple(linear),
        attention_bytes=seen.other_bytes["attention"] / _SIDE**2,
        other_bytes=seen.other_bytes["block"] / _SIDE**2,
        weight_bytes=2 * sum(one.num_weights for one, _ in linear),
    )
