"""ChartQA: what FP8 vision attention does to a model's answers about charts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.calibration.scale_file import LayerScales, ScaleHeader, ScaleSet
from octavo.errors import ConfigError
from octavo.integrations.apply import apply_, restore_
from octavo.integrations.transformers.chart_reader import is_chart_reader, load_chart_reader
from octavo.integrations.transformers.tokenizer import PromptSettings
from octavo.integrations.transformers.vision import scale_name
from octavo.integrations.transformers.vlm_reader import load_vlm_reader
from octavo.layers.encoder_attention import EncoderAttention
from octavo.layers.scaling import DynamicScaling
from octavo.measure.evaluate.chartqa_data import Question, generated_questions
from octavo.measure.evaluate.chartqa_scores import SCORES, paired_difference
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.tables import Table
from octavo.numerics.qkv import QkvScales
from octavo.recipe import Recipe

BATCH_SIZE = 16
NUM_CALIBRATION_IMAGES = 128
BASELINE = "bf16"
# Row -> what its recipe says about vision attention.
SETTINGS: dict[str, Any] = {"dynamic": "fp8", "static": {"scaling": "static"}}

Step = Callable[[int], None]  # told how many questions are done


class Reader(Protocol):
    """A model that answers questions about images."""

    model: Any
    name: str

    def answer(self, images: Sequence[Any], questions: Sequence[str]) -> list[str]:
        """The answers to one question about each image."""
        ...


@dataclass(frozen=True)
class RecipeRow:
    """A row of the table: its name, and what is done to the model; None leaves it as it is."""

    name: str
    recipe: Recipe | None


def evaluate(
    reader: Reader,
    questions: Sequence[Question],
    rows: Sequence[RecipeRow],
    *,
    data: str,
    command: str,
    batch_size: int = BATCH_SIZE,
    on_step: Step | None = None,
    on_answers: Callable[[str, list[str]], None] = lambda name, answers: None,
) -> list[Measurement]:
    """One record for each row: the scores, and how they compare with the first row's.

    The model is left as it came. Every row after the first says `recovery_percent`, the share of
    the first row's relaxed accuracy that is left (unless that is 0, of which nothing can be left),
    and the confidence interval of the difference.
    on_answers: called with each row's name and its answers.
    """
    if not rows or len({row.name for row in rows}) != len(rows):
        raise ConfigError(f"expected rows of different names, got {[row.name for row in rows]}")
    if not questions:
        raise ConfigError("expected one question or more, got none")
    machine = _machine(reader)
    scores: dict[str, dict[str, list[float]]] = {}
    records = []
    for row in rows:
        answers = _answers(reader, questions, row.recipe, batch_size, on_step)
        on_answers(row.name, answers)
        scores[row.name] = _scores(questions, answers)
        records.append(
            Measurement(
                op="chartqa",
                impl="transformers",
                case={
                    "model": reader.name,
                    "data": data,
                    "recipe": row.name,
                    "num_questions": len(questions),
                },
                values=_values(scores[row.name], scores[rows[0].name], row is rows[0]),
                machine=machine,
                command=command,
                baseline=None if row is rows[0] else rows[0].name,
            )
        )
    return records


def check_rows(names: Sequence[str]) -> None:
    """ConfigError unless these are different rows that `recipe_rows` knows."""
    known = (BASELINE, *SETTINGS)
    if not names or len(set(names)) != len(names) or any(name not in known for name in names):
        raise ConfigError(f"expected different rows out of {', '.join(known)}, got {list(names)}")


def recipe_rows(names: Sequence[str], scales: ScaleSet | None) -> list[RecipeRow]:
    """The rows with these names: bf16, dynamic, static; static needs scales."""
    check_rows(names)
    rows = []
    for name in names:
        if name == BASELINE:
            rows.append(RecipeRow(name, None))
            continue
        if name == "static" and scales is None:
            raise ConfigError("expected scales for the row static, got none")
        layers = scales.to_dict()["layers"] if scales is not None and name == "static" else None
        recipe = Recipe(vision_attention=SETTINGS[name], scales=layers)
        rows.append(RecipeRow(f"fp8 {name}", recipe))
    return rows


def load_reader(
    model: str | None,
    device: str | torch.device,
    prompts: PromptSettings = PromptSettings(),
) -> Reader:
    """The chart reader that comes with octavo, one in a folder, or any image-text model."""
    folder = None if model is None else Path(model)
    if model is None or is_chart_reader(Path(model)):
        if prompts != PromptSettings():
            raise ConfigError("--chat-template is for image-text models; the chart reader has none")
        return (load_chart_reader() if folder is None else load_chart_reader(folder)).to(device)
    return load_vlm_reader(model, prompts=prompts).to(device)


def chartqa_table(records: Sequence[Measurement]) -> Table:
    """The rows as a table that says whether each differs from the first."""
    rows = [_table_row(record) for record in records]
    first = records[0].case
    return Table(
        caption=f"chartqa: {first['model']}, {first['num_questions']} questions of {first['data']}",
        header=(
            *("recipe", "relaxed (%)", "anywhere (%)", "exact (%)", "recovery (%)"),
            *("difference (points)", "95 % interval", "verdict"),
        ),
        rows=tuple(rows),
    )


def _table_row(record: Measurement) -> tuple[str | float | None, ...]:
    values = record.values
    row: list[str | float] = [str(record.case["recipe"])]
    row += [values[f"{name}_percent"] for name in SCORES]
    if "difference_points" not in values:
        return (*row, None, None, None, None)
    low, high = values["difference_low_points"], values["difference_high_points"]
    verdict = "differs" if values["is_different"] else f"no difference from {record.baseline}"
    interval = f"[{low:+.2f}, {high:+.2f}]"
    recovery = values.get("recovery_percent")
    return (*row, recovery, values["difference_points"], interval, verdict)


def calibration_scales(
    reader: Reader,
    *,
    num_images: int = NUM_CALIBRATION_IMAGES,
    margin: float = 1.5,
    batch_size: int = BATCH_SIZE,
    on_step: Step | None = None,
) -> ScaleSet:
    """Static scales of a reader's tower, from charts of the noisy distribution.

    Dynamic scales follow the last 16 passes only, so the largest of all batches is kept.
    """
    if num_images < 1:
        raise ConfigError(f"expected one image or more, got {num_images}")
    questions = generated_questions(4 * num_images, "noisy")[::4]
    apply_(reader.model, Recipe(vision_attention="fp8"))
    largest: dict[str, QkvScales] = {}
    try:
        for batch in _batches(questions, batch_size):
            reader.answer([q.image for q in batch], [q.text for q in batch])
            for name, scales in _current_scales(reader.model, margin).items():
                largest[name] = _larger(largest.get(name), scales)
            if on_step is not None:
                on_step(len(batch))
    finally:
        restore_(reader.model)
    header = ScaleHeader(
        model=reader.name, data="generated noisy charts", observer="amax", margin=margin
    )
    layers = {name: LayerScales(*map(float, (s.q, s.k, s.v))) for name, s in largest.items()}
    return ScaleSet(layers, header)


def _current_scales(model: Any, margin: float) -> dict[str, QkvScales]:
    """The scales that the layers of a model with dynamic FP8 attention ask for."""
    found = {}
    for module in model.modules():
        if isinstance(module, EncoderAttention) and isinstance(module.scaling, DynamicScaling):
            found[scale_name(module.name)] = module.scaling.scales(margin)
    return found


def _larger(first: QkvScales | None, second: QkvScales) -> QkvScales:
    if first is None:
        return second
    pairs = ((first.q, second.q), (first.k, second.k), (first.v, second.v))
    return QkvScales(*(a.maximum(b) for a, b in pairs))


def _answers(
    reader: Reader,
    questions: Sequence[Question],
    recipe: Recipe | None,
    batch_size: int,
    on_step: Step | None,
) -> list[str]:
    """The answers of a model with a recipe applied for as long as this takes."""
    answers: list[str] = []
    if recipe is not None:
        apply_(reader.model, recipe)
    try:
        for batch in _batches(questions, batch_size):
            answers += reader.answer([q.image for q in batch], [q.text for q in batch])
            if on_step is not None:
                on_step(len(batch))
    finally:
        if recipe is not None:
            restore_(reader.model)
    return answers


def _batches(questions: Sequence[Question], batch_size: int) -> list[list[Question]]:
    if batch_size < 1:
        raise ConfigError(f"expected a batch size from 1 on, got {batch_size}")
    rest = iter(questions)
    return list(iter(lambda: list(islice(rest, batch_size)), []))


def _scores(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, list[float]]:
    return {
        name: [score(a, q.answers) for a, q in zip(answers, questions, strict=True)]
        for name, score in SCORES.items()
    }


def _values(
    own: dict[str, list[float]], first: dict[str, list[float]], is_first: bool
) -> dict[str, float]:
    """The means of the scores in percent, and how the relaxed accuracy compares."""
    values = {f"{name}_percent": _mean_percent(scores) for name, scores in own.items()}
    if is_first:
        return values
    relaxed = "relaxed_accuracy"
    difference = paired_difference(own[relaxed], first[relaxed])
    before = _mean_percent(first[relaxed])
    if before:
        values["recovery_percent"] = 100 * values[f"{relaxed}_percent"] / before
    return values | {
        "difference_points": 100 * difference.mean,
        "difference_low_points": 100 * difference.low,
        "difference_high_points": 100 * difference.high,
        "is_different": float(difference.is_significant),
    }


def _mean_percent(scores: Sequence[float]) -> float:
    return 100 * sum(scores) / len(scores)


def _machine(reader: Reader) -> Machine:
    device = next(reader.model.parameters()).device
    if device.type != "cuda":
        return Machine.current()
    name = torch.cuda.get_device_name(device)
    return Machine.current(gpu=name, capability=torch.cuda.get_device_capability(device))
