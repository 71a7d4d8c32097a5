"""A pipeline of diffusers on prompts, with its denoising steps counted."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from octavo.brief import brief
from octavo.errors import ConfigError
from octavo.integrations.diffusers.call import check_options, parameters_of
from octavo.integrations.diffusers.pipeline import find_transformers
from octavo.integrations.diffusers.step_cache import find_step_hook
from octavo.integrations.diffusers.step_graphs import has_step_graphs
from octavo.integrations.patch import Patch

# A prompt's text, or all that the pipeline is called with for it.
Prompt = str | Mapping[str, Any]
OWN_OPTIONS = ("generator", "num_inference_steps", "prompt")


@dataclass
class Steps:
    """Where a pipeline is: index is the denoising step under way, timesteps those before it."""

    index: int = 0
    timesteps: list[float] = field(default_factory=list)

    def start(self) -> None:
        """The next prompt begins."""
        self.index, self.timesteps = 0, []


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
        num_steps = self.num_inference_steps
        if num_steps is None:
            num_steps = _parameters(pipe)["num_inference_steps"].default
        if not isinstance(num_steps, int) or num_steps < 1:
            raise ConfigError(f"expected num_inference_steps from 1 on, got {brief(num_steps)}")
        return num_steps

    def calls(self, pipe: Any, prompts: Sequence[Prompt]) -> list[Callable[[], Any]]:
        """One call for each prompt, all of their arguments looked at."""
        check_steps(pipe)
        arguments = [self._arguments(pipe, prompt) for prompt in check_prompts(prompts)]

        def call(index: int) -> Any:
            generator = torch.Generator().manual_seed(self.seed + index)
            return pipe(**arguments[index], generator=generator)

        return [partial(call, index) for index in range(len(arguments))]

    def _arguments(self, pipe: Any, prompt: Prompt) -> dict[str, Any]:
        own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        given = {**self.call_options, **own}
        for name in OWN_OPTIONS:
            if name in self.call_options or (name in own and name != "prompt"):
                raise ConfigError(f"expected {name} beside the call's options, got it in them")
        check_options(pipe, given)
        known = _parameters(pipe)
        # Decoding is the VAE's work, and nothing here looks at its result.
        has_vae = getattr(pipe, "vae", None) is not None
        output = {"output_type": "latent"} if has_vae and "output_type" in known else {}
        return {**output, **given, "num_inference_steps": self.num_steps(pipe)}


def check_steps(pipe: Any) -> None:
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


def check_prompts(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts, if they are a sequence of one or more."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        raise ConfigError(f"expected a list of prompts, got {brief(prompts)}")
    if not prompts:
        raise ConfigError("expected prompts, got none")
    for prompt in prompts:
        if not isinstance(prompt, str | Mapping):
            raise ConfigError(
                f"expected a prompt as a text or the arguments of a call, got {brief(prompt)}"
            )
    return prompts


@contextmanager
def counted_steps(
    pipe: Any, on_step: Callable[[Steps], None] = lambda steps: None
) -> Iterator[Steps]:
    """Count the steps of a pipeline by those of its scheduler, which all pipelines have."""
    scheduler: Any = getattr(pipe, "scheduler", None)
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"expected a pipeline with a scheduler, got {type(pipe).__name__} without"
        )
    kind = type(scheduler)
    steps = Steps()

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.step(self, *args, **kwargs)
        timestep = float(args[1] if len(args) > 1 else kwargs["timestep"])
        # Other modalities of one step have copies of the scheduler, at the same timestep.
        if not steps.timesteps or steps.timesteps[-1] != timestep:
            steps.timesteps.append(timestep)
            steps.index += 1
            on_step(steps)
        return result

    # A class of its own, not an attribute: a copy of the scheduler must step itself.
    counting = type(kind.__name__, (kind,), {"step": step, "__module__": __name__})
    with Patch() as patch:
        patch.set(scheduler, "__class__", counting)
        yield steps


def _parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    parameters = parameters_of(pipe)
    if "num_inference_steps" not in parameters:
        raise ConfigError(
            "expected a pipeline that is called with num_inference_steps, got "
            f"{type(pipe).__name__}"
        )
    return parameters
