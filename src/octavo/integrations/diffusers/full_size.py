"""Diffusion transformers in the sizes of well-known models, with random weights, and their inputs.

They are diffusers' own classes: what a step costs does not depend on what was learned.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers import AttentionBackendName
from torch import Tensor, nn

from octavo import ops
from octavo.errors import ConfigError
from octavo.integrations.diffusers.attention import find_layers
from octavo.integrations.diffusers.current_layer import add_backend
from octavo.internals import require

require("diffusers.models.attention.AttentionModuleMixin._attention_backend")

Inputs = dict[str, Any]
# Draws a tensor of a shape in the model's dtype, on its device.
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class FullSize:
    """One model's transformer: diffusers' class, its arguments, and the inputs of one step.

    layers: those of the arguments that count blocks.
    """

    kind: str
    config: Mapping[str, Any]
    layers: tuple[str, ...]
    about: str
    make_inputs: Callable[[Draw], Inputs]


def _flux_inputs(draw: Draw, side: int = 64, num_words: int = 512, width: int = 4096) -> Inputs:
    place = torch.arange(side, dtype=torch.float32)
    y, x = torch.meshgrid(place, place, indexing="ij")
    ids = torch.stack((torch.zeros_like(x), y, x), -1)
    return {
        "hidden_states": draw(1, side**2, 64),
        "encoder_hidden_states": draw(1, num_words, width),
        "pooled_projections": draw(1, 768),
        "timestep": 0 * draw(1) + 0.5,
        "guidance": 0 * draw(1) + 3.5,
        "img_ids": ids.reshape(-1, 3).to(draw(1).device),
        "txt_ids": torch.zeros(num_words, 3, device=draw(1).device),
    }


def _qwen_inputs(draw: Draw, side: int = 64, num_words: int = 512, width: int = 3584) -> Inputs:
    return {
        "hidden_states": draw(1, side**2, 64),
        "encoder_hidden_states": draw(1, num_words, width),
        "timestep": 0 * draw(1) + 0.5,
        "img_shapes": [[(1, side, side)]],
    }


def _wan_inputs(
    draw: Draw, size: tuple[int, int, int] = (21, 90, 160), num_words: int = 512, width: int = 4096
) -> Inputs:
    return {
        "hidden_states": draw(1, 16, *size),
        "encoder_hidden_states": draw(1, num_words, width),
        "timestep": 0 * draw(1) + 500,
    }


_TINY = {"attention_head_dim": 32, "num_attention_heads": 2}
FULL_SIZES: Mapping[str, FullSize] = {
    "flux.1-dev": FullSize(
        "FluxTransformer2DModel",
        {"guidance_embeds": True},
        ("num_layers", "num_single_layers"),
        "1024 x 1024, 4096 + 512 tokens",
        _flux_inputs,
    ),
    "qwen-image": FullSize(
        "QwenImageTransformer2DModel",
        {},
        ("num_layers",),
        "1024 x 1024, 4096 + 512 tokens",
        _qwen_inputs,
    ),
    "wan2.2-14b": FullSize(
        "WanTransformer3DModel",
        {},
        ("num_layers",),
        "720 x 1280, 81 frames, 75600 tokens",
        _wan_inputs,
    ),
    "tiny-flux": FullSize(
        "FluxTransformer2DModel",
        {
            **_TINY,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 64,
            "axes_dims_rope": (8, 12, 12),
            "guidance_embeds": True,
        },
        ("num_layers", "num_single_layers"),
        "64 + 16 tokens",
        partial(_flux_inputs, side=8, num_words=16, width=64),
    ),
    "tiny-qwen": FullSize(
        "QwenImageTransformer2DModel",
        {**_TINY, "num_layers": 1, "joint_attention_dim": 64, "axes_dims_rope": (8, 12, 12)},
        ("num_layers",),
        "64 + 16 tokens",
        partial(_qwen_inputs, side=8, num_words=16, width=64),
    ),
    "tiny-wan": FullSize(
        "WanTransformer3DModel",
        {**_TINY, "num_layers": 1, "text_dim": 64, "ffn_dim": 128},
        ("num_layers",),
        "72 tokens",
        partial(_wan_inputs, size=(2, 12, 12), num_words=16, width=64),
    ),
}


def find_full_size(name: str) -> FullSize:
    """The size of this name."""
    if name not in FULL_SIZES:
        raise ConfigError(f"expected a size of {', '.join(FULL_SIZES)}; got {name!r}")
    return FULL_SIZES[name]


def make_transformer(
    size: FullSize, device: torch.device, *, num_layers: int | None = None, seed: int = 0
) -> Any:
    """The transformer in bfloat16, but for what its class keeps in float32.

    num_layers: so many of each kind of block instead of all.
    """
    config = dict(size.config)
    if num_layers is not None:
        config |= dict.fromkeys(size.layers, num_layers)
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(diffusers, size.kind)(**config)
    cast_to_bf16_(model)
    return model.eval()


def cast_to_bf16_(model: nn.Module) -> None:
    """Cast a model's parameters, but for what its class keeps in float32."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.bfloat16()


def make_inputs(size: FullSize, device: torch.device, seed: int = 0) -> Inputs:
    """Random inputs of one step; the result is a tuple."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    return {**size.make_inputs(draw), "return_dict": False}


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that diffusers compiles one by one, and that repeat, by name."""
    kinds = getattr(model, "_repeated_blocks", None) or ()
    found = {n: m for n, m in model.named_modules() if type(m).__name__ in kinds}
    if not found:
        raise ConfigError(f"expected repeated blocks, got none in {type(model).__name__}")
    return found


def use_bf16_attention_(model: nn.Module, name: str) -> None:
    """Let a model attend in its own dtype: by "native" or "cudnn" of torch, or one of our impls.

    An impl is one of `ops.attention`, such as a peer's that a benchmark has registered.
    """
    backends = {"native": "native", "cudnn": "_native_cudnn"}
    if name in backends:
        member = AttentionBackendName(backends[name])
    else:
        member = add_backend(f"octavo_bf16_{name}", _plain_backend(name))
    for layer in find_layers(model).values():
        processor: Any = layer.processor
        processor._attention_backend = member


def _plain_backend(impl: str) -> Callable[..., Tensor]:
    def plain_attention(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        asked = [n for n, given in options.items() if isinstance(given, Tensor) or given]
        if asked:
            raise ConfigError(f"{impl}: expected plain attention, got {', '.join(asked)}")
        return ops.attention(query, key, value, impl=impl)

    return plain_attention
