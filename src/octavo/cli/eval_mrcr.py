"""octavo eval mrcr: which of several equal requests a model tells apart, by length."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import eval_flags as flags
from octavo.cli.eval_run import run_and_print
from octavo.cli.options import Strict
from octavo.cli.prompt_flags import AddBos, ChatTemplate


def mrcr(
    model: flags.ChatModel = None,
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
    recipe: flags.Rows = None,
    endpoint: flags.Endpoints = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="Folder or name of the tokenizer of the servers' model, which counts tokens.",
            show_default=False,
        ),
    ] = None,
    served_model: flags.ServedModel = None,
    api_key: flags.ApiKey = None,
    max_concurrency: flags.MaxConcurrency = 4,
    kv_cache_dtype: flags.KvCacheDtype = "fp8",
    scales: flags.ChatScales = None,
    strict: Strict = False,
    margin: flags.Margin = 1.5,
    chunk: flags.Chunk = 2048,
    dtype: flags.Dtype = "auto",
    chat_template: ChatTemplate = None,
    add_bos: AddBos = None,
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
    from octavo.amounts import parse_tokens
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.measure.evaluate import mrcr_run
    from octavo.measure.evaluate.mrcr import mrcr_table

    request = mrcr_run.Request(
        data=data,
        model=model,
        rows=flags.chat_rows(recipe, endpoint),
        endpoints=flags.make_endpoints(
            endpoint, served_model=served_model, api_key=api_key, max_concurrency=max_concurrency
        ),
        tokenizer=tokenizer,
        num_needles=num_needles,
        max_length=None if max_length is None else parse_tokens(max_length),
        per_bucket=num_questions,
        kv_cache_dtype=kv_cache_dtype,
        scales=scales,
        margin=margin,
        chunk=chunk,
        dtype=dtype,
        prompts=PromptSettings(add_bos=add_bos, chat_template=chat_template),
        is_resumed=resume,
    )
    run_and_print(mrcr_run.run, request, output, mrcr_table)
