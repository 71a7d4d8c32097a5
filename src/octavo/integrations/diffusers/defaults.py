"""Which linear layers of diffusion transformers stay in BF16, and why: data.

Patterns are those of `octavo.patterns`. `REQUIRED` reasons hold whatever a recipe includes; the
others are defaults, which `included_layers` of a recipe overrules. `weight_only_layers` overrules
those and modulation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from octavo.integrations.kept_reasons import (
    CONNECTOR,
    INPUT,
    MODULATION,
    OUTPUT,
    REFINER,
    TIME,
)
from octavo.integrations.linear import layer_index
from octavo.patterns import Layer, match_layers, parse_pattern

QWEN_IMG_MLP = "the image MLP of Qwen-Image: vllm-omni leaves it in BF16 for quality"
VISION_TOWER = "the vision tower of a text encoder: prompts of text alone do not reach it"


@dataclass(frozen=True)
class Kept:
    """The layers of one transformer class that stay: reasons by pattern.

    required: stay in any case. optional: stay unless a recipe includes them.
    """

    required: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)


_ADA_NORM_BLOCKS = {
    "norm1.linear": MODULATION,
    "norm1_context.linear": MODULATION,
    "norm_out": OUTPUT,
}
_OUT = {"re:^proj_out$": OUTPUT}  # inside a block of FLUX.1, proj_out is a layer like others

BY_CLASS: Mapping[str, Kept] = {
    "FluxTransformer2DModel": Kept(
        {
            "time_text_embed": TIME,
            "x_embedder": INPUT,
            "context_embedder": INPUT,
            "norm.linear": MODULATION,
            **_ADA_NORM_BLOCKS,
            **_OUT,
        }
    ),
    "Flux2Transformer2DModel": Kept(
        {
            "time_guidance_embed": TIME,
            "x_embedder": INPUT,
            "context_embedder": INPUT,
            "double_stream_modulation_img": MODULATION,
            "double_stream_modulation_txt": MODULATION,
            "single_stream_modulation": MODULATION,
            "norm_out": OUTPUT,
            **_OUT,
        }
    ),
    "QwenImageTransformer2DModel": Kept(
        {
            "time_text_embed": TIME,
            "img_in": INPUT,
            "txt_in": INPUT,
            "img_mod": MODULATION,
            "txt_mod": MODULATION,
            "norm_out": OUTPUT,
            **_OUT,
        },
        optional={"img_mlp": QWEN_IMG_MLP},
    ),
    "ZImageTransformer2DModel": Kept(
        {
            "t_embedder": TIME,
            "all_x_embedder": INPUT,
            "cap_embedder": INPUT,
            "siglip_embedder": INPUT,
            "all_final_layer": OUTPUT,
            "adaLN_modulation": MODULATION,
        }
    ),
    "WanTransformer3DModel": Kept(
        {
            "condition_embedder.time_embedder": TIME,
            "condition_embedder.time_proj": TIME,
            "condition_embedder.text_embedder": INPUT,
            "condition_embedder.image_embedder": INPUT,
            **_OUT,
        }
    ),
    "HunyuanVideo15Transformer3DModel": Kept(
        {
            "time_embed": TIME,
            "x_embedder": INPUT,
            "context_embedder": REFINER,
            "context_embedder_2": INPUT,
            "image_embedder": INPUT,
            **_ADA_NORM_BLOCKS,
            **_OUT,
        }
    ),
    "HunyuanVideoTransformer3DModel": Kept(
        {
            "time_text_embed": TIME,
            "x_embedder": INPUT,
            "context_embedder": REFINER,
            "norm.linear": MODULATION,
            **_ADA_NORM_BLOCKS,
            **_OUT,
        }
    ),
    "HunyuanImageTransformer2DModel": Kept(
        {
            "time_guidance_embed": TIME,
            "x_embedder": INPUT,
            "context_embedder": REFINER,
            "context_embedder_2": INPUT,
            "norm.linear": MODULATION,
            **_ADA_NORM_BLOCKS,
            **_OUT,
        }
    ),
    "GlmImageTransformer2DModel": Kept(
        {
            "time_condition_embed": TIME,
            "image_projector": INPUT,
            "glyph_projector": INPUT,
            "prior_projector": INPUT,
            **_ADA_NORM_BLOCKS,
            **_OUT,
        }
    ),
    "Cosmos3OmniTransformer": Kept(
        {
            "time_embedder": TIME,
            "proj_in": INPUT,
            **_OUT,
            "re:^(audio|sound|action)_": CONNECTOR,
            "lm_head": OUTPUT,
        }
    ),
}

# For all other classes, by what diffusers calls such layers: blocks are lists of modules, so that a
# component at the beginning of a name is outside of them.
GENERAL = Kept(
    {
        r"re:(^|\.)\w*(time|guidance)\w*(\.|$)": TIME,
        r"re:(^|\.)(t|temb|c|y)_?embed\w*(\.|$)": TIME,
        r"re:(^|\.)\w*(_mod|mod_|modulation|adaln|ada_ln)\w*(\.|$)": MODULATION,
        r"re:(^|\.)\w*norm\w*\.": MODULATION,
        r"re:(?i)^\w*(embed|patchify)\w*(\.|$)": INPUT,
        r"re:^(\w+_in|in_proj|input\w*)(\.|$)": INPUT,
        r"re:^(\w+_out|out_proj|output\w*|\w*final_layer\w*|\w*head)(\.|$)": OUTPUT,
    }
)
TEXT_ENCODER = Kept({}, optional={"visual": VISION_TOWER, "vision_tower": VISION_TOWER})


def kept_of(model: nn.Module, *, is_text_encoder: bool = False) -> Kept:
    """What stays in a model: by its class or a class that it extends, else by the general rule."""
    if is_text_encoder:
        return TEXT_ENCODER
    names = (base.__name__ for base in type(model).__mro__)
    return next((BY_CLASS[name] for name in names if name in BY_CLASS), GENERAL)


def kept_layers(
    model: nn.Module, included_layers: Sequence[str] = (), *, is_text_encoder: bool = False
) -> dict[str, str]:
    """The linear layers of a model that stay as they are, with the reason.

    included_layers: patterns of layers that do not stay after all; one that matches none of those
    which stay by default alone is an error.
    """
    kept = kept_of(model, is_text_encoder=is_text_encoder)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    required = dict(_matches(kept.required, names))
    optional = {n: reason for n, reason in _matches(kept.optional, names) if n not in required}
    included = match_layers(included_layers, [Layer(name, layer_index(name)) for name in optional])
    for layer in included:
        del optional[layer.name]
    return required | optional


def as_patterns_see(model: nn.Module, *, is_text_encoder: bool = False) -> list[Layer]:
    """The linear layers of a model as patterns see them: modulation is known by its reason."""
    kept = kept_layers(model, is_text_encoder=is_text_encoder)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [
        Layer(name, layer_index(name), is_modulation=kept.get(name) == MODULATION) for name in names
    ]


def _matches(reasons: Mapping[str, str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names that a pattern matches, each with the reason of the first that does."""
    patterns = [(parse_pattern(text), reason) for text, reason in reasons.items()]
    for name in names:
        found = (reason for pattern, reason in patterns if pattern.matches(Layer(name)))
        if (reason := next(found, None)) is not None:
            yield name, reason
