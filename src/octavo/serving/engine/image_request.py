"""What a caller asks for in pictures, and what it gets back: no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from octavo.errors import ConfigError
from octavo.settings import checked

MAX_SIDE = 2**16
# What `ImageSampling` says about all pipelines in the same words; extra_args has the others.
OWN_ARGS = frozenset({"prompt", "generator", "output_type", "return_dict", "callback_on_step_end"})
Side = Annotated[int, Field(strict=True, ge=1, le=MAX_SIDE)]
Number = Annotated[int, Field(strict=True, ge=1, le=10_000)]
Length = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
Guidance = Annotated[float, Field(strict=True, ge=0)]


@checked
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

    num_inference_steps: Number | None = None
    guidance_scale: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    negative_prompt: str | None = None
    height: Side | None = None
    width: Side | None = None
    num_frames: Length | None = None
    max_sequence_length: Length | None = None
    num_images_per_prompt: Number = 1
    seed: Seed | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if taken := sorted(self.extra_args.keys() & ({*vars(self)} | OWN_ARGS)):
            raise ConfigError(f"extra_args: expected names of no other field, got {taken[0]!r}")

    def options(self) -> dict[str, Any]:
        """What is not left to the pipeline, by the names of its arguments."""
        apart = ("num_images_per_prompt", "seed", "extra_args")
        said = {key: x for key, x in vars(self).items() if x is not None and key not in apart}
        return {**said, **self.extra_args}


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
