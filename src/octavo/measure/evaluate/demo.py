"""The demonstration: what FP8 does to a real model's attention, stage by stage."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from octavo.integrations.transformers.capture import CapturedQkv, capture_qkv
from octavo.integrations.transformers.small_model import NAME, load_small_model
from octavo.measure.evaluate.accumulation import accumulation_errors
from octavo.measure.evaluate.attention_error import (
    Row,
    attention_errors,
    decode_errors,
    quantization_errors,
)
from octavo.measure.records import Machine, Measurement

LAYERS = (0, 10, 20, 29)
LENGTHS = (1024, 8192, 32768, 131072)

Step = Callable[[int], None]


@dataclass(frozen=True)
class Stage:
    """One step of the demonstration: what it does, and the measurements it gives.

    run: called with a function to tell how many of num_steps are done, from time to time.
    """

    title: str
    run: Callable[[Step], Iterable[Measurement]]
    num_steps: int = 1


def sample_text() -> str:
    """A page of English about books and numbers."""
    folder = resources.files("octavo.measure.evaluate")
    return folder.joinpath("data", "sample.txt").read_text(encoding="utf-8")


def prepare() -> tuple[Any, Any]:
    """(model, input_ids): SmolLM2-135M-Instruct and the sample text as its tokens."""
    model, tokenizer = load_small_model()
    return model, tokenizer(sample_text(), return_tensors="pt").input_ids


def stages(model: Any, input_ids: Any, command: str) -> list[Stage]:
    """All steps for one model and text; each row names the command that repeats it."""
    row = partial(Measurement, machine=Machine.current(), command=command)
    captured: dict[int, CapturedQkv] = {}

    def capture(step: Step) -> list[Measurement]:
        captured.update(capture_qkv(model, input_ids, LAYERS))
        return []

    def each_layer(measure: Callable[[int, CapturedQkv, Row], Iterable[Measurement]]) -> Any:
        return lambda step: [
            record for layer in LAYERS for record in measure(layer, captured[layer], row)
        ]

    return [
        Stage(f"{NAME} reads {input_ids.shape[1]} tokens", capture),
        Stage("quantizing queries, keys and values", each_layer(quantization_errors)),
        Stage("attention in FP8", each_layer(attention_errors)),
        Stage("decoding over FP8 pages", each_layer(decode_errors)),
        Stage(
            f"a needle in {LENGTHS[-1]:,} keys",
            lambda step: accumulation_errors(list(LENGTHS), row),
        ),
    ]
