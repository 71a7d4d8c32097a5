"""octavo bench mm-processor: the stages of a vision-language model's requests, as vLLM has it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.console import err, out
from octavo.cli.encoder_flags import (
    AttnBackend,
    AttnDtype,
    ScalePath,
    ScaleSaveMargin,
    ScaleSavePath,
    encoder_options,
)
from octavo.cli.options import Strict, check_folder
from octavo.cli.tables import print_table
from octavo.extras import need


def mm_processor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder, or its name on the hub; left out, the chart reader that comes "
            "with octavo, or a tiny Qwen3-VL with random weights.",
            show_default=False,
        ),
    ] = None,
    model_option: Annotated[
        str | None,
        typer.Option("--model", help="The same, as vLLM's command takes it.", show_default=False),
    ] = None,
    dataset_name: Annotated[
        str, typer.Option("--dataset-name", help="random-mm (images of noise) or hf.")
    ] = "random-mm",
    dataset_path: Annotated[
        str | None,
        typer.Option(
            "--dataset-path",
            help="For hf: a folder of images, a .jsonl or .parquet file, or a data set's name.",
        ),
    ] = None,
    hf_subset: Annotated[str | None, typer.Option("--hf-subset", help="Of a data set.")] = None,
    hf_split: Annotated[str, typer.Option("--hf-split", help="Of a data set.")] = "train",
    num_prompts: Annotated[int, typer.Option("--num-prompts", help="Requests to time.")] = 10,
    num_warmups: Annotated[int, typer.Option("--num-warmups", help="Requests before.")] = 1,
    input_len: Annotated[
        int, typer.Option("--random-input-len", help="Letters in a random prompt.")
    ] = 32,
    items: Annotated[
        int,
        typer.Option("--random-mm-base-items-per-request", help="Images in a random request."),
    ] = 1,
    buckets: Annotated[
        str | None,
        typer.Option(
            "--random-mm-bucket-config",
            help="Sizes of random images and their shares: '{(256, 256, 1): 0.5, …}'.",
        ),
    ] = None,
    output_len: Annotated[int, typer.Option("--output-len", help="Tokens to generate.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of random images and prompts.")] = 0,
    attn_dtype: AttnDtype = None,
    attn_backend: AttnBackend = None,
    scale_path: ScalePath = None,
    strict: Strict = False,
    scale_save_path: ScaleSavePath = None,
    margin: ScaleSaveMargin = None,
    graph_budgets: Annotated[
        str | None,
        typer.Option(
            "--graph-budgets",
            help="Run the encoder by CUDA graphs of so many tokens, with commas between; requests "
            "beyond the largest run without.",
            show_default=False,
        ),
    ] = None,
    percentiles: Annotated[
        str, typer.Option("--metric-percentiles", help="With commas between.")
    ] = "99",
    output_json: Annotated[
        Path | None, typer.Option("--output-json", help="Write the results to this file.")
    ] = None,
    is_quiet: Annotated[
        bool, typer.Option("--disable-tqdm", help="Show no bar of the requests that are done.")
    ] = False,
) -> None:
    """Time the stages of requests with images, one after the other, and the encoder in them.

    Two runs make static scales and use them:

    octavo bench mm-processor --model MODEL --num-prompts 16 --mm-encoder-attn-dtype fp8
    --mm-encoder-fp8-scale-save-path scales.json

    octavo bench mm-processor --model MODEL --mm-encoder-attn-dtype fp8 --mm-encoder-fp8-scale-path
    scales.json

    Stages and JSON are those of vLLM's command of this name. Stages that octavo has not, those of
    a cache of processed images, are 0.
    """
    need("octavo bench mm-processor", "transformers", "PIL")
    from rich.progress import Progress

    from octavo.atomic import write_atomically
    from octavo.integrations.transformers.vision_language import open_vision_language
    from octavo.kernels.device import default_device
    from octavo.measure.bench.images import DataOptions, make_requests
    from octavo.measure.bench.mm_processor import run_mm_processor

    name = _one_model(model, model_option)
    check_folder(output_json)
    options = encoder_options(
        attn_dtype=attn_dtype,
        attn_backend=attn_backend,
        fp8_scale_path=scale_path,
        fp8_scale_save_path=scale_save_path,
        fp8_scale_save_margin=margin,
        graph_budgets=_budgets(graph_budgets),
    )
    requests = make_requests(
        DataOptions(
            dataset_name=dataset_name,
            dataset_path=dataset_path,
            hf_subset=hf_subset,
            hf_split=hf_split,
            num_prompts=num_prompts,
            random_input_len=input_len,
            base_items_per_request=items,
            bucket_config=buckets,
            seed=seed,
        )
    )
    numbers = _numbers(percentiles)
    language = open_vision_language(name, default_device().torch_device)
    with Progress(console=err, disable=is_quiet) as progress:
        task = progress.add_task("requests", total=len(requests) + num_warmups)
        result = run_mm_processor(
            language,
            requests,
            options,
            num_warmups=num_warmups,
            output_len=output_len,
            percentiles=numbers,
            progress=lambda: progress.advance(task),
        )
    _print(result, numbers)
    if scale_save_path is not None:
        out.print(f"Scales: {scale_save_path}", soft_wrap=True)
    if output_json is not None:
        write_atomically(output_json, (json.dumps(result, indent=2) + "\n").encode())
        out.print(f"Results: {output_json}", soft_wrap=True)


def _one_model(argument: str | None, option: str | None) -> str | None:
    from octavo.errors import ConfigError

    if argument is not None and option is not None and argument != option:
        raise ConfigError(f"expected one model, got {argument} and --model {option}")
    return argument if option is None else option


def _budgets(text: str | None) -> tuple[int, ...]:
    from octavo.errors import ConfigError

    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"expected budgets such as 1024,4096; got {text!r}") from None


def _numbers(text: str) -> list[float]:
    from octavo.errors import ConfigError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"expected percentiles such as 50,99; got {text!r}") from None


def _print(result: dict[str, Any], percentiles: list[float]) -> None:
    from octavo.measure.report.tables import Table

    keys = ("mean", "median", "std", *(f"p{p}" for p in percentiles))
    heads = tuple(key.capitalize() for key in keys)
    stages = result["mm_processor_stats"].items()
    rows = tuple((stage, *(values[key] for key in keys)) for stage, values in stages)
    caption = f"Multimodal Processor Benchmark Results (ms): {result['config']['model']}"
    print_table(Table(caption=caption, header=("Stage", *heads), rows=rows))
    e2el = (result["mean_e2el_ms"], result["median_e2el_ms"], result["std_e2el_ms"])
    of_percentiles = tuple(value for _, value in result["percentiles_e2el_ms"])
    table = Table(caption="End-to-End Latency (ms)", header=heads, rows=((*e2el, *of_percentiles),))
    print_table(table)
    summary = result["encoder_summary"]
    out.print(
        f"Summary: {summary['total_encoder_calls']} total encoder calls across "
        f"{summary['num_requests_with_encoder_calls']} requests."
    )
    for error in result["errors"]:
        err.print(f"failed: {error}", soft_wrap=True)
