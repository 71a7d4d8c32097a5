"""octavo eval: what FP8 does to a model's answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err, print_file, print_table
from octavo.cli.eval_answers import choice, math
from octavo.cli.eval_images import images
from octavo.cli.eval_language import mrcr, needle, perplexity
from octavo.cli.options import Flags, RecordsFile, Strict, takes_settings
from octavo.extras import need
from octavo.integrations.transformers.tokenizer import PromptSettings

if TYPE_CHECKING:
    from rich.progress import Progress

    from octavo.calibration.scale_file import ScaleSet
    from octavo.measure.evaluate.chartqa import Reader

NUM_CALIBRATION_IMAGES = 128
app = typer.Typer(add_completion=False, help="Measure quality: BF16 beside FP8, on the same data.")


@app.callback()
def evaluate() -> None:
    """Measure quality: BF16 beside FP8, on the same data, with what is recovered."""


@dataclass(frozen=True, kw_only=True)
class ChartOptions:
    """What is asked about charts, and of which rows.

    Attributes:
        data: Questions: 'generated' charts, a .parquet or .jsonl file or a folder of them (columns
            image, query, label), or a data set such as HuggingFaceM4/ChartQA.
        num_questions: How many, from the first on.
        recipe: A row of the table: bf16, dynamic or static, fused-bf16 (the same path without FP8),
            words such as vision=head, or a recipe's .toml or .json file; may be given more than
            once. The first is what the others are compared with.
        scales: Scale file for rows with static scales; left out, scales are calibrated on charts of
            another distribution first.
        batch_size: Questions in one call of the model.
    """

    data: str = "generated"
    num_questions: Annotated[int, typer.Option("--num-questions", "-n", min=1)] = 500
    recipe: tuple[str, ...] = ()
    scales: Path | None = None
    batch_size: Annotated[int, typer.Option(min=1)] = 16


@takes_settings
def chartqa(
    asked: ChartOptions,
    prompts: Annotated[PromptSettings, Flags(without=("add_bos",))],
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or name; left out, the small chart reader "
            "(scripts/train_chart_reader.py trains it).",
            show_default=False,
        ),
    ] = None,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Ask a model about charts, in BF16 and with FP8 vision attention.

    Scores are ChartQA's: relaxed accuracy (numbers within 5 %, texts but for case), anywhere
    accuracy (the answer stands somewhere in the text) and exact match. Decoding is greedy. A paired
    bootstrap over the questions tells whether two rows differ.
    """
    need("octavo eval chartqa", "transformers", "PIL")
    from rich.progress import Progress

    from octavo.demo.chart_drawing import generated_questions
    from octavo.errors import ConfigError
    from octavo.kernels.device import default_device
    from octavo.measure.evaluate import chartqa as task
    from octavo.measure.evaluate.chartqa_data import load_questions
    from octavo.measure.run import Records, command_line

    names = asked.recipe or task.ROWS
    needs_scales = any(row.needs_scales for row in task.chart_rows(names))
    if asked.scales is not None and not needs_scales:
        raise ConfigError("--scales is for rows with static scales, which are not asked for")
    records = Records.of_file(output)
    reader = task.load_reader(model, default_device().torch_device, prompts)
    questions = load_questions(asked.data, asked.num_questions, generated_questions)
    flags = {"--data": asked.data, "--num-questions": asked.num_questions}
    flags |= {"--recipe": names, "--scales": asked.scales}
    with Progress(console=err) as progress:
        given = _scales(reader, asked.scales, progress) if needs_scales else None
        rows = task.chart_rows(names, given)
        bar = progress.add_task("answering", total=len(rows) * len(questions))
        found = task.evaluate(
            reader,
            questions,
            rows,
            data=asked.data,
            command=command_line("octavo", "eval", "chartqa", model, *prompts.command, flags=flags),
            batch_size=asked.batch_size,
            on_step=lambda count: progress.advance(bar, count),
            records=records,
        )
    print_table(task.chartqa_table(found))
    print_file(output)


def _scales(reader: "Reader", path: Path | None, progress: "Progress") -> "ScaleSet":
    """The scales of a file, or those that other charts ask for."""
    from octavo.calibration.scale_file import load_scales
    from octavo.demo.chart_drawing import generated_questions
    from octavo.measure.evaluate import chartqa as task

    if path is not None:
        return load_scales(path)
    questions = generated_questions(4 * NUM_CALIBRATION_IMAGES, "noisy")[::4]
    bar = progress.add_task("calibrating", total=len(questions))
    return task.calibration_scales(
        reader,
        questions,
        data="generated noisy charts",
        on_step=lambda count: progress.advance(bar, count),
    )


for command in (chartqa, choice, images, math, mrcr, needle, perplexity):
    app.command()(command)
