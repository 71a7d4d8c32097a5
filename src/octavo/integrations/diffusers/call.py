"""Calling a pipeline whose class is not known: what it takes, its steps, what it makes."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from octavo.brief import list_names
from octavo.errors import ConfigError, UnsupportedError

OnStep = Callable[[int, int], object]  # steps that are done, and all of them
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
    _check_guidance(pipe, options, parameters)
    _check_negative(options, parameters, name)
    _check_size(pipe, options)


def _check_guidance(
    pipe: Any, options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> None:
    """diffusers ignores the guidance of a model that has not learned it, or has for good."""
    if options.get("guidance_scale") is None:
        return
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    has_both = "true_cfg_scale" in parameters
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


def _check_negative(
    options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], name: str
) -> None:
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


def _check_size(pipe: Any, options: Mapping[str, Any]) -> None:
    """Pipelines that pack latents in squares of 2 draw another size than they cannot pack."""
    factor = getattr(pipe, "vae_scale_factor", None)
    packs = any(hasattr(pipe, name) for name in ("_pack_latents", "_patchify_latents"))
    if not packs or not isinstance(factor, int):
        return
    for side in ("height", "width"):
        if (value := options.get(side)) is not None and value % (2 * factor):
            raise ConfigError(f"{side}: expected a multiple of {2 * factor}, got {value}")


class _StepBar:
    """What a pipeline takes for its progress bar: it counts, and draws nothing."""

    def __init__(self, total: int, on_step: OnStep, iterable: Iterable[Any] | None) -> None:
        self.total, self.num_done = total, 0
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

    def bar(iterable: Any = None, total: int | None = None) -> _StepBar:
        return _StepBar(len(iterable) if total is None else total, on_step, iterable)

    pipe.progress_bar = bar
    try:
        yield
    finally:
        del pipe.progress_bar
        pipe.maybe_free_model_hooks()


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
