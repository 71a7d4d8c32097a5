"""What the demonstration is made of, and how large each part is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table
from octavo.measure.run import Watch


@dataclass(frozen=True)
class Stage:
    """One part of the demonstration.

    run: measures, with its records in the demonstration's file when it returns. tell: the records
    as tables, and sentences, for a terminal.
    """

    title: str
    run: Callable[[Watch], list[Measurement]]
    tell: Callable[[Sequence[Measurement]], Sequence[Table | str]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured. The defaults are for less than five minutes on two CPU cores."""

    calibration_images: int = 32
    chart_questions: int = 60
    layers: tuple[int, ...] = (0, 10, 20, 29)
    key_counts: tuple[int, ...] = (1024, 8192, 32768, 131072)
    context: int = 512
    chunk: int = 128
    num_windows: int = 4
    needle_lengths: tuple[int, ...] = (1024, 4096)
    answer_tokens: int = 48
    num_images: int = 4
    num_inference_steps: int = 8


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes in one thread.

    For small matrices: more threads gain little on a machine that is idle, and on a busy one their
    waiting for each other takes many times as long as the work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
