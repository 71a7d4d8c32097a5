"""A small FLUX pipeline without text encoders: prompts are tensors, results are latents; fast."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor, nn

NUM_STEPS = 8


def make_transformer(**changes: Any) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    config = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    }
    return FluxTransformer2DModel(**{**config, **changes}).eval()


def make_flux2_transformer() -> Flux2Transformer2DModel:
    torch.manual_seed(0)
    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    ).eval()


def make_pipeline(**changes: Any) -> FluxPipeline:
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(latent_channels=4, block_out_channels=(4,), norm_num_groups=1),
        transformer=make_transformer(**changes),
        **dict.fromkeys(["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompt_of(seed: int) -> tuple[Tensor, Tensor]:
    """Vectors of words and of a whole prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 8, 32, generator=generator), torch.randn(1, 32, generator=generator)


def draw(pipe: FluxPipeline, *, prompt: int = 1, **options: Any) -> Tensor:
    """The latents that a pipeline makes of a prompt."""
    embeds, pooled = prompt_of(prompt)
    call = {"num_inference_steps": NUM_STEPS, "height": 32, "width": 32, **options}
    generator = torch.Generator().manual_seed(0)
    result = pipe(
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
        output_type="latent",
        generator=generator,
        **call,
    )
    return result.images


def guided(**options: Any) -> dict[str, Any]:
    """The options of a call with guidance: two calls of the transformer in a step."""
    embeds, pooled = prompt_of(2)
    negative = {"negative_prompt_embeds": embeds, "negative_pooled_prompt_embeds": pooled}
    return {"true_cfg_scale": 2.0, **negative, **options}


class Seen:
    """What came into the first block and out of the last, call by call, and how often it ran."""

    def __init__(self, model: nn.Module) -> None:
        self.entries: list[Tensor] = []
        self.results: list[Tensor] = []
        self.num_runs = 0
        last = model.single_transformer_blocks[-1]
        self._hooks = [
            model.x_embedder.register_forward_hook(self._enter),
            model.norm_out.register_forward_pre_hook(self._leave),
            last.attn.register_forward_hook(self._run),
        ]

    def _enter(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.entries.append(result.clone())

    def _leave(self, module: nn.Module, args: Any) -> None:
        self.results.append(args[0].clone())

    def _run(self, module: nn.Module, args: Any, result: Any) -> None:
        self.num_runs += 1

    def residuals(self) -> list[Tensor]:
        return [after - before for before, after in zip(self.entries, self.results, strict=True)]
