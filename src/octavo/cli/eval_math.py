"""octavo eval math: problems with one final answer, such as MATH-500 and AIME."""

from typing import Annotated

import typer

from octavo.cli import answer_flags as flags
from octavo.cli import eval_flags as shared
from octavo.cli.engine_flags import MemoryFraction, NumPages
from octavo.cli.options import Strict
from octavo.cli.prompt_flags import AddBos, ChatTemplate


def math(
    model: shared.ChatModel = None,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Problems: 'generated' arithmetic, a .jsonl, .parquet or .csv file or a folder of "
            "them (columns problem or question, and answer), or a data set such as "
            "HuggingFaceH4/MATH-500 or HuggingFaceH4/aime_2024.",
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
    checker: Annotated[
        str,
        typer.Option(
            "--checker",
            help="How answers are compared: octavo, math_verify, or auto, which is math_verify "
            "after octavo's own rules if that package is installed.",
        ),
    ] = "auto",
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
    """Mathematics, such as MATH-500 and AIME: pass@1 over repetitions, BF16 beside FP8.

    An answer is what the last \\boxed holds, or what follows the last "answer is"; one that cannot
    be read is wrong, and counted.
    """
    flags.run_answers("math", **locals())  # all flags, and nothing else
