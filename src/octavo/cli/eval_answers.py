"""octavo eval choice and math: questions with one right answer, such as GPQA, MATH-500 and AIME."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.cli.eval_options import (
    ChatModel,
    OutputOptions,
    RowOptions,
    ServerOptions,
    run_and_print,
    who_answers,
)
from octavo.cli.options import Flags, Strict, takes_settings
from octavo.integrations.transformers.tokenizer import PromptSettings


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What is asked, and how answers are drawn and kept.

    Attributes:
        data: Questions: 'generated' small ones, a .csv, .jsonl or .parquet file or a folder of them
            (the columns of GPQA, or question, choices and answer), or a data set such as
            Idavidrein/gpqa with --subset gpqa_diamond.
        subset: Of a data set of the hub: gpqa_diamond.
        split: Of a data set of the hub; left out, its only one, or test.
        num_questions: The first so many of them.
        repetitions: How often each question is asked.
        seed: Of the answers, and of the order of options.
        generation_config: Folder or name of a model whose sampling parameters are taken. Servers
            are told nothing without it and the sampling flags, and draw by their own defaults.
        max_tokens: Of an answer, thoughts included; left out, what the context has room for.
        answers: Write every answer to this JSON Lines file as it comes: the text, what was read of
            it, and whether that is right.
    """

    data: str = "generated"
    subset: str | None = None
    split: str | None = None
    num_questions: Annotated[int | None, typer.Option("--num-questions", "-n", min=1)] = None
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1)] = 1
    seed: int = 0
    generation_config: str | None = None
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None
    answers: Path | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters in place of the model's own.

    Attributes:
        temperature: In place of the model's own (generation_config.json); 0 is greedy. So with
            --top-p, --top-k and --min-p.
    """

    temperature: Annotated[float | None, typer.Option(min=0)] = None
    top_p: float | None = None
    top_k: Annotated[int | None, typer.Option(min=0)] = None
    min_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """How much memory the engine takes.

    Attributes:
        memory_fraction: Share of a GPU's memory for weights and cache.
        num_pages: Pages of the cache; left out, what the run can use and memory has room for.
    """

    memory_fraction: Annotated[float, typer.Option("--gpu-memory-utilization")] = 0.9
    num_pages: Annotated[int | None, typer.Option(min=1)] = None


Servers = Annotated[
    ServerOptions,
    Flags(
        help={"max_concurrency": "Questions that are answered at once."},
        defaults={"max_concurrency": 16},
        without=("tokenizer",),
    ),
]
Records = Annotated[
    OutputOptions, Flags(help={"resume": "Take the answers that --answers has already."})
]


@takes_settings
def choice(
    asked: AnswerOptions,
    sampling: SamplingOptions,
    rows: RowOptions,
    servers: Servers,
    prompts: PromptSettings,
    memory: MemoryOptions,
    records: Records,
    model: ChatModel = None,
    strict: Strict = False,
) -> None:
    """Multiple choice, such as GPQA: pass@1 over repetitions, BF16 beside FP8.

    Options are shuffled, in another order for each repetition. An answer is the letter after the
    last "Answer:", or in the last \\boxed; one that cannot be read is wrong, and counted.
    """
    who = who_answers(model, rows, servers, prompts)
    _run("choice", asked, sampling, memory, servers.max_concurrency, records, **who)


@takes_settings
def math(
    asked: Annotated[
        AnswerOptions,
        Flags(
            help={
                "data": "Problems: 'generated' arithmetic, a .jsonl, .parquet or .csv file or a "
                "folder of them (columns problem or question, and answer), or a data set such as "
                "HuggingFaceH4/MATH-500 or HuggingFaceH4/aime_2024."
            }
        ),
    ],
    sampling: SamplingOptions,
    rows: RowOptions,
    servers: Servers,
    prompts: PromptSettings,
    memory: MemoryOptions,
    records: Records,
    model: ChatModel = None,
    checker: Annotated[
        str,
        typer.Option(
            "--checker",
            help="How answers are compared: octavo, math_verify, or auto, which is math_verify "
            "after octavo's own rules if that package is installed.",
        ),
    ] = "auto",
    strict: Strict = False,
) -> None:
    """Mathematics, such as MATH-500 and AIME: pass@1 over repetitions, BF16 beside FP8.

    An answer is what the last \\boxed holds, or what follows the last "answer is"; one that cannot
    be read is wrong, and counted.
    """
    who = who_answers(model, rows, servers, prompts) | {"checker": checker}
    _run("math", asked, sampling, memory, servers.max_concurrency, records, **who)


def _run(
    kind: Literal["choice", "math"],
    asked: AnswerOptions,
    sampling: SamplingOptions,
    memory: MemoryOptions,
    num_seqs: int,
    records: OutputOptions,
    **who: Any,
) -> None:
    """Ask what the flags say and print the table; who: further fields of the request."""
    from octavo.measure.evaluate import tasks
    from octavo.serving.engine.settings import EngineSettings

    request = tasks.Request(
        kind=kind,
        sampling={name: value for name, value in vars(sampling).items() if value is not None},
        engine=EngineSettings(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(EngineSettings().max_num_batched_tokens, num_seqs),
            memory_fraction=memory.memory_fraction,
            num_pages=memory.num_pages,
        ),
        is_resumed=records.resume,
        **vars(asked),
        **who,
    )
    run_and_print(tasks.run, request, records.output, tasks.pass_table)
