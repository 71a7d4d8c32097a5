"""octavo.Omni: pictures and videos from a list of prompts."""

import random
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from octavo.brief import brief
from octavo.errors import CapacityError, ConfigError, OctavoError, UnsupportedError
from octavo.integrations.apply import apply_
from octavo.integrations.changes import Changes
from octavo.integrations.diffusers import attention as attention_layers
from octavo.integrations.diffusers.call import (
    OnStep,
    check_options,
    makes_video,
    results_of,
    takes_lists,
    watched,
)
from octavo.integrations.diffusers.load import load_pipeline
from octavo.integrations.diffusers.pipeline import TRANSFORMER, find_components, make_recipe
from octavo.integrations.diffusers.step_cache import check_step_cache, use_step_cache_
from octavo.integrations.embedded_models import SMALL_IMAGE_MODEL
from octavo.recipe import Recipe
from octavo.serving.engine.image_request import ImageResult, ImageSampling, nth_seed
from octavo.serving.engine.precision import Precision, describe_layers, describe_linear

DTYPES = ("bfloat16", "float16", "float32")
NAN_WARNING = "invalid value encountered in cast"


Frames = tuple[Any, ...]


class Omni:
    """A diffusion pipeline that draws images or videos.

    model: a folder or hub name of diffusers, a pipeline that is loaded already, or None for the
    small image model that comes with octavo; a loaded one is changed in place.
    What is quantized is said in one of three ways: recipe; quantization "fp8"; quantization_config
    in the words of vLLM, {"method": "fp8", "ignored_layers": […], …}, and "weight_only_layers", for
    all transformers or by component ({"transformer": {…}, "vae": None}). Beside the last two,
    attention="fp8" and scales, of static activations.
    cache_backend, cache_config: "tea_cache" or "first_block_cache", which skip steps that change
    little, and their settings. max_batch_size: pictures in one call, None for all of them.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        quantization: str | None = None,
        quantization_config: str | Mapping[str, Any] | None = None,
        attention: str | Mapping[str, Any] | None = None,
        scales: Any = None,
        recipe: Recipe | None = None,
        cache_backend: str | None = None,
        cache_config: Mapping[str, Any] | None = None,
        dtype: str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise ConfigError(f"expected max_batch_size of 1 or more, got {max_batch_size}")
        if cache_config is not None and cache_backend is None:
            raise ConfigError("cache_config: expected a cache_backend with it, got none")
        if quantization not in (None, "fp8"):
            raise ConfigError(f"quantization: expected 'fp8' or None, got {brief(quantization)}")
        if quantization is not None and quantization_config is not None:
            raise ConfigError("expected quantization or quantization_config, got both")
        config = quantization_config if quantization is None else quantization
        if recipe is not None and not (config is attention is scales is None):
            raise ConfigError("expected a recipe or quantization, attention and scales, got both")
        self.pipe, self.model_name = _load(model, dtype, device)
        self._takes_lists = takes_lists(self.pipe)
        self._max_batch_size = max_batch_size
        if recipe is None:
            parts = list(find_components(self.pipe))
            recipe = make_recipe(config, parts, attention=attention, scales=scales)
        self.recipe = recipe
        if cache_backend is not None:  # first: FP8 linear layers cannot be undone
            check_step_cache(self.pipe, cache_backend, cache_config)
        self.changes: Changes | None = None if recipe.is_empty else apply_(self.pipe, recipe)
        self.cache: dict[str, Any] | None = None
        if cache_backend is not None:
            use_step_cache_(self.pipe, cache_backend, cache_config)
            self.cache = {"backend": cache_backend, **(cache_config or {})}
        self.precision = _describe(self.pipe, self.changes)

    @property
    def makes_video(self) -> bool:
        """Whether results have frames; a video of one frame is a picture all the same."""
        return makes_video(self.pipe)

    def check(self, sampling: ImageSampling) -> None:
        """Raise if the pipeline does not have what `sampling` asks for."""
        check_options(self.pipe, sampling.options())

    def generate(
        self,
        prompts: str | Sequence[str],
        sampling: ImageSampling = ImageSampling(),
        *,
        on_step: OnStep | None = None,
    ) -> list[ImageResult]:
        """Draw what each prompt says; the results are in their order.

        on_step is called with the number of steps that are done and that of all; what it raises
        ends the call. Pictures of one seed have the same noise alone and in a batch; what the
        transformer makes of it may differ in the last bits, as matrix products of other sizes do.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"expected one prompt or more, each a text, got {brief(prompts)}")
        self.check(sampling)
        seeds = [_seeds(sampling) for _ in texts]
        pictures = [(place, seed) for place, own in enumerate(seeds) for seed in own]
        size = (self._max_batch_size or len(pictures)) if self._takes_lists else 1
        steps = _StepCount(on_step, num_batches=-(-len(pictures) // size))
        drawn: list[list[Frames]] = [[] for _ in texts]
        seconds = [0.0] * len(texts)
        for first in range(0, len(pictures), size):
            start_s, batch = time.perf_counter(), pictures[first : first + size]
            own = [texts[place] for place, _ in batch]
            frames = self._call(own, [seed for _, seed in batch], sampling, steps)
            for (place, _), one in zip(batch, frames, strict=True):
                drawn[place].append(one)
            for place in {place for place, _ in batch}:
                seconds[place] += time.perf_counter() - start_s
            steps.end_batch()
        _check_size([frames[0] for found in drawn for frames in found], sampling)
        results = []
        for place, (text, found) in enumerate(zip(texts, drawn, strict=True)):
            is_picture = all(len(frames) == 1 for frames in found)
            result = ImageResult(
                prompt=text,
                images=tuple(frames[0] for frames in found) if is_picture else (),
                frames=() if is_picture else tuple(found),
                seeds=seeds[place],
                seconds=seconds[place],
                num_steps=steps.per_batch,
            )
            results.append(result)
        return results

    def _call(
        self,
        prompts: list[str],
        seeds: list[int],
        sampling: ImageSampling,
        steps: "_StepCount",
    ) -> list[Frames]:
        options = sampling.options()
        # On the CPU: a seed then means the same noise on every device.
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        if "negative_prompt" in options and self._takes_lists:
            options["negative_prompt"] = [options["negative_prompt"]] * len(prompts)
        try:
            with watched(self.pipe, steps), warnings.catch_warnings():
                # Pillow has no NaN: where a picture's pixels become bytes, numpy warns.
                warnings.filterwarnings("error", NAN_WARNING, RuntimeWarning)
                output = self.pipe(
                    prompt=prompts if self._takes_lists else prompts[0],
                    generator=generators if self._takes_lists else generators[0],
                    output_type="pil",
                    **options,
                )
        except OctavoError:
            raise
        except RuntimeWarning as error:
            if NAN_WARNING not in str(error):
                raise
            raise UnsupportedError(
                f"expected finite pixels, got NaN from {type(self.pipe).__name__}: try another "
                "dtype, or quantize less"
            ) from error
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"expected memory for {len(prompts)} pictures at once, got none: ask for fewer or "
                f"smaller ones, or set max_batch_size ({error})"
            ) from error
        except (TypeError, ValueError) as error:
            if steps.num_in_batch:
                raise
            # Before the first step: the pipeline has looked at its arguments, and at no more.
            raise ConfigError(f"{type(self.pipe).__name__}: {error}") from error
        return results_of(output, len(prompts))


class _StepCount:
    """Steps of all batches as those of one."""

    def __init__(self, on_step: OnStep | None, num_batches: int) -> None:
        self._on_step, self._num_batches = on_step, num_batches
        self.num_in_batch = self.per_batch = self._num_before = 0

    def __call__(self, num_done: int, total: int) -> None:
        self.num_in_batch = num_done
        if self._on_step is not None:
            self._on_step(self._num_before + num_done, total * self._num_batches)

    def end_batch(self) -> None:
        self.per_batch = self.num_in_batch
        self._num_before += self.num_in_batch
        self.num_in_batch = 0


def _load(model: Any, dtype: str | None, device: str | None) -> tuple[Any, str]:
    """The pipeline and its name."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"expected a dtype, one of {', '.join(DTYPES)}, got {brief(dtype)}")
    if model is None or isinstance(model, str | Path):
        name = SMALL_IMAGE_MODEL.name if model is None else str(model)
        return load_pipeline(name, getattr(torch, dtype or "bfloat16"), device), name
    if not callable(model):
        raise ConfigError(
            f"expected a model's name, its folder or a pipeline of diffusers, got {brief(model)}"
        )
    if dtype is not None:
        raise ConfigError("dtype: expected none for a pipeline that is loaded already, got one")
    find_components(model)
    name = getattr(model, "name_or_path", None) or type(model).__name__
    return model if device is None else model.to(device), str(name)


def _describe(pipe: Any, changes: Changes | None) -> Precision:
    """What of a pipeline is in FP8: attention of its transformers, linear layers of all models."""
    components = find_components(pipe)
    dtypes: dict[str, torch.dtype | None] = {}
    for component in (name for name in components if name.startswith(TRANSFORMER)):
        model: Any = components[component]
        found = {*attention_layers.find_layers(model), *attention_layers.find_others(model)}
        fp8 = changes.layers.get(f"{component}.attention", ()) if changes else ()
        own = {name: None if name in fp8 else model.dtype for name in sorted(found)}
        dtypes |= {f"{component}.{name}": dtype for name, dtype in own.items()}
    attention, linear = describe_layers("attention", dtypes), describe_linear(components)
    return Precision(tuple(kind for kind in (attention, linear) if kind.num_layers))


def _seeds(sampling: ImageSampling) -> tuple[int, ...]:
    """The seeds of a prompt's pictures."""
    # Not torch's: whoever seeds that for weights would get the same pictures again and again.
    first = random.SystemRandom().getrandbits(32) if sampling.seed is None else sampling.seed
    return tuple(nth_seed(first, index) for index in range(sampling.num_images_per_prompt))


def _check_size(firsts: Sequence[Any], sampling: ImageSampling) -> None:
    """Raise if the pipeline has rounded what was asked for."""
    for asked, name in ((sampling.width, "width"), (sampling.height, "height")):
        got = {getattr(image, name) for image in firsts}
        if asked is not None and got != {asked}:
            raise UnsupportedError(
                f"{name}: expected {asked} pixels, got {sorted(got)[0]} from the pipeline: ask for "
                "that, or another multiple of what it can draw"
            )
