"""ChartQA: what FP8 vision attention does to a model's answers about charts.

The three scores are those of ChartQA and of lm-eval's task of that name. A model that was asked to
end with "Final Answer: …" is judged by what follows; an answer without those words is taken whole
by `relaxed_accuracy` and `exact_match` if it is one line, as the chart reader's are.
"""

import hashlib
import json
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from octavo.calibration.data import batches
from octavo.calibration.run import Calibration, calibrate
from octavo.calibration.scale_file import ScaleHeader, ScaleSet, load_scales
from octavo.calibration.settings import CalibrationSettings
from octavo.errors import ConfigError
from octavo.integrations.embedded_models import CHART_READER
from octavo.integrations.transformers.calibrate import layer_names, observe_images
from octavo.integrations.transformers.tokenizer import PromptSettings
from octavo.integrations.transformers.vision_language import load_vlm_reader
from octavo.kernels.device import default_device
from octavo.measure.evaluate.image_requests import ChartRequest
from octavo.measure.evaluate.language import local_participants
from octavo.measure.evaluate.question_files import ChartQuestion, load_chart_questions
from octavo.measure.records import Measurement
from octavo.measure.report.tables import Table
from octavo.measure.rows import VISION, Row, parse_rows
from octavo.measure.run import Outcome, Progress, Records, Watch, run_whole
from octavo.measure.statistics import paired_difference

BATCH_SIZE = 16
NUM_CALIBRATION_IMAGES = 128
TOLERANCE = 0.05
SHOWN = ("relaxed (%)", "anywhere (%)", "exact (%)")  # the scores, in their order

Step = Callable[[int], None]  # told how many questions are done
Reader = Any  # has a name, a model and answer(images, questions), as VlmReader does


def run(
    request: ChartRequest,
    output: Path | None,
    watch: Watch,
    *,
    generate: Callable[..., list[ChartQuestion]],
) -> list[Measurement]:
    """Ask every row; a record is in the file `output` as soon as its row is done.

    generate: makes so many questions about charts, "noisy" ones to calibrate on.
    """
    needs_scales = any(row.needs_scales for row in chart_rows(request.recipe))
    if request.scales is not None and not needs_scales:
        raise ConfigError("--scales is for rows with static scales, which are not asked for")
    records = Records.of_file(output)
    reader = load_reader(request.model, default_device().torch_device, request.prompts)
    questions = load_chart_questions(request.data, request.num_questions, generate)
    scales = None if request.scales is None else load_scales(request.scales)
    if needs_scales and scales is None:
        noisy = generate(4 * NUM_CALIBRATION_IMAGES, "noisy")[::4]
        scales = calibration_scales(
            reader,
            noisy,
            data="generated noisy charts",
            on_step=lambda num_seen: watch("calibrating", num_seen, len(noisy)),
        )
    rows = chart_rows(request.recipe, scales)
    return evaluate(
        reader,
        questions,
        rows,
        data=request.data,
        command=request.command,
        batch_size=request.batch_size,
        on_step=Progress(watch, "answering", len(rows) * len(questions)).add,
        records=records,
    )


def load_reader(
    model: str | None,
    device: str | torch.device,
    prompts: PromptSettings = PromptSettings(),
) -> Reader:
    """The chart reader that comes with octavo, one in a folder, or any image-text model."""
    if model is None or CHART_READER.matches(model):
        if prompts != PromptSettings():
            raise ConfigError("--chat-template is for image-text models; the chart reader has none")
        return CHART_READER.load(model).to(device)
    return load_vlm_reader(model, prompts=prompts).to(device)


def chart_rows(names: Sequence[str], scales: ScaleSet | None = None) -> list[Row]:
    """The rows of these names; scales: for those that need some, None leaves them without."""
    rows = []
    for row in parse_rows(names, VISION):
        if row.linear is not None:
            raise ConfigError(f"row {row.name}: expected vision attention, got linear layers too")
        if not row.is_plain and row.digest is None and row.name in VISION.words:
            row = replace(row, name=f"fp8 {row.name}")
        recipe = None
        if row.needs_scales and scales is not None:
            recipe = row.recipe(scales.to_dict()["layers"])
        rows.append(row if recipe is None else row.using(recipe))
    return rows


def calibration_scales(
    reader: Reader,
    questions: Sequence[ChartQuestion],
    *,
    data: str,
    margin: float = 1.5,
    batch_size: int = BATCH_SIZE,
    on_step: Step = lambda num_questions: None,
) -> ScaleSet:
    """Static scales of a reader's tower, by questions that are not measured; data: their name."""
    calibration = calibrate(
        Calibration(layer_names(reader.model), CalibrationSettings(margin=margin)),
        lambda num_seen: batches(iter(questions), batch_size),
        observe=partial(observe_images, reader.model),
        forward=partial(_answer, reader),
        on_batch=on_step,
    )
    header = ScaleHeader(kind="vision_attention", model=reader.name, data=data)
    return calibration.result(header).scales


def evaluate(
    reader: Reader,
    questions: Sequence[ChartQuestion],
    rows: Sequence[Row],
    *,
    data: str,
    command: str,
    batch_size: int = BATCH_SIZE,
    on_step: Step = lambda num_questions: None,
    on_answers: Callable[[str, list[str]], None] = lambda name, answers: None,
    records: Records | None = None,
) -> list[Measurement]:
    """One record for each row: the scores, and how they compare with the first row's.

    The model is left as it came. Every row after the first says `recovery_percent`, the share of
    the first row's relaxed accuracy that is left (unless that is 0, of which nothing can be left),
    and the confidence interval of the difference.
    on_answers: called with each row's name and its answers.
    """
    relaxed: list[list[float]] = []  # accuracy of the rows so far, question by question

    def measure(model: Any) -> Outcome:
        answers: list[str] = []
        for batch in batches(iter(questions), batch_size):
            answers += _answer(reader, batch)
            on_step(len(batch))
        on_answers(rows[len(relaxed)].name, answers)
        pairs = list(zip(answers, (q.answers for q in questions), strict=True))
        scores = {name: [score(*pair) for pair in pairs] for name, score in SCORES.items()}
        values = {f"{name}_percent": 100 * fmean(own) for name, own in scores.items()}
        relaxed.append(scores["relaxed_accuracy"])
        own, first = relaxed[-1], relaxed[0]
        if len(relaxed) > 1:
            values |= paired_difference(own, first)
            values |= {"recovery_percent": 100 * fmean(own) / fmean(first)} if any(first) else {}
        return Outcome(values)

    return run_whole(
        local_participants(rows, reader.model, {"model": reader.name}),
        measure,
        records,
        op="chartqa",
        command=command,
        about={
            "data": data,
            "num_questions": len(questions),
            "questions_sha256": _digest(questions),
        },
    )


def _digest(questions: Sequence[ChartQuestion]) -> str:
    """Of all that is asked, images too: a file may change and keep its name."""
    found = hashlib.sha256()
    for one in questions:
        found.update(json.dumps([one.text, one.answers, one.image.size]).encode())
        found.update(one.image.tobytes())
    return found.hexdigest()[:16]


def _answer(reader: Reader, questions: Sequence[ChartQuestion]) -> list[str]:
    return list(reader.answer([q.image for q in questions], [q.text for q in questions]))


def chartqa_table(records: Sequence[Measurement]) -> Table:
    """The rows as a table that says whether each differs from the first."""
    rows = []
    for record in records:
        values, verdict, interval = record.values, None, None
        if "difference_points" in values:
            low, high = values["difference_low_points"], values["difference_high_points"]
            interval = f"[{low:+.2f}, {high:+.2f}]"
            verdict = f"no difference from {record.baseline}"
            verdict = "differs" if values["is_different"] else verdict
        compared = values.get("recovery_percent"), values.get("difference_points")
        scores = (values[f"{name}_percent"] for name in SCORES)
        rows.append((str(record.case["recipe"]), *scores, *compared, interval, verdict))
    first = records[0].case
    compared_heads = ("recovery (%)", "difference (points)", "95 % interval", "verdict")
    return Table(
        caption=f"chartqa: {first['model']}, {first['num_questions']} questions of {first['data']}",
        header=("recipe", *SHOWN, *compared_heads),
        rows=tuple(rows),
    )


def final_answer(text: str) -> str:
    """What a model's text says after the last "answer:", or a text of one line as it is."""
    marked = _marked_answer(text)
    if marked:
        return marked
    lines = text.strip().splitlines()
    return lines[0].strip() if marked is None and len(lines) == 1 else ""


def _marked_answer(text: str) -> str | None:
    """The first line after the last "answer:"; None where the text has none."""
    plain = re.sub(r"(answer)\**:\**", r"\1:", text, flags=re.IGNORECASE)
    _, mark, after = plain.lower().rpartition("answer:")
    if not mark:
        return None
    lines = plain[len(plain) - len(after) :].splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    return re.sub(r"[*_\[\]()]", "", first).strip()


def relaxed_accuracy(text: str, truths: Sequence[str]) -> float:
    """1.0 if the final answer is one of the truths: numbers within 5 %, texts but for case."""
    answer = final_answer(text)
    return float(bool(answer) and any(_is_close(answer, truth) for truth in truths))


def anywhere_accuracy(text: str, truths: Sequence[str]) -> float:
    """As `relaxed_accuracy`; without "answer:" a truth may stand anywhere, as a whole word.

    Generous: it shows how much of the difference between models is in following the format.
    """
    if relaxed_accuracy(text, truths) or _marked_answer(text):
        return relaxed_accuracy(text, truths)
    return float(any(_is_inside(text, truth) for truth in truths))


def exact_match(text: str, truths: Sequence[str]) -> float:
    """1.0 if the final answer is the first truth, letter by letter."""
    return float(bool(truths) and final_answer(text) == truths[0].strip())


SCORES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "relaxed_accuracy": relaxed_accuracy,
    "anywhere_accuracy": anywhere_accuracy,
    "exact_match": exact_match,
}


def _is_close(answer: str, truth: str) -> bool:
    answer, truth = _normal(answer), _normal(truth)
    given, wanted = _number(answer), _number(truth)
    if given is None or wanted is None:
        if len(truth) == 1 and truth.isalpha() and answer:  # an option: A, B, C …
            return answer[0].lower() == truth.lower()
        return answer.lower() == truth.lower()
    if _is_within(given[0], wanted[0]):
        return True
    # 12% and 0.12 are the same number, whichever side wrote the sign.
    return (given[1] and _is_within(given[0] / 100, wanted[0])) or (
        wanted[1] and _is_within(given[0], wanted[0] / 100)
    )


def _is_within(given: float, wanted: float) -> bool:
    return abs(given - wanted) <= TOLERANCE * max(abs(wanted), 1e-10)


def _normal(text: str) -> str:
    """A text without quotation marks; a number without $, thousands separators and a full stop."""
    text = text.strip()
    if not any(char.isdigit() for char in text):
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return (text[1:-1] if is_quoted else text).removesuffix(".")
    marks = string.punctuation.replace("%", "") + string.whitespace
    return text.rstrip(marks).replace(",", "").replace("$", "")


def _number(text: str) -> tuple[float, bool] | None:
    """The number in a text and whether it is in percent; None if the text is no number."""
    digits = text.removesuffix("%").strip()
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", digits):
        return None
    value = float(digits)
    return (value, text.endswith("%")) if np.isfinite(value) else None


def _is_inside(text: str, truth: str) -> bool:
    normal = _normal(truth)
    if not normal:
        return False
    where, before = text, r"(?<!\w)"
    if _number(normal):  # neither the end of a longer number nor the opposite of a negative one
        where, before = text.replace(",", ""), r"(?<![\w.-])"
    pattern = rf"{before}{re.escape(normal)}(?!\w|\.\d)"
    return re.search(pattern, where, re.IGNORECASE) is not None
