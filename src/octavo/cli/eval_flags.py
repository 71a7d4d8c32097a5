"""Flags that several commands of `octavo eval` share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo import env
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.measure.evaluate.endpoint import Endpoint

ChatModel = Annotated[
    str | None,
    typer.Argument(
        help="A chat model's folder or name, or SmolLM2-135M-Instruct; with --endpoint none.",
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
    int, typer.Option("--max-concurrency", min=1, help="Requests open at once.")
]
KvCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="Of the rows in FP8: fp8 (e4m3) or fp8_e5m2.")
]
ChatScales = Annotated[
    Path | None,
    typer.Option(
        "--scales",
        help="Scale file for rows with static scales or +center; left out, they are calibrated on "
        "generated chats first.",
        show_default=False,
    ),
]
Margin = Annotated[float, typer.Option("--margin", help="Headroom of calibrated scales.")]
Chunk = Annotated[
    int, typer.Option("--chunk", min=5, help="Tokens of one pass over a prompt: a prefill.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="The model runs in this: its own, or such as bfloat16.")
]
RecordsByRow = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Append the records to this JSON Lines file, each as soon as its row is done.",
        show_default=False,
    ),
]


def make_endpoints(
    urls: list[str] | None,
    *,
    served_model: str | None,
    api_key: str | None,
    max_concurrency: int,
) -> "tuple[Endpoint, ...]":
    """The servers that --endpoint names; their key may be in the environment."""
    from octavo.measure.evaluate.endpoint import Endpoint

    key = api_key or env.API_KEY.read() or None
    return tuple(
        Endpoint.parse(url, model=served_model, api_key=key, concurrency=max_concurrency)
        for url in urls or ()
    )


def chat_rows(recipe: list[str] | None, endpoint: list[str] | None) -> tuple[str, ...]:
    """The rows that --recipe names, or those for when it is left out."""
    from octavo.measure.evaluate.perplexity_rows import DEFAULT_ROWS

    if endpoint and recipe:
        raise ConfigError("--recipe is for a model; a server runs what it was started with")
    return tuple(recipe or DEFAULT_ROWS)
