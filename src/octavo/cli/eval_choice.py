"""octavo eval choice: questions with several options, such as GPQA."""

from typing import Annotated

import typer

from octavo.cli import answer_flags as flags
from octavo.cli import eval_flags as shared
from octavo.cli.engine_flags import MemoryFraction, NumPages
from octavo.cli.options import Strict
from octavo.cli.prompt_flags import AddBos, ChatTemplate


def choice(
    model: shared.ChatModel = None,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Questions: 'generated' small ones, a .csv, .jsonl or .parquet file or a folder "
            "of them (the columns of GPQA, or question, choices and answer), or a data set such as "
            "Idavidrein/gpqa with --subset gpqa_diamond.",
        ),
    ] = "generated",
    subset: flags.Subset = None,
    split: flags.Split = None,
    num_questions: flags.NumQuestions = None,
    repetitions: flags.Repetitions = 1,
    seed: flags.Seed = 0,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    min_p: flags.MinP = None,
    generation_config: flags.GenerationConfig = None,
    max_tokens: flags.MaxTokens = None,
    recipe: shared.Rows = None,
    endpoint: shared.Endpoints = None,
    served_model: shared.ServedModel = None,
    api_key: shared.ApiKey = None,
    max_concurrency: flags.MaxConcurrency = 16,
    kv_cache_dtype: shared.KvCacheDtype = "fp8",
    scales: shared.ChatScales = None,
    strict: Strict = False,
    margin: shared.Margin = 1.5,
    dtype: shared.Dtype = "auto",
    chat_template: ChatTemplate = None,
    add_bos: AddBos = None,
    memory_fraction: MemoryFraction = 0.9,
    num_pages: NumPages = None,
    answers: flags.Answers = None,
    resume: flags.Resume = False,
    output: shared.RecordsByRow = None,
) -> None:
    """Multiple choice, such as GPQA: pass@1 over repetitions, BF16 beside FP8.

    Options are shuffled, in another order for each repetition. An answer is the letter after the
    last "Answer:", or in the last \\boxed; one that cannot be read is wrong, and counted.
    """
    flags.run_answers("choice", **locals())  # all flags, and nothing else
