"""The stages of the demonstration with the chart reader and SmolLM2, and how large each is."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

import torch

from octavo.atomic import write_atomically
from octavo.calibration.data import ImagePrompt, PromptData
from octavo.calibration.observers import CalibrationSettings
from octavo.calibration.run import calibrate_to_file
from octavo.calibration.scale_file import load_scales
from octavo.demo.attention_errors import (
    Error,
    accumulation_errors,
    attention_errors,
    decode_errors,
    quantization_errors,
)
from octavo.demo.chart_reader import ChartReader
from octavo.demo.charts import make_chart
from octavo.integrations.transformers.calibrate import ImageModel, capture_qkv
from octavo.integrations.transformers.text_model import SMALL_MODEL, TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure import store
from octavo.measure.evaluate import chartqa, needle, perplexity
from octavo.measure.evaluate.answering import stop_tokens
from octavo.measure.evaluate.calibration import calibration_records
from octavo.measure.evaluate.image_requests import ChartRequest
from octavo.measure.evaluate.image_scores import fitting
from octavo.measure.evaluate.language import local_rows, machine_of
from octavo.measure.evaluate.question_files import ChartQuestion
from octavo.measure.evaluate.requests import (
    BASELINE,
    LanguageRequest,
    NeedleRequest,
    PerplexityRequest,
)
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.layers import ERRORS
from octavo.measure.report.quality import needle_table
from octavo.measure.report.tables import Table, filled_table
from octavo.measure.rows import Row
from octavo.measure.run import Outcome, Participant, Progress, Records, Watch, ready, run_whole
from octavo.serving.engine.llm import LLM
from octavo.serving.engine.request import Sampling
from octavo.serving.engine.settings import EngineSettings

COMMAND = "octavo demo"
NUM_SHOWN = 6  # charts
SCALES, IMAGE, TEXT = "scales.json", "pictures/charts.jpg", "text.txt"
COLUMNS = 3
WIDTH, GAP, LINE = 300, 12, 18  # pixels: of a chart, between charts, of a line of text
QUALITY = 88  # of the JPEG
QUESTION = "Why do we have seasons? Answer in one sentence."
PERPLEXITY_ROWS = (BASELINE, "tensor", "token")
ROWS = (BASELINE, "token")  # the one that needs no calibration


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


@dataclass(frozen=True)
class ChartDemo:
    """What the chart reader answers in BF16, FP8 dynamic and FP8 static, and some of the charts.

    Its records are appended to the file `records`, beside which scales and images are written.
    answers: of each row.
    """

    reader: ChartReader
    records: Path
    sizes: Sizes
    answers: dict[str, list[str]] = field(default_factory=dict)

    @property
    def stages(self) -> list[Stage]:
        """Calibration, then the questions: in this order."""
        num_images, num_questions = self.sizes.calibration_images, self.sizes.chart_questions
        return [
            Stage(
                f"Chart reader: {num_images} noisy charts set scales",
                self._calibrate,
                lambda found: [
                    f"Static scales of {len({r.case['layer'] for r in found})} layers: {SCALES}"
                ],
            ),
            Stage(
                f"Chart reader: {num_questions} questions, BF16 and FP8 attention",
                self._evaluate,
                lambda found: [chartqa.chartqa_table(found), self.changed()],
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
        found = calibration_records(result, COMMAND)
        store.append(self.records, found)
        return found

    def _evaluate(self, watch: Watch) -> list[Measurement]:
        from octavo.demo.chart_drawing import generated_questions

        questions = generated_questions(self.sizes.chart_questions)
        scales = load_scales(self.records.parent / SCALES)
        rows = chartqa.chart_rows(ChartRequest.recipe, scales)
        with one_thread():
            found = chartqa.evaluate(
                self.reader,
                questions,
                rows,
                data="generated plain charts",
                command=COMMAND,
                batch_size=20,
                on_step=Progress(watch, "answering", len(rows) * len(questions)).add,
                on_answers=self.answers.__setitem__,
            )
        # Charts with a question, the truth and all answers: first where recipes disagree.
        shown = choose_examples(questions, list(self.answers.values()), NUM_SHOWN)
        path = self.records.parent / IMAGE
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, draw_chart_sheet(questions, self.answers, shown))
        found = [replace(one, case={**one.case, "picture": IMAGE}) for one in found]
        store.append(self.records, found)
        return found

    def changed(self) -> str:
        """How many answers of each later row are other words than the first row's."""
        (name, first), *others = self.answers.items()
        changed = ", ".join(
            f"{other} {sum(a != b for a, b in zip(first, answers, strict=True))}"
            for other, answers in others
        )
        return f"Answers in other words than {name}'s, of {len(first)}: {changed}."


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


@dataclass(frozen=True)
class LanguageDemo:
    """Four stages with one model; its records are appended to the file `records`.

    text: what is read; it is written beside the records, for the command that repeats it.
    """

    text_model: TextModel
    text: str
    records: Path
    sizes: Sizes

    @property
    def stages(self) -> list[Stage]:
        """From single layers to a whole answer."""
        sizes = self.sizes
        longest = f"{max(sizes.needle_lengths):,}"
        return [
            Stage(
                f"{SMALL_MODEL}: the error of FP8 in its attention",
                self._errors,
                # The tables of the report's sections, without its texts.
                lambda records: [
                    table
                    for kind in ERRORS
                    for section in kind.make([row for row in records if row.op in kind.ops])
                    for table in section.tables
                ],
            ),
            Stage(
                f"{SMALL_MODEL}: perplexity, {sizes.num_windows} × {sizes.context} tokens",
                self._perplexity,
                lambda records: [perplexity.perplexity_table(records)],
            ),
            Stage(
                f"{SMALL_MODEL}: a needle in up to {longest} tokens",
                self._needle,
                lambda records: [needle_table(records)],
            ),
            Stage(f"{SMALL_MODEL}: a chat", self._chat, lambda records: [chat_table(records)]),
        ]

    def _errors(self, watch: Watch) -> list[Measurement]:
        layers, machine = self.sizes.layers, Machine.current()
        total = 3 * len(layers) + 2
        watch("reading", 0, total)
        ids = self.text_model.first_window(self.text, 1024)[None]
        captured = capture_qkv(self.text_model.model, ids, layers)
        errors: list[Error] = []
        measures = (quantization_errors, attention_errors, decode_errors)
        for number, measure in enumerate(measures):
            for place, layer in enumerate(layers, 1):
                errors += measure(layer, captured[layer])
                watch(f"layer {layer}", number * len(layers) + place, total)
        about = {"model": self.text_model.name}
        errors = [replace(error, case={**about, **error.case}) for error in errors]
        errors += accumulation_errors(self.sizes.key_counts)  # of no model
        watch("accumulating", total, total)
        found = [
            Measurement(
                impl="reference",
                machine=machine,
                command=COMMAND,
                baseline=None if error.op == "quantize_error" else "float64",
                **vars(error),
            )
            for error in errors
        ]
        store.append(self.records, found)
        return found

    def _perplexity(self, watch: Watch) -> list[Measurement]:
        path = self.records.parent / TEXT
        write_atomically(path, self.text.encode())
        request = PerplexityRequest(
            data=path,
            context=self.sizes.context,
            chunk=self.sizes.chunk,
            num_windows=self.sizes.num_windows,
            recipe=PERPLEXITY_ROWS,
            calibration_windows=1,
        )
        return perplexity.run(request, self.records, watch, text_model=self.text_model)

    def _needle(self, watch: Watch) -> list[Measurement]:
        lengths = ",".join(map(str, self.sizes.needle_lengths))
        request = NeedleRequest(
            lengths=lengths, depths="0.5", repetitions=1, model=SMALL_MODEL, recipe=ROWS, num_keys=1
        )
        return needle.run(request, self.records, watch, text_model=self.text_model)

    def _chat(self, watch: Watch) -> list[Measurement]:
        request = LanguageRequest(recipe=ROWS)
        rows = [row for _, row in local_rows(request, self.text_model, {})]
        progress = Progress(watch, "answering", len(rows))

        def keep(record: Measurement) -> None:
            store.append(self.records, [record])
            progress.add()

        progress.add(0)
        with one_thread():
            return chat_turn(
                self.text_model,
                QUESTION,
                rows,
                max_tokens=self.sizes.answer_tokens,
                command=COMMAND,
                records=Records(on_record=keep),
            )


def chat_turn(
    text_model: TextModel,
    question: str,
    rows: Sequence[Row],
    *,
    max_tokens: int,
    command: str,
    records: Records | None = None,
) -> list[Measurement]:
    """A model's greedy answer to one question in the engine, with each row's recipe, as records.

    num_same_tokens: up to where an answer is the first row's. The model is left as it came.
    """
    tokens = chat_tokens(text_model.tokenizer, [{"role": "user", "content": question}])
    stop = tuple(sorted(stop_tokens(text_model)))
    sampling = Sampling(temperature=0, max_tokens=max_tokens, stop_token_ids=stop)
    num_pages = -(-(len(tokens) + max_tokens) // EngineSettings().page_size) + 1
    answers: list[tuple[int, ...]] = []  # of the rows so far

    def measure(row: Row) -> Outcome:
        settings = EngineSettings(max_num_seqs=1, num_pages=num_pages)
        with LLM(text_model.model, recipe=row.recipe(), settings=settings) as llm:
            (answer,) = llm.generate([tokens], sampling)
        text = text_model.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        values = {"num_tokens": len(answer.tokens)}
        if answers:
            pairs = zip(answers[0], answer.tokens, strict=False)
            values["num_same_tokens"] = sum(1 for _ in takewhile(lambda p: p[0] == p[1], pairs))
        answers.append(answer.tokens)
        return Outcome(values, {"text": text or "(nothing)"})

    participants = [
        Participant(
            name=row.name,
            impl="engine",
            about={"model": text_model.name, "dtype": text_model.dtype},
            machine=machine_of(text_model.model),
            open=ready(row),
        )
        for row in rows
    ]
    about = {"prompt": question}
    return run_whole(participants, measure, records, op="texts", command=command, about=about)


def chat_table(records: Sequence[Measurement]) -> Table:
    """What each row answered."""
    return filled_table(
        records,
        caption=f"chat: {records[0].case['model']}: {records[0].case['prompt']}",
        columns=("recipe", "text", "num_tokens", "num_same_tokens"),
        heads={"text": "answer", "num_tokens": "tokens", "num_same_tokens": "the same"},
    )
