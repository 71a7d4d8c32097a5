"""octavo eval mrcr: which of several equal requests a model tells apart, by length."""

from pathlib import Path
from typing import Annotated

import typer

from octavo import env
from octavo.cli.console import err, out
from octavo.cli.tables import print_table
from octavo.errors import ConfigError


def mrcr(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A chat model's folder or name, or SmolLM2-135M-Instruct; with --endpoint none.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Questions: 'generated' small chats, a .parquet or .jsonl file or a folder of "
            "them (columns prompt, answer, random_string_to_prepend, n_needles), or a data set "
            "such as openai/mrcr.",
        ),
    ] = "generated",
    num_needles: Annotated[
        int | None,
        typer.Option(
            "--num-needles", min=1, help="Only questions with so many.", show_default=False
        ),
    ] = None,
    max_length: Annotated[
        str | None,
        typer.Option(
            "--max-length",
            help="Only questions that fit in so many tokens with their answers, such as 128k; left "
            "out, what the model was made for.",
            show_default=False,
        ),
    ] = None,
    num_questions: Annotated[
        int | None,
        typer.Option(
            "--num-questions",
            "-n",
            min=1,
            help="At most so many in a bucket of lengths.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            help="A row of the table, by the names of octavo eval perplexity; may be given more "
            "than once, and is baseline, tensor, head and token if left out. The first is what "
            "the others are compared with.",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--endpoint",
            help="URL or NAME=URL of a server with OpenAI's API, in place of a model; may be given "
            "more than once, a row each.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="Folder or name of the tokenizer of the servers' model, which counts tokens.",
            show_default=False,
        ),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", help="The model to ask the servers for.", show_default=False
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help="That the servers want; OCTAVO_API_KEY does the same.",
            show_default=False,
        ),
    ] = None,
    max_concurrency: Annotated[
        int, typer.Option("--max-concurrency", min=1, help="Requests open at once.")
    ] = 4,
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="Of the rows in FP8: fp8 (e4m3) or fp8_e5m2.")
    ] = "fp8",
    scales: Annotated[
        Path | None,
        typer.Option(
            "--scales",
            help="Scale file for rows with static scales or +center; left out, they are "
            "calibrated on generated chats first.",
            show_default=False,
        ),
    ] = None,
    margin: Annotated[float, typer.Option("--margin", help="Headroom of calibrated scales.")] = 1.5,
    chunk: Annotated[
        int, typer.Option("--chunk", min=5, help="Tokens of one pass over a prompt: a prefill.")
    ] = 2048,
    dtype: Annotated[
        str, typer.Option("--dtype", help="The model runs in this: its own, or such as bfloat16.")
    ] = "auto",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Append the records to this JSON Lines file, each as soon as its bucket is done.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what --output has records of already.")
    ] = False,
) -> None:
    """Multi-round co-reference (openai/mrcr): the i-th of several equal requests, word by word.

    A score is 0 without the prefix that was asked for, else how like the true answer the rest is
    (difflib's ratio). Scores are by buckets of lengths; AUC is their mean over all tokens.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    from octavo.measure.advise.memory import parse_tokens
    from octavo.measure.evaluate import mrcr_run
    from octavo.measure.evaluate.endpoint import Endpoint
    from octavo.measure.evaluate.mrcr import mrcr_table

    key = api_key or env.API_KEY.read() or None
    server = {"model": served_model, "api_key": key, "concurrency": max_concurrency}
    if endpoint and recipe:
        raise ConfigError("--recipe is for a model; a server runs what it was started with")
    request = mrcr_run.Request(
        data=data,
        model=model,
        rows=tuple(recipe or mrcr_run.DEFAULT_ROWS),
        endpoints=tuple(Endpoint.parse(text, **server) for text in endpoint or ()),
        tokenizer=tokenizer,
        num_needles=num_needles,
        max_length=None if max_length is None else parse_tokens(max_length),
        per_bucket=num_questions,
        kv_cache_dtype=kv_cache_dtype,
        scales=scales,
        margin=margin,
        chunk=chunk,
        dtype=dtype,
        is_resumed=resume,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeLeft())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("loading", total=None)
        records = mrcr_run.run(
            request,
            output,
            lambda what, done, total: progress.update(
                task, description=what, completed=done, total=total
            ),
        )
    print_table(mrcr_table(records))
    if output is not None:
        out.print(f"Records: {output}", soft_wrap=True)
