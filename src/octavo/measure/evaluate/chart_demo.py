"""The chart reader in the demonstration: calibrated on noisy charts, asked about plain ones."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from octavo.atomic import write_atomically
from octavo.calibration.data import PromptData
from octavo.calibration.image_data import ImagePrompt
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import calibrate_to_file
from octavo.calibration.scale_file import ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.transformers.calibrate import ImageModel
from octavo.integrations.transformers.chart_reader import ChartReader
from octavo.measure import store
from octavo.measure.evaluate.calibration import calibration_records
from octavo.measure.evaluate.chart_sheet import draw_chart_sheet
from octavo.measure.evaluate.chartqa import (
    BASELINE,
    SETTINGS,
    chartqa_table,
    evaluate,
    recipe_rows,
)
from octavo.measure.evaluate.chartqa_data import Question, generated_questions
from octavo.measure.evaluate.charts import make_chart
from octavo.measure.evaluate.demo_stage import Sizes, Stage, Watch, one_thread
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table

NUM_PICTURES = 6
BATCH_SIZE = 20
SCALES, PICTURE = "scales.json", "pictures/charts.jpg"


class ChartDemo:
    """What the chart reader answers in BF16, FP8 dynamic and FP8 static, and some of the charts.

    Its records are appended to the file `records`, beside which scales and pictures are written.
    """

    def __init__(self, reader: ChartReader, records: Path, command: str, sizes: Sizes) -> None:
        self.reader, self.records, self.command, self.sizes = reader, records, command, sizes
        self.answers: dict[str, list[str]] = {}
        self._scales: ScaleSet | None = None
        self._questions: list[Question] = []

    @property
    def stages(self) -> list[Stage]:
        """Calibration, then the questions: in this order."""
        num_images = self.sizes.calibration_images
        return [
            Stage(f"Chart reader: {num_images} noisy charts set scales", self._calibrate, _saved),
            Stage(
                f"Chart reader: {self.sizes.chart_questions} questions, BF16 and FP8 attention",
                self._evaluate,
                self._told,
            ),
        ]

    def _calibrate(self, watch: Watch) -> list[Measurement]:
        model = ImageModel(self.reader.name, self.reader.model, self.reader.process_images)
        num_images = self.sizes.calibration_images
        with one_thread():
            result = calibrate_to_file(
                model.subject(),
                noisy_charts(num_images),
                self.records.parent / SCALES,
                CalibrationSettings(),
                num_prompts=num_images,
                batch_size=8,
                on_prompts=lambda num_prompts: watch("calibrating", num_prompts, num_images),
            )
        self._scales = result.scales
        found = calibration_records(result, self.command)
        store.append(self.records, found)
        return found

    def _evaluate(self, watch: Watch) -> list[Measurement]:
        self._questions = generated_questions(self.sizes.chart_questions)
        rows = recipe_rows([BASELINE, *SETTINGS], self._scales)
        total, num_done = len(rows) * len(self._questions), 0

        def step(count: int) -> None:
            nonlocal num_done
            num_done += count
            watch("answering", num_done, total)

        with one_thread():
            found = evaluate(
                self.reader,
                self._questions,
                rows,
                data="generated plain charts",
                command=self.command,
                batch_size=BATCH_SIZE,
                on_step=step,
                on_answers=self.answers.__setitem__,
            )
        self._draw()
        found = [replace(one, case={**one.case, "picture": PICTURE}) for one in found]
        store.append(self.records, found)
        return found

    def _draw(self) -> None:
        """Charts with a question, the truth and all answers: first where recipes disagree."""
        shown = choose_examples(self._questions, list(self.answers.values()), NUM_PICTURES)
        path = self.records.parent / PICTURE
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, draw_chart_sheet(self._questions, self.answers, shown))

    def _told(self, records: Sequence[Measurement]) -> list[Table | str]:
        changed = ", ".join(f"{name} {count}" for name, count in self.num_changed().items())
        words = f"Answers in other words than {BASELINE}'s, of {len(self._questions)}: {changed}."
        return [chartqa_table(records), words]

    def num_changed(self) -> dict[str, int]:
        """How many answers of each later row are other words than the first row's."""
        if not self.answers:
            raise ConfigError("expected stages that have run, got no answers yet")
        (_, first), *others = self.answers.items()
        return {
            name: sum(a != b for a, b in zip(first, answers, strict=True))
            for name, answers in others
        }


def _saved(records: Sequence[Measurement]) -> list[Table | str]:
    layers = len({record.case["layer"] for record in records})
    return [f"Static scales of {layers} layers: {SCALES}"]


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
