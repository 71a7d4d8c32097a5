"""octavo eval: what FP8 does to a model's answers."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err
from octavo.cli.eval_choice import choice
from octavo.cli.eval_images import images
from octavo.cli.eval_math import math
from octavo.cli.eval_mrcr import mrcr
from octavo.cli.eval_needle import needle
from octavo.cli.eval_perplexity import perplexity
from octavo.cli.options import RecordsFile, Strict
from octavo.cli.prompt_flags import ChatTemplate
from octavo.cli.records import print_file
from octavo.cli.tables import print_table
from octavo.extras import need

if TYPE_CHECKING:
    from octavo.calibration.scale_file import ScaleSet
    from octavo.measure.evaluate.chartqa import Reader

app = typer.Typer(add_completion=False, help="Measure quality: BF16 beside FP8, on the same data.")

app.command()(choice)
app.command()(images)
app.command()(math)
app.command()(mrcr)
app.command()(needle)
app.command()(perplexity)

ROWS = ("bf16", "dynamic", "static")


@app.callback()
def evaluate() -> None:
    """Measure quality: BF16 beside FP8, on the same data, with what is recovered."""


@app.command()
def chartqa(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or name; left out, the small chart reader "
            "(scripts/train_chart_reader.py trains it).",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Questions: 'generated' charts, a .parquet or .jsonl file or a folder of them "
            "(columns image, query, label), or a data set such as HuggingFaceM4/ChartQA.",
        ),
    ] = "generated",
    num_questions: Annotated[
        int, typer.Option("--num-questions", "-n", min=1, help="How many, from the first on.")
    ] = 500,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            help="A row of the table: bf16, dynamic or static; may be given more than once. "
            "The first is what the others are compared with.",
        ),
    ] = None,
    scales: Annotated[
        Path | None,
        typer.Option(
            "--scales",
            help="Scale file for the row static; left out, scales are calibrated on charts of "
            "another distribution first.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Questions in one call of the model.")
    ] = 16,
    chat_template: ChatTemplate = None,
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

    from octavo.errors import ConfigError
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.kernels.device import default_device
    from octavo.measure import store
    from octavo.measure.evaluate import chartqa as task
    from octavo.measure.evaluate.chartqa_data import load_questions

    names, prompts = recipe or list(ROWS), PromptSettings(chat_template=chat_template)
    if scales is not None and "static" not in names:
        raise ConfigError("--scales is for the row static, which is not asked for")
    store.check_folder(output)
    task.check_rows(names)
    reader = task.load_reader(model, default_device().torch_device, prompts)
    questions = load_questions(data, num_questions)
    with Progress(console=err) as progress:
        given = _scales(reader, scales, progress) if "static" in names else None
        rows = task.recipe_rows(names, given)
        bar = progress.add_task("answering", total=len(rows) * len(questions))
        records = task.evaluate(
            reader,
            questions,
            rows,
            data=data,
            command=shlex.join(
                [*_command(model, data, num_questions, names, scales), *prompts.command]
            ),
            batch_size=batch_size,
            on_step=lambda count: progress.advance(bar, count),
        )
    if output is not None:
        store.append(output, records)
    print_table(task.chartqa_table(records))
    print_file(output)


def _scales(reader: "Reader", path: Path | None, progress: object) -> "ScaleSet":
    """The scales of a file, or those that other charts ask for."""
    from rich.progress import Progress

    from octavo.calibration.scale_file import load_scales
    from octavo.measure.evaluate import chartqa as task

    if path is not None:
        return load_scales(path)
    assert isinstance(progress, Progress)
    num_images = task.NUM_CALIBRATION_IMAGES
    bar = progress.add_task("calibrating", total=num_images)
    return task.calibration_scales(
        reader, num_images=num_images, on_step=lambda count: progress.advance(bar, count)
    )


def _command(
    model: str | None, data: str, num_questions: int, names: list[str], scales: Path | None
) -> list[str]:
    """The command line that repeats this run."""
    parts = ["octavo", "eval", "chartqa", *([model] if model else [])]
    parts += ["--data", data, "--num-questions", str(num_questions)]
    parts += [part for name in names for part in ("--recipe", name)]
    return [*parts, *(["--scales", str(scales)] if scales else [])]
