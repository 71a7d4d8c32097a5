"""The chart reader in the demonstration: calibrated on noisy charts, asked about plain ones."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from octavo.atomic import write_atomically
from octavo.calibration.data import ImagePrompt, PromptData
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import calibrate_to_file
from octavo.calibration.scale_file import ScaleSet
from octavo.demo.chart_reader import ChartReader
from octavo.demo.charts import make_chart
from octavo.demo.stage import Sizes, Stage, one_thread
from octavo.integrations.transformers.calibrate import ImageModel
from octavo.measure import store
from octavo.measure.evaluate.calibration import calibration_records
from octavo.measure.evaluate.chartqa import chart_rows, chartqa_table, evaluate
from octavo.measure.evaluate.image_scores import fitting
from octavo.measure.evaluate.question_files import ChartQuestion
from octavo.measure.evaluate.requests import ChartRequest
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table
from octavo.measure.run import Progress, Watch

NUM_SHOWN = 6
BATCH_SIZE = 20
SCALES, IMAGE = "scales.json", "pictures/charts.jpg"
COLUMNS = 3
WIDTH, GAP, LINE = 300, 12, 18  # pixels: of a chart, between charts, of a line of text
QUALITY = 88  # of the JPEG


class ChartDemo:
    """What the chart reader answers in BF16, FP8 dynamic and FP8 static, and some of the charts.

    Its records are appended to the file `records`, beside which scales and images are written.
    """

    def __init__(self, reader: ChartReader, records: Path, command: str, sizes: Sizes) -> None:
        self.reader, self.records, self.command, self.sizes = reader, records, command, sizes
        self.answers: dict[str, list[str]] = {}
        self._scales: ScaleSet | None = None
        self._questions: list[ChartQuestion] = []

    @property
    def stages(self) -> list[Stage]:
        """Calibration, then the questions: in this order."""
        num_images = self.sizes.calibration_images

        def saved(records: Sequence[Measurement]) -> list[Table | str]:
            layers = len({record.case["layer"] for record in records})
            return [f"Static scales of {layers} layers: {SCALES}"]

        return [
            Stage(f"Chart reader: {num_images} noisy charts set scales", self._calibrate, saved),
            Stage(
                f"Chart reader: {self.sizes.chart_questions} questions, BF16 and FP8 attention",
                self._evaluate,
                self._told,
            ),
        ]

    def _calibrate(self, watch: Watch) -> list[Measurement]:
        model = ImageModel(self.reader.name, self.reader.model, self.reader.image_processor)
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
        from octavo.demo.chart_drawing import generated_questions

        self._questions = generated_questions(self.sizes.chart_questions)
        rows = chart_rows(ChartRequest.recipe, self._scales)
        progress = Progress(watch, "answering", len(rows) * len(self._questions))
        with one_thread():
            found = evaluate(
                self.reader,
                self._questions,
                rows,
                data="generated plain charts",
                command=self.command,
                batch_size=BATCH_SIZE,
                on_step=progress.add,
                on_answers=self.answers.__setitem__,
            )
        # Charts with a question, the truth and all answers: first where recipes disagree.
        shown = choose_examples(self._questions, list(self.answers.values()), NUM_SHOWN)
        path = self.records.parent / IMAGE
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, draw_chart_sheet(self._questions, self.answers, shown))
        found = [replace(one, case={**one.case, "picture": IMAGE}) for one in found]
        store.append(self.records, found)
        return found

    def _told(self, records: Sequence[Measurement]) -> list[Table | str]:
        changed = ", ".join(f"{name} {count}" for name, count in self.num_changed().items())
        first, number = ChartRequest.recipe[0], len(self._questions)
        words = f"Answers in other words than {first}'s, of {number}: {changed}."
        return [chartqa_table(records), words]

    def num_changed(self) -> dict[str, int]:
        """How many answers of each later row are other words than the first row's."""
        (_, first), *others = self.answers.items()
        return {
            name: sum(a != b for a, b in zip(first, answers, strict=True))
            for name, answers in others
        }


def noisy_charts(num_images: int) -> PromptData[ImagePrompt]:
    """Charts of the noisy distribution, as images to calibrate on."""
    from octavo.demo.chart_drawing import draw_chart

    def read(start: int) -> Iterator[ImagePrompt]:
        for seed in range(start, num_images):
            yield [draw_chart(make_chart(seed, "noisy"))]

    return PromptData("generated noisy charts", f"{num_images} charts", num_images, read)


def choose_examples(
    questions: Sequence[ChartQuestion], answers: Sequence[Sequence[str]], count: int
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


def draw_chart_sheet(
    questions: Sequence[ChartQuestion], answers: Mapping[str, Sequence[str]], shown: Sequence[int]
) -> bytes:
    """A JPEG of the questions `shown`; answers: of all questions, by the names of rows."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=13)
    charts = []
    for image in (questions[index].image for index in shown):
        fitted = (WIDTH, max(1, round(image.height * WIDTH / image.width)))
        charts.append(image.convert("RGB").resize(fitted, Image.Resampling.LANCZOS))
    num_lines = 2 + len(answers)
    height = max(chart.height for chart in charts) + num_lines * LINE + GAP
    across = min(COLUMNS, len(charts))
    down = -(-len(charts) // across)
    size = (across * (WIDTH + GAP) + GAP, down * (height + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for place, (index, chart) in enumerate(zip(shown, charts, strict=True)):
        left = GAP + place % across * (WIDTH + GAP)
        top = GAP + place // across * (height + GAP)
        sheet.paste(chart, (left, top))
        truth = questions[index].answers[0]
        lines = [(questions[index].text, "black"), (f"truth: {truth}", "#444444")]
        for name, own in answers.items():
            color = "#1b6e3c" if own[index] == truth else "#a02020"
            lines.append((f"{name}: {own[index] or '(nothing)'}", color))
        for number, (text, color) in enumerate(lines):
            at = (left, top + chart.height + 2 + number * LINE)
            pen.text(at, fitting(pen, text, WIDTH, font), fill=color, font=font)
    content = io.BytesIO()
    sheet.save(content, "JPEG", quality=QUALITY)
    return content.getvalue()
