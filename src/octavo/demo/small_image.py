"""The small image model: a FLUX of four million parameters that draws small pictures from words.

Its transformer and its scheduler are diffusers' own classes, so that FP8 linear layers and FP8
attention meet what the large models have: two kinds of blocks, rotary positions, heads of 64. In
place of text encoders it has learned vectors of words, and in place of a VAE, patches of pixels.
scripts/train_small_dit.py makes its weights.

A folder holds transformer/ and words/ as diffusers' `from_pretrained` reads them, and
scheduler/scheduler_config.json.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from torch import Tensor, nn

from octavo.brief import NUM_NAMES_SHOWN, list_names
from octavo.demo.model_folder import (
    check_folder,
    load_weights,
    read_json,
    save_weights,
    write_mark,
    write_text,
)
from octavo.errors import ConfigError
from octavo.integrations.embedded_models import SMALL_IMAGE_MODEL

FOLDER, MARK = SMALL_IMAGE_MODEL.folder, SMALL_IMAGE_MODEL.mark
SCHEDULER = "scheduler/scheduler_config.json"
CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
PICTURE_SIZE, PATCH = 48, 3  # pixels; 16 × 16 patches
MAX_WORDS = 8
NUM_STEPS, GUIDANCE = 20, 2.5
PAD = "<pad>"
MODULATION = ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")
IGNORED_WORDS = frozenset(("a", "an", "the"))

TRANSFORMER: dict[str, Any] = {
    "in_channels": 3 * PATCH**2,
    "num_layers": 1,
    "num_single_layers": 5,
    "attention_head_dim": 64,
    "num_attention_heads": 3,
    "joint_attention_dim": 128,
    "pooled_projection_dim": 128,
    "axes_dims_rope": (16, 24, 24),
}


def cut_patches(pictures: Tensor) -> Tensor:
    """Pictures [batch, 3, height, width] as rows of patches [batch, patches, 3 * PATCH**2]."""
    batch, channels, height, width = pictures.shape
    blocks = pictures.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def join_patches(rows: Tensor) -> Tensor:
    """The inverse of `cut_patches`, for square pictures."""
    batch, num_patches, _ = rows.shape
    side = round(num_patches**0.5)
    blocks = rows.reshape(batch, side, side, -1, PATCH, PATCH)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, side * PATCH, side * PATCH)


def picture_ids(device: torch.device | str) -> Tensor:
    """The place (0, y, x) of each patch, [patches, 3]; words are all at (0, 0, 0)."""
    side = torch.arange(PICTURE_SIZE // PATCH, device=device, dtype=torch.float32)
    y, x = torch.meshgrid(side, side, indexing="ij")
    return torch.stack((torch.zeros_like(x), y, x), -1).flatten(0, 1)


class WordEncoder(ModelMixin, ConfigMixin):  # type: ignore[misc]  # diffusers has no types
    """Learned vectors of words in the place of FLUX's text encoders."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(self, words: list[str], size: int = 128, max_words: int = MAX_WORDS) -> None:
        super().__init__()
        if not words or len({PAD, *words}) != len(words) + 1:
            raise ConfigError(f"expected different words without {PAD}, got {words}")
        self.index = {word: place for place, word in enumerate([PAD, *words])}
        self.max_words = max_words
        self.vectors = nn.Embedding(len(self.index), size)
        self.positions = nn.Embedding(max_words, size)
        self.pool = nn.Linear(size, size)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt's words, padded; an empty prompt asks for any picture."""
        words = [w for w in re.findall(r"[\w'-]+", prompt.lower()) if w not in IGNORED_WORDS]
        if unknown := [word for word in words if word not in self.index]:
            near = difflib.get_close_matches(unknown[0], list(self.index)[1:], n=3, cutoff=0.6)
            some = list(self.index)[1 : 1 + NUM_NAMES_SHOWN]
            hint = f"did you mean {', '.join(near)}" if near else f"such as {', '.join(some)}"
            raise ConfigError(
                f"expected words that the model has learned, got {list_names(unknown)}: {hint}"
            )
        if len(words) > self.max_words:
            raise ConfigError(
                f"expected at most {self.max_words} words in a prompt, got {len(words)}: "
                f"shorten {prompt!r}"
            )
        ids = [self.index[word] for word in words]
        return ids + [0] * (self.max_words - len(ids))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of words [batch, max_words, size] and of whole prompts [batch, size]."""
        vectors = self.vectors(ids)
        is_word = (ids != 0).unsqueeze(-1).to(vectors.dtype)
        mean = (vectors * is_word).sum(1) / is_word.sum(1).clamp(min=1)
        return vectors + self.positions.weight, self.pool(mean)


class SmallImagePipeline(DiffusionPipeline):  # type: ignore[misc]  # diffusers has no types
    """Words to small pictures, called as diffusers' pipelines are."""

    def __init__(self, transformer: Any, words: WordEncoder, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, words=words, scheduler=scheduler)
        self.set_progress_bar_config(disable=True)

    def velocity(self, latents: Tensor, sigma: Tensor, ids: Tensor) -> Tensor:
        """Noise minus picture, as the transformer sees it in noisy patches; float32.

        latents: [batch, patches, channels]; sigma: [batch], the share of noise; ids: [batch, words]
        """
        embeds, pooled = self.words(ids)
        device, dtype = latents.device, embeds.dtype
        (out,) = self.transformer(
            hidden_states=latents.to(dtype),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            timestep=sigma.to(dtype),
            img_ids=picture_ids(device),
            txt_ids=torch.zeros(ids.shape[1], 3, device=device),
            return_dict=False,
        )
        return out.float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        num_inference_steps: int = NUM_STEPS,
        guidance_scale: float = GUIDANCE,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pil",
        callback_on_step_end: Callable[[Any, int, Tensor, dict[str, Any]], object] | None = None,
    ) -> Any:
        """Draw one picture for each prompt; "pil", "np" or "pt" ([batch, 3, 48, 48] in [0, 1]).

        With guidance_scale 1 each step costs half. A generator belongs to the CPU or the model's
        device; with one for each prompt, a picture does not depend on the others.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts or num_inference_steps < 1 or not 0 <= guidance_scale < float("inf"):
            raise ConfigError(
                "expected a prompt, a step and a finite guidance_scale of 0 or more, got "
                f"{len(prompts)} prompts, {num_inference_steps} steps and {guidance_scale}"
            )
        if any(side not in (None, PICTURE_SIZE) for side in (height, width)):
            raise ConfigError(
                f"expected height and width of {PICTURE_SIZE}, the only size that the small image "
                f"model has learned, got {height} and {width}: leave them out"
            )
        if output_type not in ("pil", "np", "pt"):
            raise ConfigError(f"expected output_type 'pil', 'np' or 'pt', got {output_type!r}")
        device = self.transformer.device
        ids = torch.tensor([self.words.encode(text) for text in prompts], device=device)
        latents = cut_patches(_noise(len(prompts), generator).to(device))
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        with self.progress_bar(total=num_inference_steps) as bar:
            for step, timestep in enumerate(self.scheduler.timesteps):
                sigma = (timestep / self.scheduler.config.num_train_timesteps).expand(len(prompts))
                if guidance_scale == 1:
                    velocity = self.velocity(latents, sigma, ids)
                else:
                    free_ids = torch.zeros_like(ids)
                    twice = ((latents, latents), (sigma, sigma), (ids, free_ids))
                    asked, free = self.velocity(*map(torch.cat, twice)).chunk(2)
                    velocity = free + guidance_scale * (asked - free)
                latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                if callback_on_step_end is not None:
                    callback_on_step_end(self, step, timestep, {})
                bar.update()
        pictures = (join_patches(latents) / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return ImagePipelineOutput(images=pictures)
        array = pictures.permute(0, 2, 3, 1).cpu().numpy()
        images = self.numpy_to_pil(array) if output_type == "pil" else array
        return ImagePipelineOutput(images=images)

    def generate(
        self,
        prompts: Sequence[str],
        num_inference_steps: int = NUM_STEPS,
        guidance: float = GUIDANCE,
        seed: int = 0,
    ) -> Tensor:
        """Pictures, uint8 [batch, 48, 48, 3] on the CPU; the i-th has the noise of seed + i."""
        generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
        pictures = self(
            prompts,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance,
            generator=generators,
            output_type="pt",
        ).images
        rounded: Tensor = (pictures * 255).round().to("cpu", torch.uint8)
        return rounded.permute(0, 2, 3, 1).contiguous()


def _noise(batch: int, generator: torch.Generator | Sequence[torch.Generator] | None) -> Tensor:
    """Noise [batch, 3, height, width], float32, from one generator or one for each picture."""
    shape = (3, PICTURE_SIZE, PICTURE_SIZE)
    if generator is None or isinstance(generator, torch.Generator):
        device = "cpu" if generator is None else generator.device
        return torch.randn((batch, *shape), generator=generator, device=device)
    if len(generator) != batch:
        raise ConfigError(f"expected a generator for each of {batch} prompts, got {len(generator)}")
    return torch.stack([torch.randn(shape, generator=g, device=g.device) for g in generator])


def make_small_image_model(
    words: Sequence[str], seed: int = 0, **changes: Any
) -> SmallImagePipeline:
    """A model of these words with random weights, float32, on the CPU.

    Blocks start as the identity (their modulation is zero), which deep transformers learn from.
    changes: arguments of FluxTransformer2DModel other than those in TRANSFORMER.
    """
    config = {**TRANSFORMER, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(**config)
        encoder = WordEncoder(words=list(words), size=config["joint_attention_dim"])
        for name, module in transformer.named_modules():
            if name == "proj_out" or name.endswith(MODULATION):
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)
    scheduler = FlowMatchEulerDiscreteScheduler()
    return SmallImagePipeline(transformer.eval(), encoder.eval(), scheduler)


def save_small_image_model(model: SmallImagePipeline, folder: Path) -> int:
    """Write a model's files, weights in bfloat16; returns the size of the weights in bytes."""
    num_bytes = 0
    for part in PARTS:
        module = getattr(model, part)
        num_bytes += save_weights(module, folder / part / WEIGHTS)
        write_text(folder / part / CONFIG, module.to_json_string())
    write_text(folder / SCHEDULER, model.scheduler.to_json_string())
    write_mark(SMALL_IMAGE_MODEL, folder)
    return num_bytes


def load_small_image_model(
    folder: Path = FOLDER, dtype: torch.dtype = torch.bfloat16
) -> SmallImagePipeline:
    """The trained model, or that of another folder, on the CPU."""
    files = [SCHEDULER, *(f"{part}/{name}" for part in PARTS for name in (CONFIG, WEIGHTS))]
    scripts = "scripts/draw_emoji.py and scripts/train_small_dit.py"
    check_folder(SMALL_IMAGE_MODEL, folder, files, scripts)
    modules = {}
    for part, kind in PARTS.items():
        module = kind.from_config(read_json(folder / part / CONFIG))
        load_weights(module, folder / part / WEIGHTS, dtype)
        modules[part] = module.eval()
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(read_json(folder / SCHEDULER))
    return SmallImagePipeline(**modules, scheduler=scheduler)


# The folders of a model's parts, as the pipeline takes them.
PARTS: dict[str, Any] = {"transformer": FluxTransformer2DModel, "words": WordEncoder}
