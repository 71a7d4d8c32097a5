"""Flags that `octavo eval choice` and `octavo eval math` share, and the run that they describe."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.cli.engine_options import batch_limits
from octavo.cli.eval_flags import chat_rows, make_endpoints
from octavo.cli.eval_run import run_and_print

Subset = Annotated[
    str | None,
    typer.Option("--subset", help="Of a data set of the hub: gpqa_diamond.", show_default=False),
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        help="Of a data set of the hub; left out, its only one, or test.",
        show_default=False,
    ),
]
NumQuestions = Annotated[
    int | None,
    typer.Option(
        "--num-questions", "-n", min=1, help="The first so many of them.", show_default=False
    ),
]
Repetitions = Annotated[
    int, typer.Option("--repetitions", "-r", min=1, help="How often each question is asked.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the answers, and of the order of options.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0,
        help="In place of the model's own (generation_config.json); 0 is greedy. So with the "
        "flags below.",
        show_default=False,
    ),
]
TopP = Annotated[float | None, typer.Option("--top-p", show_default=False)]
TopK = Annotated[int | None, typer.Option("--top-k", min=0, show_default=False)]
MinP = Annotated[float | None, typer.Option("--min-p", show_default=False)]
GenerationConfig = Annotated[
    str | None,
    typer.Option(
        "--generation-config",
        help="Folder or name of a model whose sampling parameters are taken. Servers are told "
        "nothing without it and the flags above, and draw by their own defaults.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=1,
        help="Of an answer, thoughts included; left out, what the context has room for.",
        show_default=False,
    ),
]
MaxConcurrency = Annotated[
    int, typer.Option("--max-concurrency", min=1, help="Questions that are answered at once.")
]
Answers = Annotated[
    Path | None,
    typer.Option(
        "--answers",
        help="Write every answer to this JSON Lines file as it comes: the text, what was read of "
        "it, and whether that is right.",
        show_default=False,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Take the answers that --answers has already.")
]


def run_answers(
    kind: Literal["choice", "math"],
    *,
    output: Path | None,
    recipe: list[str] | None,
    endpoint: list[str] | None,
    served_model: str | None,
    api_key: str | None,
    max_concurrency: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    memory_fraction: float,
    num_pages: int | None,
    chat_template: str | None,
    add_bos: bool | None,
    resume: bool,
    strict: bool,
    **settings: Any,
) -> None:
    """Run what the flags ask for, each by the name of its parameter, and print the table.

    strict has taken effect by itself. settings: fields of `sampled_run.Request`.
    """
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.measure.evaluate import sampled_run
    from octavo.measure.evaluate.pass_at_1 import pass_table
    from octavo.serving.engine.settings import EngineSettings

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    request = sampled_run.Request(
        kind=kind,
        rows=chat_rows(recipe, endpoint),
        endpoints=make_endpoints(
            endpoint, served_model=served_model, api_key=api_key, max_concurrency=max_concurrency
        ),
        sampling={name: value for name, value in sampling.items() if value is not None},
        engine=EngineSettings(
            max_num_seqs=max_concurrency,
            max_num_batched_tokens=batch_limits(max_concurrency, None)["max_num_batched_tokens"],
            memory_fraction=memory_fraction,
            num_pages=num_pages,
        ),
        prompts=PromptSettings(add_bos=add_bos, chat_template=chat_template),
        is_resumed=resume,
        **settings,
    )
    run_and_print(sampled_run.run, request, output, pass_table)
