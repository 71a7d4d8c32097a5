"""Flags that `octavo eval choice` and `octavo eval math` share, and the run that they describe."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo import env
from octavo.cli.console import err, out
from octavo.cli.tables import print_table
from octavo.errors import ConfigError

Model = Annotated[
    str | None,
    typer.Argument(
        help="A chat model's folder or name, or SmolLM2-135M-Instruct; with --endpoint none.",
        show_default=False,
    ),
]
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
Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        help="A row of the table, by the names of octavo eval perplexity; may be given more than "
        "once, and is baseline, tensor, head and token if left out. The first is what the others "
        "are compared with.",
        show_default=False,
    ),
]
Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        help="URL or NAME=URL of a server with OpenAI's API, in place of a model; may be given "
        "more than once, a row each.",
        show_default=False,
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--served-model-name", help="The model to ask the servers for.", show_default=False
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="That the servers want; OCTAVO_API_KEY does the same.",
        show_default=False,
    ),
]
MaxConcurrency = Annotated[
    int, typer.Option("--max-concurrency", min=1, help="Questions that are answered at once.")
]
KvCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="Of the rows in FP8: fp8 (e4m3) or fp8_e5m2.")
]
Scales = Annotated[
    Path | None,
    typer.Option(
        "--scales",
        help="Scale file for rows with static scales or +center; left out, they are calibrated on "
        "generated chats first.",
        show_default=False,
    ),
]
Margin = Annotated[float, typer.Option("--margin", help="Headroom of calibrated scales.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="The model runs in this: its own, or such as bfloat16.")
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
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Append the records to this JSON Lines file, each as soon as its row is done.",
        show_default=False,
    ),
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
    sampling: dict[str, float | None],
    memory_fraction: float,
    num_pages: int | None,
    **settings: Any,
) -> None:
    """Run what the flags ask for, with a progress bar; print the table."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    from octavo.measure.evaluate import sampled_run
    from octavo.measure.evaluate.endpoint import Endpoint
    from octavo.measure.evaluate.pass_at_1 import pass_table
    from octavo.serving.engine.settings import EngineSettings

    if endpoint and recipe:
        raise ConfigError("--recipe is for a model; a server runs what it was started with")
    key = api_key or env.API_KEY.read() or None
    server = {"model": served_model, "api_key": key, "concurrency": max_concurrency}
    request = sampled_run.Request(
        kind=kind,
        rows=tuple(recipe or sampled_run.DEFAULT_ROWS),
        endpoints=tuple(Endpoint.parse(text, **server) for text in endpoint or ()),
        sampling={name: value for name, value in sampling.items() if value is not None},
        engine=EngineSettings(
            max_num_seqs=max_concurrency, memory_fraction=memory_fraction, num_pages=num_pages
        ),
        **settings,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeLeft())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("loading", total=None)
        records = sampled_run.run(
            request,
            output,
            lambda what, done, total: progress.update(
                task, description=what, completed=done, total=total
            ),
        )
    print_table(pass_table(records))
    if output is not None:
        out.print(f"Records: {output}", soft_wrap=True)
