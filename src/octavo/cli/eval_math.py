"""octavo eval math: problems with one final answer, such as MATH-500 and AIME."""

from typing import Annotated

import typer

from octavo.cli import answer_flags as flags
from octavo.cli.engine_flags import MemoryFraction, NumPages


def math(
    model: flags.Model = None,
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
    recipe: flags.Rows = None,
    endpoint: flags.Endpoints = None,
    served_model: flags.ServedModel = None,
    api_key: flags.ApiKey = None,
    max_concurrency: flags.MaxConcurrency = 16,
    kv_cache_dtype: flags.KvCacheDtype = "fp8",
    scales: flags.Scales = None,
    margin: flags.Margin = 1.5,
    dtype: flags.Dtype = "auto",
    memory_fraction: MemoryFraction = 0.9,
    num_pages: NumPages = None,
    answers: flags.Answers = None,
    resume: flags.Resume = False,
    output: flags.Output = None,
) -> None:
    """Mathematics, such as MATH-500 and AIME: pass@1 over repetitions, BF16 beside FP8.

    An answer is what the last \\boxed holds, or what follows the last "answer is"; one that cannot
    be read is wrong, and counted.
    """
    flags.run_answers(
        "math",
        output=output,
        recipe=recipe,
        endpoint=endpoint,
        served_model=served_model,
        api_key=api_key,
        max_concurrency=max_concurrency,
        sampling={
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
        },
        memory_fraction=memory_fraction,
        num_pages=num_pages,
        model=model,
        data=data,
        subset=subset,
        split=split,
        num_questions=num_questions,
        repetitions=repetitions,
        seed=seed,
        generation_config=generation_config,
        max_tokens=max_tokens,
        checker=checker,
        kv_cache_dtype=kv_cache_dtype,
        scales=scales,
        margin=margin,
        dtype=dtype,
        answers=answers,
        is_resumed=resume,
    )
