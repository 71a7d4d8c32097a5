"""The chart reader in the demonstration: calibrated on noisy charts, asked about plain ones."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo.calibration.data import PromptData
from octavo.calibration.image_data import ImagePrompt
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import calibrate_to_file
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.calibrate import ImageModel
from octavo.integrations.transformers.chart_reader import ChartReader
from octavo.measure.evaluate.calibration import calibration_records
from octavo.measure.evaluate.chartqa import BASELINE, SETTINGS, evaluate, recipe_rows
from octavo.measure.evaluate.chartqa_data import Question, generated_questions
from octavo.measure.evaluate.charts import make_chart
from octavo.measure.evaluate.demo import Stage, Step
from octavo.measure.records import Measurement
from octavo.measure.report.html import Picture

NUM_CALIBRATION_IMAGES = 32
NUM_QUESTIONS = 150
NUM_PICTURES = 8
BATCH_SIZE = 20


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes in one thread.

    The matrices here are small: more threads gain little on a machine that is idle, and on a busy
    one their waiting for each other takes many times as long as the work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ChartDemo:
    """What the chart reader answers in BF16, FP8 dynamic and FP8 static, and some of the charts.

    scale_path: where calibration saves its scales, which the row static then has.
    """

    def __init__(
        self,
        reader: ChartReader,
        scale_path: Path,
        command: str,
        *,
        num_images: int = NUM_CALIBRATION_IMAGES,
        num_questions: int = NUM_QUESTIONS,
    ) -> None:
        self.reader, self.scale_path, self.command = reader, scale_path, command
        self.num_images, self.num_questions = num_images, num_questions
        self.answers: dict[str, list[str]] = {}
        self._scales: ScaleSet | None = None
        self._questions: list[Question] = []

    @property
    def stages(self) -> list[Stage]:
        """Calibration, then the questions: in this order."""
        num_rows = 1 + len(SETTINGS)
        return [
            Stage(f"{self.num_images} noisy charts set scales", self._calibrate, self.num_images),
            Stage(
                f"{self.num_questions} questions, {num_rows} times",
                self._evaluate,
                num_rows * self.num_questions,
            ),
        ]

    def _calibrate(self, step: Step) -> list[Measurement]:
        num_seen = 0

        def tell(num_prompts: int) -> None:
            nonlocal num_seen
            step(num_prompts - num_seen)
            num_seen = num_prompts

        model = ImageModel(self.reader.name, self.reader.model, self.reader.process_images)
        result = calibrate_to_file(
            model.subject(),
            noisy_charts(self.num_images),
            self.scale_path,
            CalibrationSettings(),
            num_prompts=self.num_images,
            batch_size=8,
            on_prompts=tell,
        )
        self._scales = result.scales
        return calibration_records(result, self.command)

    def _evaluate(self, step: Step) -> list[Measurement]:
        self._questions = generated_questions(self.num_questions)
        return evaluate(
            self.reader,
            self._questions,
            recipe_rows([BASELINE, *SETTINGS], self._scales),
            data="generated plain charts",
            command=self.command,
            batch_size=BATCH_SIZE,
            on_step=step,
            on_answers=self.answers.__setitem__,
        )

    def pictures(self, num_pictures: int = NUM_PICTURES) -> list[Picture]:
        """Charts with a question, the truth and all answers: first where recipes disagree."""
        if not self.answers:
            raise ConfigError("expected stages that have run, got no answers yet")
        shown = choose_examples(self._questions, list(self.answers.values()), num_pictures)
        return [
            Picture(
                caption=self._questions[index].text,
                png=_png(self._questions[index].image),
                facts=(
                    ("truth", self._questions[index].answers[0]),
                    *((name, answers[index] or "(nothing)") for name, answers in self._named()),
                ),
            )
            for index in shown
        ]

    def _named(self) -> list[tuple[str, list[str]]]:
        return list(self.answers.items())

    def num_changed(self) -> dict[str, int]:
        """How many answers of each later row are other words than the first row's."""
        (_, first), *others = self._named()
        return {
            name: sum(a != b for a, b in zip(first, answers, strict=True))
            for name, answers in others
        }


def noisy_charts(num_images: int) -> PromptData[ImagePrompt]:
    """Charts of the noisy distribution, as images to calibrate on."""
    from octavo.measure.evaluate.chart_drawing import draw_chart

    def read(start: int) -> Iterator[ImagePrompt]:
        for seed in range(start, num_images):
            yield [draw_chart(make_chart(seed, "noisy"))]

    return PromptData("generated noisy charts", f"{num_images} charts", num_images, read)


def choose_examples(
    questions: Sequence[Question], answers: Sequence[Sequence[str]], count: int
) -> list[int]:
    """Which questions to show, each of another chart: at most half of them disagreements."""
    chosen: list[int] = []
    seen: set[int] = set()

    def take(indices: Sequence[int], limit: int) -> None:
        for index in indices:
            if len(chosen) < limit and id(questions[index].image) not in seen:
                chosen.append(index)
                seen.add(id(questions[index].image))

    everything = range(len(questions))
    take([i for i in everything if len({row[i] for row in answers}) > 1], count // 2)
    # Spread over the rest, so that all kinds of charts and questions have a chance.
    stride = max(1, len(questions) // max(1, count - len(chosen)))
    take([(i * stride + i) % len(questions) for i in everything], count)
    return chosen


def _png(image: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
