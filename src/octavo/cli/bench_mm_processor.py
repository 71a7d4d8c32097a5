"""octavo bench mm-processor: the stages of a vision-language model's requests, as vLLM has it."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.console import err, out, print_table, write_result
from octavo.cli.model_options import EncoderFlags
from octavo.cli.options import Flags, Strict, check_folder, split_numbers, takes_settings
from octavo.errors import ConfigError
from octavo.extras import need
from octavo.measure.bench.request_data import ImageRequests


@takes_settings
def mm_processor(
    asked: Annotated[
        ImageRequests,
        Flags(
            names={
                "base_items_per_request": "--random-mm-base-items-per-request",
                "bucket_config": "--random-mm-bucket-config",
            }
        ),
    ],
    options: EncoderFlags,
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
    num_warmups: Annotated[int, typer.Option(help="Requests before.")] = 1,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 1,
    strict: Strict = False,
    graph_budgets: Annotated[
        str | None,
        typer.Option(
            help="Run the encoder by CUDA graphs of so many tokens, with commas between; requests "
            "beyond the largest run without.",
            show_default=False,
        ),
    ] = None,
    percentiles: Annotated[
        str, typer.Option("--metric-percentiles", help="With commas between.")
    ] = "99",
    output_json: Annotated[
        Path | None, typer.Option(help="Write the results to this file.")
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

    from octavo.integrations.transformers.vision_language import open_vision_language
    from octavo.kernels.device import default_device
    from octavo.measure.bench.mm_processor import run_mm_processor
    from octavo.measure.bench.request_data import make_image_prompts

    if model is not None and model_option not in (None, model):
        raise ConfigError(f"expected one model, got {model} and --model {model_option}")
    check_folder(output_json)
    if options.note is not None:
        err.print(f"note: {options.note}", soft_wrap=True)
    if graph_budgets is not None:
        budgets = split_numbers(graph_budgets, "budgets such as 1024,4096", int)
        options = replace(options, graph_budgets=budgets)
    numbers = split_numbers(percentiles, "percentiles such as 50,99")
    prompts = make_image_prompts(asked)
    language = open_vision_language(model_option or model, default_device().torch_device)
    with Progress(console=err, disable=is_quiet) as progress:
        task = progress.add_task("requests", total=len(prompts) + num_warmups)
        result = run_mm_processor(
            language,
            prompts,
            options,
            num_warmups=num_warmups,
            output_len=output_len,
            percentiles=numbers,
            progress=lambda: progress.advance(task),
        )
    _print(result, numbers)
    if options.fp8_scale_save_path is not None:
        out.print(f"Scales: {options.fp8_scale_save_path}", soft_wrap=True)
    if output_json is not None:
        write_result(output_json, result, indent=2)


def _print(result: dict[str, Any], percentiles: tuple[float, ...]) -> None:
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
