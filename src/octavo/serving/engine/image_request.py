"""What a caller asks for in pictures, and what it gets back: no tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from octavo.brief import brief
from octavo.errors import ConfigError

MAX_SIDE = 2**16
# What `ImageSampling` says about all pipelines in the same words; extra_args has the others.
OWN_ARGS = frozenset({"prompt", "generator", "output_type", "return_dict", "callback_on_step_end"})


@dataclass(frozen=True, kw_only=True)
class ImageSampling:
    """How images or videos are drawn; names are those of diffusers.

    What is None is left to the pipeline, and what the pipeline does not have is an error.

    Attributes:
        num_inference_steps: Denoising steps.
        guidance_scale: How closely the prompt is followed.
        true_cfg_scale: The same by a second pass, of pipelines that have both (FLUX.1, Qwen-Image).
        negative_prompt: What not to draw.
        height: In pixels.
        width: In pixels.
        num_frames: Of a video.
        max_sequence_length: Tokens of a prompt, of its text encoder.
        num_images_per_prompt: Pictures of each prompt.
        seed: Of the first picture of each prompt; the next ones have the seeds after it, whatever
            else is in the batch. Left out: a random one for each prompt.
        extra_args: Other arguments of the pipeline, by their names there.
    """

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    max_sequence_length: int | None = None
    num_images_per_prompt: int = 1
    seed: int | None = None
    extra_args: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        limits = {
            "num_inference_steps": 10_000,
            "height": MAX_SIDE,
            "width": MAX_SIDE,
            "num_frames": 2**20,
            "max_sequence_length": 2**20,
            "num_images_per_prompt": 10_000,
        }
        for name, high in limits.items():
            if getattr(self, name) is not None or name == "num_images_per_prompt":
                _check_integer(name, getattr(self, name), 1, high)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("guidance_scale", "true_cfg_scale"):
            _check_scale(name, getattr(self, name))
        if not isinstance(self.negative_prompt, str | None):
            raise ConfigError(
                f"expected negative_prompt, a text, got {brief(self.negative_prompt)}"
            )
        fields = set(type(self).__dataclass_fields__)
        if taken := sorted(self.extra_args.keys() & (fields | OWN_ARGS)):
            raise ConfigError(f"extra_args: expected names of no other field, got {taken[0]!r}")

    def options(self) -> dict[str, Any]:
        """What is not left to the pipeline, by the names of its arguments."""
        apart = ("num_images_per_prompt", "seed", "extra_args")
        names = [name for name in type(self).__dataclass_fields__ if name not in apart]
        asked = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**asked, **self.extra_args}


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"expected {name}, an integer in [{low}, {high}], got {brief(value)}")


def _check_scale(name: str, value: object) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type, operator]
        raise ConfigError(f"expected {name}, a finite number of 0 or more, got {brief(value)}")


def nth_seed(seed: int, index: int) -> int:
    """The seed of a prompt's picture by its place; the last one is followed by the first."""
    return (seed + index + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, kw_only=True)
class ImageResult:
    """What was drawn for one prompt: images or frames, their seeds, and the time it took.

    images: pillow images. frames: of each video its frames, in place of images; a video of one
    frame is an image. seeds: of each of them. seconds: of the calls that drew them, with whatever
    else was in the batch. num_steps: denoising steps of one.
    """

    prompt: str
    images: tuple[Any, ...] = ()
    frames: tuple[tuple[Any, ...], ...] = ()
    seeds: tuple[int, ...]
    seconds: float
    num_steps: int

    @property
    def seed(self) -> int:
        """The seed of the first picture or video."""
        return self.seeds[0]
