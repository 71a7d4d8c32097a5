"""Linear layers of diffusion transformers: which stay in BF16, and the layers beside FP8 ones.

Patterns are those of `octavo.patterns`. `REQUIRED` reasons hold whatever a recipe includes; the
others are defaults, which `included_layers` of a recipe overrules. `weight_only_layers` overrules
those and modulation.

Layers that stay in 16 bits take forms that need less of a GPU's time. They compute what they did,
with no rounding more. A layer takes a form by its class: weights and names stay, and adapters,
hooks and offloading find the module that they know. Where a form does not apply to a call, the
layer runs as it was.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn

from octavo import ops
from octavo.integrations.linear import (
    CONNECTOR,
    INPUT,
    MODULATION,
    OUTPUT,
    REFINER,
    TIME,
    layer_index,
)
from octavo.patterns import Layer, match_layers, parse_pattern

QWEN_IMG_MLP = "the image MLP of Qwen-Image: vllm-omni leaves it in BF16 for quality"
VISION_TOWER = "the vision tower of a text encoder: prompts of text alone do not reach it"
# Where the forms of layers in 16 bits are the faster ones.
DEVICES = ("cuda",)
# What divides sizes of products that can have GELU at their end (`ops.linear_gelu`).
FUSED_SIZES = 8
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class Kept:
    """The layers of one transformer class that stay: reasons by pattern.

    required: stay in any case. optional: stay unless a recipe includes them.
    """

    required: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)


def _kept(
    *,
    time: str = "",
    inputs: str = "",
    refiner: str = "",
    output: str = "",
    modulation: str = "",
    connector: str = "",
    optional: Mapping[str, str] | None = None,
) -> Kept:
    """Patterns of required layers by their reason, with spaces between them."""
    reasons = (TIME, INPUT, REFINER, OUTPUT, MODULATION, CONNECTOR)
    patterns = (time, inputs, refiner, output, modulation, connector)
    pairs = zip(reasons, patterns, strict=True)
    required = {text: reason for reason, texts in pairs for text in texts.split()}
    return Kept(required, optional or {})


_ADA_NORMS = "norm1.linear norm1_context.linear"
_PROJ_OUT = "re:^proj_out$"  # inside a block of FLUX.1, proj_out is a layer like others
_OUT = f"norm_out {_PROJ_OUT}"

BY_CLASS: Mapping[str, Kept] = {
    "FluxTransformer2DModel": _kept(
        time="time_text_embed",
        inputs="x_embedder context_embedder",
        modulation=f"norm.linear {_ADA_NORMS}",
        output=_OUT,
    ),
    "Flux2Transformer2DModel": _kept(
        time="time_guidance_embed",
        inputs="x_embedder context_embedder",
        modulation="double_stream_modulation_img double_stream_modulation_txt "
        "single_stream_modulation",
        output=_OUT,
    ),
    "QwenImageTransformer2DModel": _kept(
        time="time_text_embed",
        inputs="img_in txt_in",
        modulation="img_mod txt_mod",
        output=_OUT,
        optional={"img_mlp": QWEN_IMG_MLP},
    ),
    "ZImageTransformer2DModel": _kept(
        time="t_embedder",
        inputs="all_x_embedder cap_embedder siglip_embedder",
        modulation="adaLN_modulation",
        output="all_final_layer",
    ),
    "WanTransformer3DModel": _kept(
        time="condition_embedder.time_embedder condition_embedder.time_proj",
        inputs="condition_embedder.text_embedder condition_embedder.image_embedder",
        output=_PROJ_OUT,
    ),
    "HunyuanVideo15Transformer3DModel": _kept(
        time="time_embed",
        inputs="x_embedder context_embedder_2 image_embedder",
        refiner="context_embedder",
        modulation=_ADA_NORMS,
        output=_OUT,
    ),
    "HunyuanVideoTransformer3DModel": _kept(
        time="time_text_embed",
        inputs="x_embedder",
        refiner="context_embedder",
        modulation=f"norm.linear {_ADA_NORMS}",
        output=_OUT,
    ),
    "HunyuanImageTransformer2DModel": _kept(
        time="time_guidance_embed",
        inputs="x_embedder context_embedder_2",
        refiner="context_embedder",
        modulation=f"norm.linear {_ADA_NORMS}",
        output=_OUT,
    ),
    "GlmImageTransformer2DModel": _kept(
        time="time_condition_embed",
        inputs="image_projector glyph_projector prior_projector",
        modulation=_ADA_NORMS,
        output=_OUT,
    ),
    "Cosmos3OmniTransformer": _kept(
        time="time_embedder",
        inputs="proj_in",
        output=f"{_PROJ_OUT} lm_head",
        connector="re:^(audio|sound|action)_",
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


class FusedGelu(GELU):  # type: ignore[misc]
    """GELU in the product in front of it: the wide result is written once, and not read again."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As diffusers' GELU."""
        if not _is_plain(self.proj, hidden_states):
            result: Tensor = super().forward(hidden_states)
            return result
        return ops.linear_gelu(hidden_states, self.proj.weight, self.proj.bias)


class TwoPassLayerNorm(nn.LayerNorm):
    """LayerNorm that a compiler makes two sums of: of the values, then of squares around the mean.

    torch.compile's own form finds both in one pass over wide rows, by Welford's update of every
    value, which takes longer than to read them twice.
    """

    def forward(self, input: Tensor) -> Tensor:
        """As nn.LayerNorm."""
        if not (torch.compiler.is_compiling() and self._is_for(input)):
            return super().forward(input)
        return two_pass_layer_norm(input, self.weight, self.bias, self.eps)

    def _is_for(self, x: Tensor) -> bool:
        """Whether x is normalized in its own dtype, and is what nn.LayerNorm would take."""
        if x.device.type not in DEVICES or torch.is_autocast_enabled(x.device.type):
            return False
        if x.dtype not in (*_SIXTEEN_BITS, torch.float32) or x.dim() == 0:
            return False
        has_own_dtype = self.weight is None or self.weight.dtype == x.dtype  # type: ignore[redundant-expr]
        return has_own_dtype and x.shape[-1] == self.normalized_shape[0]


def two_pass_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm over the last dimension, in float32 until the result is rounded to x's dtype."""
    centered = x.float() - x.float().mean(-1, keepdim=True)
    out = centered * torch.rsqrt((centered * centered).mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def use_faster_forms_(model: nn.Module) -> list[str]:
    """Let plain layers of a diffusers model take these forms; returns the names of those that do.

    GELU by its tanh formula behind a linear layer with a bias, of sizes that 8 divides, and norms
    over one dimension.
    """
    names = []
    for name, part in model.named_modules():
        if type(part) is GELU and part.approximate == "tanh" and _has_fused_sizes(part.proj):
            part.__class__ = FusedGelu
            names.append(name)
        elif type(part) is nn.LayerNorm and len(part.normalized_shape) == 1:
            part.__class__ = TwoPassLayerNorm
            names.append(name)
    return names


def _has_fused_sizes(proj: nn.Module) -> bool:
    """Whether GELU can be part of the product: cuBLAS would round others first."""
    if type(proj) is not nn.Linear or proj.bias is None:
        return False
    return proj.in_features % FUSED_SIZES == 0 and proj.out_features % FUSED_SIZES == 0


def _is_plain(proj: nn.Module, x: Tensor) -> bool:
    """Whether x may go past the module `proj` to its weights, as they were when it was made."""
    if type(proj) is not nn.Linear or x.device.type not in DEVICES:
        return False
    weight, bias = proj.weight, proj.bias
    # A weight of another class, such as torchao's, has products of its own.
    if bias is None or type(weight) is not nn.Parameter or type(bias) is not nn.Parameter:  # type: ignore[redundant-expr]
        return False
    if x.dtype not in _SIXTEEN_BITS or weight.dtype != x.dtype or bias.dtype != x.dtype:
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    # Such as those that bring offloaded weights when the module is called.
    if "forward" in proj.__dict__ or any(getattr(proj, hooks) for hooks in _HOOKS):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias)))
