"""Options that several commands of `octavo eval` share, and the run that they ask for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from octavo import env
from octavo.cli.console import err
from octavo.cli.records import print_file
from octavo.cli.tables import print_table
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.measure.evaluate.language import Endpoint
    from octavo.measure.records import Measurement
    from octavo.measure.report.tables import Table
    from octavo.measure.run import Watch

ChatModel = Annotated[
    str | None,
    typer.Argument(
        help="A chat model's folder or name, or SmolLM2-135M-Instruct; with --endpoint none.",
        show_default=False,
    ),
]
Request = TypeVar("Request")


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """The recipes of a language model that are compared, and how it runs.

    Attributes:
        recipe: A row of the table: baseline (the model's own dtype), unit (scales of 1.0), tensor
            or head (static scales), token (one for each token and head), or a recipe's .json or
            .toml file; may be given more than once. The first is what the others are compared with.
            Left out: baseline, tensor, head and token; of the retrieval model baseline and unit,
            and on a GPU unit+promote=none between them. A name may go on:
            NAME[+rotate][+center][+promote=TILES][+skip=PATTERN]…, such as head+rotate+center or
            head+skip=0-1. promote sets promote_every (none: one-level accumulation), rotate
            multiplies keys and queries by a Hadamard matrix, center takes the calibrated mean off
            keys, skip leaves layers in the model's dtype. The words of all commands work as well:
            kv=head,static, linear, linear=block and so on.
        kv_cache_dtype: Of the rows in FP8: fp8 (e4m3) or fp8_e5m2.
        scales: Scale file for rows with static scales or +center, found on keys such as theirs;
            left out, scales are calibrated first, for every kind of keys among the rows: on other
            windows of the text, other haystacks, or generated chats.
        margin: Headroom of calibrated scales.
        dtype: The model runs in this: its own, or such as bfloat16.
    """

    recipe: tuple[str, ...] = ()
    kv_cache_dtype: str = "fp8"
    scales: Path | None = None
    margin: float = 1.5
    dtype: str = "auto"

    def fields(self) -> dict[str, Any]:
        """The same for a request, which has rows of its own where none is asked for."""
        own = {name: value for name, value in vars(self).items() if name != "recipe"}
        return own | ({"rows": self.recipe} if self.recipe else {})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Servers in place of a model.

    Attributes:
        endpoint: URL or NAME=URL of a server with OpenAI's API, in place of a model; may be given
            more than once, a row each.
        tokenizer: Folder or name of the tokenizer of the servers' model, which counts tokens. Of
            needles: left out, servers get the words of the retrieval model.
        served_model: The model to ask the servers for.
        api_key: That the servers want; OCTAVO_API_KEY does the same.
        max_concurrency: Requests open at once.
    """

    endpoint: tuple[str, ...] = ()
    tokenizer: str | None = None
    served_model: Annotated[str | None, typer.Option("--served-model-name")] = None
    api_key: str | None = None
    max_concurrency: Annotated[int, typer.Option(min=1)] = 4

    def endpoints(self, rows: RowOptions) -> "tuple[Endpoint, ...]":
        """The servers that --endpoint names; their key may be in the environment."""
        from octavo.measure.evaluate.language import Endpoint

        if self.endpoint and rows.recipe:
            raise ConfigError("--recipe is for a model; a server runs what it was started with")
        key = self.api_key or env.API_KEY.read() or None
        return tuple(
            Endpoint.parse(
                url, model=self.served_model, api_key=key, concurrency=self.max_concurrency
            )
            for url in self.endpoint
        )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How texts or chats become a model's tokens.

    Attributes:
        chat_template: Jinja template for chats in place of the model's own: a file, or the
            template.
        add_bos: Whether prompts start with the BOS token; left out, as the tokenizer does it, with
            a warning where that looks wrong. Chats follow their template, but --add-bos puts BOS in
            front if the template does not.
    """

    chat_template: str | None = None
    add_bos: Annotated[bool | None, typer.Option("--add-bos/--no-add-bos")] = None

    def settings(self) -> "PromptSettings":
        """The same for a tokenizer."""
        from octavo.integrations.transformers.tokenizer import PromptSettings

        return PromptSettings(add_bos=self.add_bos, chat_template=self.chat_template)


def who_answers(
    model: str | None, rows: RowOptions, servers: ServerOptions, prompts: PromptOptions
) -> dict[str, Any]:
    """The fields of a request that say who takes part."""
    return {
        "model": model,
        "endpoints": servers.endpoints(rows),
        "tokenizer": servers.tokenizer,
        "prompts": prompts.settings(),
        **rows.fields(),
    }


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where records go.

    Attributes:
        output: Append the records to this JSON Lines file, each as soon as its row is done, or its
            part of a row: a cell, a bucket.
        resume: Leave out what --output has records of already.
    """

    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    resume: Annotated[bool, typer.Option("--resume")] = False


def run_and_print(
    run: "Callable[[Request, Path | None, Watch], list[Measurement]]",
    request: Request,
    output: Path | None,
    make_table: "Callable[[list[Measurement]], Table]",
) -> "list[Measurement]":
    """Run with a progress bar, then print the table; records of a file `output` are in it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeLeft())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("loading", total=None)
        records = run(
            request,
            output,
            lambda what, done, total: progress.update(
                task, description=what, completed=done, total=total
            ),
        )
    print_table(make_table(records))
    print_file(output)
    return records
