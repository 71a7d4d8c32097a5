"""Requests with images for benchmarks: random ones by seed, or a data set's."""

import math
import random
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.calibration.image_data import open_images
from octavo.errors import ConfigError, UnsupportedError

Bucket = tuple[int, int, int]  # height, width, frames
# As in vLLM's random-mm: half of the images small, half HD.
BUCKETS: Mapping[Bucket, float] = {(256, 256, 1): 0.5, (720, 1280, 1): 0.5}
DATASETS = ("random-mm", "hf")
QUESTION = "Describe the image."


@dataclass(frozen=True)
class Request:
    """A prompt and its pillow images."""

    prompt: str
    images: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where requests come from; the names are those of vLLM's options."""

    dataset_name: str = "random-mm"
    dataset_path: str | None = None
    hf_subset: str | None = None
    hf_split: str = "train"
    num_prompts: int = 10
    random_input_len: int = 32
    base_items_per_request: int = 1
    bucket_config: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset_name not in DATASETS:
            raise ConfigError(
                f"expected a dataset name of {', '.join(DATASETS)}; got {self.dataset_name!r}"
            )
        if (self.dataset_name == "hf") != (self.dataset_path is not None):
            raise ConfigError(
                "expected a dataset path for hf and none for random-mm, got "
                f"{self.dataset_path!r} for {self.dataset_name}"
            )
        if min(self.num_prompts, self.base_items_per_request, self.random_input_len) < 1:
            raise ConfigError(
                f"expected at least one prompt, one image and one byte of text, got "
                f"{self.num_prompts}, {self.base_items_per_request} and {self.random_input_len}"
            )
        parse_buckets(self.bucket_config)


def parse_buckets(text: str | None) -> Mapping[Bucket, float]:
    """Sizes and their probabilities from "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}".

    A bucket of probability 0 is left out, videos (more than one frame) are refused otherwise.
    """
    if text is None:
        return BUCKETS
    try:
        found = literal_eval(text)
        buckets = {
            (int(height), int(width), int(frames)): float(weight)
            for (height, width, frames), weight in found.items()
        }
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(
            f"expected buckets such as {{(256, 256, 1): 0.5}}, got {text!r}: {error}"
        ) from None
    used = {bucket: weight for bucket, weight in buckets.items() if weight != 0}
    if not used or any(min(bucket) < 1 or not 0 < w < math.inf for bucket, w in used.items()):
        raise ConfigError(f"expected positive sizes and probabilities, got {text!r}")
    if any(frames > 1 for _, _, frames in used):
        raise UnsupportedError(f"expected images, of one frame each, got videos in {text!r}")
    return used


def make_requests(options: DataOptions) -> list[Request]:
    """The requests that the options describe; ConfigError if a data set has too few."""
    if options.dataset_path is None:
        return _random_requests(options)
    data = open_images(options.dataset_path, split=options.hf_split, subset=options.hf_subset)
    prompts = [tuple(images) for images in data.prompts(options.num_prompts)]
    if len(prompts) < options.num_prompts:
        raise ConfigError(
            f"expected {options.num_prompts} prompts in {options.dataset_path}, got "
            f"{len(prompts)}: ask for fewer"
        )
    return [Request(QUESTION, images) for images in prompts]


def _random_requests(options: DataOptions) -> list[Request]:
    from PIL import Image

    buckets = parse_buckets(options.bucket_config)
    chooser, pixels = random.Random(options.seed), np.random.default_rng(options.seed)
    requests = []
    for _ in range(options.num_prompts):
        sizes = chooser.choices(
            list(buckets), list(buckets.values()), k=options.base_items_per_request
        )
        images = tuple(
            Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))
            for height, width, _ in sizes
        )
        letters = chooser.choices("abcdefghijklmnopqrstuvwxyz ", k=options.random_input_len)
        requests.append(Request("".join(letters), images))
    return requests
