"""Calling a pipeline whose class is not known: what it takes, its steps, what it makes."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch

from octavo.brief import brief, list_names
from octavo.errors import ConfigError, UnsupportedError
from octavo.integrations.diffusers.denoising import find_step_hook
from octavo.integrations.diffusers.pipeline import find_transformers
from octavo.integrations.diffusers.step_graphs import has_step_graphs

OnStep = Callable[[int, int], object]  # steps that are done, and all of them
# A prompt's text, or all that the pipeline is called with for it.
Prompt = str | Mapping[str, Any]
# What a run gives to each call; the first of them may be part of a prompt.
OWN_OPTIONS = ("prompt", "generator", "num_inference_steps")
# Pipelines that say they take several prompts at once and fail with them, and where.
ONE_BY_ONE = {"HunyuanVideo15": "its VAE's attention has a mask for one video"}


def parameters_of(pipe: Any) -> Mapping[str, inspect.Parameter]:
    """The named arguments of a pipeline's call: **kwargs may drop what they are given."""
    found = inspect.signature(type(pipe).__call__).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {n: p for n, p in found.items() if p.kind in kinds and n != "self"}


def makes_video(pipe: Any) -> bool:
    """Whether a pipeline makes videos."""
    return "num_frames" in parameters_of(pipe)


def takes_lists(pipe: Any) -> bool:
    """Whether one call can have several prompts and a generator for each."""
    parameters = parameters_of(pipe)
    names = ("prompt", "generator")
    if missing := [name for name in names if name not in parameters]:
        raise UnsupportedError(
            f"expected a pipeline from texts to pictures, got {type(pipe).__name__}, which takes "
            f"no {missing[0]}"
        )
    if type(pipe).__name__.startswith(tuple(ONE_BY_ONE)):
        return False
    annotations = [str(parameters[name].annotation).lower() for name in names]
    return all("list" in text or "sequence" in text for text in annotations)


def check_options(pipe: Any, options: Mapping[str, Any]) -> None:
    """Raise for an option that the pipeline does not have, or would take and leave unused."""
    parameters, name = parameters_of(pipe), type(pipe).__name__
    for option in options:
        if option not in parameters:
            raise UnsupportedError(
                f"{option}: expected an option of {name}, got one that it does not have; it has "
                f"{list_names(sorted(parameters))}"
            )
    _check_guidance(pipe, options)
    _check_negative(pipe, options)
    # Pipelines that pack latents in squares of 2 draw another size than they cannot pack.
    factor: Any = getattr(pipe, "vae_scale_factor", None)
    packs = any(hasattr(pipe, name) for name in ("_pack_latents", "_patchify_latents"))
    for side in ("height", "width") if packs and isinstance(factor, int) else ():
        if (value := options.get(side)) is not None and value % (2 * factor):
            raise ConfigError(f"{side}: expected a multiple of {2 * factor}, got {value}")


def _check_guidance(pipe: Any, options: Mapping[str, Any]) -> None:
    """diffusers ignores the guidance of a model that has not learned it, or has for good."""
    if options.get("guidance_scale") is None:
        return
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    has_both = "true_cfg_scale" in parameters_of(pipe)
    if has_both and not config.get("guidance_embeds", True):
        raise ConfigError(
            "guidance_scale: expected a transformer that has learned guidance, got one that has "
            "not and would ignore it: use true_cfg_scale"
        )
    if getattr(pipe, "config", {}).get("is_distilled") and options["guidance_scale"] > 1:
        raise ConfigError(
            f"guidance_scale: expected 1 or none for a distilled model, which ignores it, got "
            f"{options['guidance_scale']}"
        )


def _check_negative(pipe: Any, options: Mapping[str, Any]) -> None:
    parameters, name = parameters_of(pipe), type(pipe).__name__
    scale = "true_cfg_scale" if "true_cfg_scale" in parameters else "guidance_scale"
    given = ("negative_prompt", "negative_prompt_embeds")
    if all(options.get(option) is None for option in given):
        if options.get("true_cfg_scale", 0) > 1 and "negative_prompt" in parameters:
            raise ConfigError(
                f"true_cfg_scale: expected a negative_prompt, without which {name} ignores it, got "
                "none; a space is one"
            )
        return
    if scale not in parameters:  # a guider's
        return
    value = options.get(scale, parameters[scale].default)
    # Z-Image counts guidance from 0, as a share that is added.
    lowest = 0 if name.startswith("ZImage") else 1
    if isinstance(value, int | float) and value <= lowest:
        raise ConfigError(
            f"negative_prompt: expected {scale} above {lowest}, without which {name} ignores it, "
            f"got {value}"
        )


class _StepBar:
    """What a pipeline takes for its progress bar: it counts, and draws nothing."""

    def __init__(self, on_step: OnStep, iterable: Any = None, total: int | None = None) -> None:
        self.total, self.num_done = len(iterable) if total is None else total, 0
        self._on_step, self._iterable = on_step, iterable

    def update(self, num_steps: int = 1) -> None:
        self.num_done += num_steps
        self._on_step(self.num_done, self.total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable or ():
            yield item
            self.update()

    def set_description(self, *_: object, **__: object) -> None:
        """A text beside a bar, which there is not."""

    set_postfix = set_description


@contextmanager
def watched(pipe: Any, on_step: OnStep) -> Iterator[None]:
    """Inside, `on_step` is called after each step of the pipeline; what it raises ends the call.

    By the progress bar, which all pipelines have; callback_on_step_end is not in all. However the
    call ends, hooks with a state forget what they saw of it.
    """
    pipe.progress_bar = partial(_StepBar, on_step)
    try:
        yield
    finally:
        del pipe.progress_bar
        pipe.maybe_free_model_hooks()


@dataclass
class Steps:
    """Where a pipeline is: the denoising step under way, after so many whole prompts."""

    index: int = 0
    num_prompts: int = 0

    def run(self, call: Callable[[], object]) -> None:
        """Call the pipeline for the next prompt."""
        self.index = 0
        call()
        if self.index == 0:
            raise UnsupportedError("expected a pipeline that moves its progress bar in each step")
        self.num_prompts += 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a pipeline runs on prompts: what it is called with beside each of them.

    num_inference_steps: the pipeline's own number if None. The i-th prompt has the noise of
    seed + i.
    """

    num_inference_steps: int | None = None
    seed: int = 0
    call_options: Mapping[str, Any] = field(default_factory=dict)

    def num_steps(self, pipe: Any) -> int:
        """How many steps a prompt takes."""
        parameters, num_steps = parameters_of(pipe), self.num_inference_steps
        if "num_inference_steps" not in parameters:
            raise ConfigError(
                "expected a pipeline that is called with num_inference_steps, got "
                f"{type(pipe).__name__}"
            )
        if num_steps is None:
            num_steps = parameters["num_inference_steps"].default
        if not isinstance(num_steps, int) or num_steps < 1:
            raise ConfigError(f"expected num_inference_steps from 1 on, got {brief(num_steps)}")
        return num_steps

    def calls(self, pipe: Any, prompts: Sequence[Prompt]) -> list[Callable[[], Any]]:
        """One call for each prompt, all of their arguments looked at."""
        _check_steps(pipe)
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
            raise ConfigError(f"expected a list of prompts, got {brief(prompts)}")
        if not prompts:
            raise ConfigError("expected prompts, got none")
        arguments = [self._arguments(pipe, prompt) for prompt in prompts]

        def call(index: int) -> Any:
            generator = torch.Generator().manual_seed(self.seed + index)
            return pipe(**arguments[index], generator=generator)

        return [partial(call, index) for index in range(len(arguments))]

    def _arguments(self, pipe: Any, prompt: Prompt) -> dict[str, Any]:
        if not isinstance(prompt, str | Mapping):
            raise ConfigError(
                f"expected a prompt as a text or the arguments of a call, got {brief(prompt)}"
            )
        own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        given = {**self.call_options, **own}
        for name in OWN_OPTIONS:
            if name in self.call_options or (name in own and name != "prompt"):
                raise ConfigError(f"expected {name} beside the call's options, got it in them")
        check_options(pipe, given)
        num_steps, known = self.num_steps(pipe), parameters_of(pipe)
        # Decoding is the VAE's work, and nothing here looks at its result.
        has_vae = getattr(pipe, "vae", None) is not None
        output = {"output_type": "latent"} if has_vae and "output_type" in known else {}
        return {**output, **given, "num_inference_steps": num_steps}

    @contextmanager
    def counted(
        self, pipe: Any, on_step: Callable[[int], object], num_prompts: int = 0
    ) -> Iterator[Steps]:
        """Count the steps of calls inside; on_step: called with those so far, of all prompts.

        num_prompts: those that were done before.
        """
        if not hasattr(getattr(pipe, "scheduler", None), "timesteps"):
            raise ConfigError(
                f"expected a pipeline with a scheduler, got {type(pipe).__name__} without"
            )
        steps, num_steps = Steps(num_prompts=num_prompts), self.num_steps(pipe)

        def note(num_done: int, total: int) -> None:
            steps.index = num_done
            on_step(steps.num_prompts * num_steps + min(num_done, num_steps))

        with watched(pipe, note):
            yield steps


def _check_steps(pipe: Any) -> None:
    """Raise if a transformer would not run in each step: whoever watches would miss some."""
    for name, part in find_transformers(pipe).items():
        if find_step_hook(part) is not None or getattr(part, "is_cache_enabled", False):
            raise ConfigError(
                f"{name}: expected a transformer that runs in each step, got one with a step "
                "cache: call drop_step_cache_ (or, if it is diffusers' own, disable_cache) first"
            )
        if has_step_graphs(part):
            raise ConfigError(
                f"{name}: expected a transformer whose layers run, got one that replays graphs: "
                "call drop_step_graphs_ first"
            )


def timesteps_of(pipe: Any) -> list[float]:
    """The times of a pipeline's last call, each once: some schedulers take two steps at one."""
    return list(dict.fromkeys(map(float, pipe.scheduler.timesteps)))


def results_of(output: Any, num_pictures: int) -> list[tuple[Any, ...]]:
    """The frames of each picture (one) or video (one or more) in a pipeline's output."""
    for name in ("images", "frames", "video"):
        if (found := getattr(output, name, None)) is not None:
            break
    else:
        raise UnsupportedError(
            f"expected an output with images, frames or video, got {type(output).__name__}"
        )
    items = list(found)
    if name != "images" and items and not isinstance(items[0], list | tuple):
        items = [items]  # of one video, without a list around it
    results = [tuple(item) if isinstance(item, list | tuple) else (item,) for item in items]
    if len(results) != num_pictures:
        raise UnsupportedError(f"expected {num_pictures} results, got {len(results)}")
    return results
