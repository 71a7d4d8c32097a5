"""Advice as data: a recipe, what to expect of it, and the reasons and warnings that go with it."""

import json
import shlex
from dataclasses import asdict, dataclass
from typing import Any

from octavo.measure.advise.gpus import Gpu
from octavo.measure.advise.workload import Workload
from octavo.recipe import Bf16Settings, Recipe


@dataclass(frozen=True)
class Expectation:
    """A time in BF16 and with the recipe, in milliseconds.

    before, after: its parts. based_on: models whose records it was corrected by. note: why there is
    no speed-up to be said; "" where there is one.
    """

    what: str
    before_ms: float
    after_ms: float
    before: dict[str, float]
    after: dict[str, float]
    based_on: tuple[str, ...] = ()
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times as fast; None if a note says why not."""
        return None if self.note else self.before_ms / self.after_ms


@dataclass(frozen=True)
class MemoryRow:
    """Bytes, or sequences that fit, in BF16 and with the recipe."""

    what: str
    before: int
    after: int
    is_bytes: bool = True


@dataclass(frozen=True)
class Part:
    """What was decided for one part of a model: fields of a recipe, and why."""

    fields: dict[str, Any]
    expectations: tuple[Expectation, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """What to quantize in a model on a GPU for a workload; served: its name in commands.

    refused: why `octavo serve` does not run the model; None if it does. has_images: whether the
    model has a vision tower.
    """

    model: str
    served: str
    parts: str
    gpu: Gpu
    workload: Workload
    recipe: Recipe
    is_omni: bool
    expectations: tuple[Expectation, ...]
    memory: tuple[MemoryRow, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    refused: str | None = None
    has_images: bool = False

    @property
    def command(self) -> str | None:
        """The command that serves the model with this recipe; of videos, the one that makes one.

        None if octavo has no such command for the model.
        """
        if self.refused is None:
            return serve_command(self.served, self.recipe, is_omni=self.is_omni)
        if not self.is_omni:
            return None
        words = ["octavo", "image", "--model", self.served, "--prompt", "PROMPT"]
        return shlex.join([*words, *_step_flags(self.recipe)])

    def to_json(self) -> str:
        """All of it as one JSON object."""
        expectations = [asdict(e) | {"speedup": e.speedup} for e in self.expectations]
        document = {
            "model": self.model,
            "parts": self.parts,
            "gpu": self.gpu.key,
            "workload": asdict(self.workload),
            "recipe": json.loads(self.recipe.to_json()),
            "command": self.command,
            "refused": self.refused,
            "expectations": expectations,
            "memory": [asdict(row) for row in self.memory],
            "reasons": self.reasons,
            "warnings": self.warnings,
        }
        return json.dumps(document, indent=2)


def serve_command(model: str, recipe: Recipe, *, is_omni: bool = False) -> str:
    """`octavo serve` with the flags that fill this recipe, or with its file where none would."""
    words = ["octavo", "serve", model, *(["--omni"] if is_omni else [])]
    if isinstance(recipe.vision_attention, Bf16Settings):
        return shlex.join([*words, "--recipe", "recipe.toml"])
    if recipe.kv_cache is not None:
        words += ["--kv-cache-dtype", "fp8"]
        for pattern in recipe.skip_layers:
            words += ["--kv-cache-dtype-skip-layers", pattern]
    if recipe.vision_attention is not None:
        words += ["--mm-encoder-attn-dtype", "fp8"]
    return shlex.join([*words, *_step_flags(recipe)])


def _step_flags(recipe: Recipe) -> list[str]:
    """The flags that `octavo serve` and `octavo image` share."""
    words = []
    if recipe.linear is not None:
        words += ["--quantization", "fp8"]
        for pattern in recipe.ignored_layers:
            words += ["--ignored-layers", pattern]
    if recipe.attention is not None:
        words += ["--attention", "fp8"]
    return words
