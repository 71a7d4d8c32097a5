"""octavo bench encoder, diffusion, generate and mm-processor: whole models, in BF16 and in FP8."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import err, out
from octavo.cli.engine_options import EncoderFlags
from octavo.cli.options import (
    AsJson,
    Flags,
    RecordsFile,
    Strict,
    check_folder,
    repeat_command,
    split_names,
    split_numbers,
    split_rows,
    takes_settings,
)
from octavo.cli.records import Collected, print_json, write_result
from octavo.cli.tables import print_table
from octavo.errors import ConfigError, UnsupportedError
from octavo.extras import need
from octavo.measure.bench.requests import ImageRequests

if TYPE_CHECKING:
    from octavo.measure.bench.benchmark import Objection
    from octavo.measure.records import Measurement

Folder = typer.Option(exists=True, file_okay=False)
ENCODER_COLUMNS = (
    *("impl", "recipe", "graphs", "tokens", "median_ms", "p20_ms", "p80_ms", "speedup"),
    *("fused_speedup", "relative_rms", "tower_relative_rms"),
)
DIFFUSION_COLUMNS = (
    *("recipe", "graphs", "attention", "median_ms", "p20_ms", "p80_ms", "speedup"),
    *("peak_bytes_ratio", "linear_relative_rms", "attention_relative_rms", "relative_rms"),
)
GENERATE_COLUMNS = (
    *("impl", "recipe", "median_ms", "p20_ms", "p80_ms", "speedup"),
    *("cache_bytes", "cache_ratio", "relative_rms"),
)


@dataclass(frozen=True, kw_only=True)
class ModelBench:
    """What the benchmarks of whole models share.

    Attributes:
        layers: Only so many layers; with random weights.
    """

    layers: Annotated[int | None, typer.Option(min=1)] = None
    output: RecordsFile = None
    as_json: AsJson = False

    def __post_init__(self) -> None:
        check_folder(self.output)


def _run(
    asked: ModelBench,
    parts: "Iterable[tuple[list[Measurement], list[Objection]]]",
    num_parts: int,
    by_case: tuple[str, Sequence[str], str],
    title: str | None = None,
) -> "list[Objection]":
    """Measure all parts, keep and show their records; who could not take part.

    by_case: the field of cases with a table for each of its values, their columns and caption.
    """
    from rich.progress import track

    collected = Collected(asked.output)
    for part in track(parts, "measuring", total=num_parts, console=err):
        collected.keep(*part)
    if asked.as_json:
        print_json(collected.records)
    else:
        if title is not None:
            out.print(title)
        collected.print_tables(*by_case)
    return collected.objections


@dataclass(frozen=True, kw_only=True)
class EncoderBench(ModelBench):
    """A vision tower, and images for it.

    Attributes:
        config: Instead of a folder: qwen3-vl-30b-a3b (the default on a GPU), qwen3-vl-8b, or tiny
            (the default on a CPU); weights are random.
        resolutions: Of hd, fullhd, qhd, 4k, with commas between; all of them, or hd,fullhd for
            tiny.
        images: Images in one request.
        recipes: Of bf16 (stock), fused-bf16 (octavo's path in BF16), dynamic, static (both FP8),
            with commas between.
        graphs: Also by CUDA graphs, those who can be captured; the default on a GPU.
        peers: Folder with FlashAttention-3's *.abi3.so, which then attends in a stock tower, and
            in octavo's in BF16 if it is the fastest.
    """

    model: Annotated[
        Path | None,
        typer.Argument(
            help="A model's folder; without weights in it they are random.",
            exists=True,
            file_okay=False,
        ),
    ] = None
    config: str | None = None
    resolutions: str | None = None
    images: Annotated[int, typer.Option(min=1)] = 3
    recipes: str = "bf16,fused-bf16,dynamic,static"
    graphs: bool | None = None
    peers: Annotated[Path | None, Folder] = None


@takes_settings
def encoder(context: typer.Context, asked: EncoderBench) -> None:
    """Time the whole vision tower of one model, stock and with attention in FP8.

    Everyone has the same weights and gets the same images. Attention of the first, the middle and
    the last layer is first compared with stock transformers' on the same inputs (relative_rms is
    the worst of them), and a graph's result with that of the same tower without one; a wrong one
    ends the run. On a GPU each is timed after a second of nothing
    else, at the clock that the power limit leaves it. The speed-up is that over
    the fastest stock tower in BF16, without graphs; the fused speed-up is that over octavo's own
    path in BF16 (fused-bf16), graphs against graphs: what FP8 itself buys. Static scales are those
    of the images that are timed.
    """
    from octavo.integrations.transformers.vision_tower import make_tower, open_tower
    from octavo.kernels.device import default_device
    from octavo.measure.bench.cases import RESOLUTIONS
    from octavo.measure.bench.encoder import EncoderCase, encoder_rows, run_encoder

    model, config, device = asked.model, asked.config, default_device()
    if model is not None and config is not None:
        raise ConfigError(f"expected a folder or a config, got {model} and {config}")
    is_cuda = device.capability is not None
    if model is None and config is None:
        config = "qwen3-vl-30b-a3b" if is_cuda else "tiny"
    names = ["hd", "fullhd"] if config == "tiny" else list(RESOLUTIONS)
    if asked.resolutions is not None:
        names = split_names(asked.resolutions)
    cases = [EncoderCase(name, asked.images) for name in names]
    recipes = split_rows(asked.recipes)
    encoder_rows(recipes)
    make = partial(make_tower, str(config)) if model is None else partial(open_tower, model)
    tower = make(device.torch_device, num_layers=asked.layers)
    taken = {"config": config, "images": asked.images, "recipes": ",".join(recipes)}

    parts = (
        run_encoder(
            tower,
            case,
            repeat_command(context, taken=taken | {"resolutions": case.resolution}),
            recipes=recipes,
            use_graphs=is_cuda if asked.graphs is None else asked.graphs,
            folder=asked.peers,
        )
        for case in cases
    )
    title = f"{tower.name}, {tower.weights} weights, {tower.num_layers} layers: {device.name}"
    caption = "{images} images, {resolution}; baseline: {baseline}"
    _run(asked, parts, len(cases), ("resolution", ENCODER_COLUMNS, caption), title)


@dataclass(frozen=True, kw_only=True)
class DiffusionBench(ModelBench):
    """Diffusion transformers, and how their steps run.

    Attributes:
        config: Sizes, with commas between: flux.1-dev, qwen-image, wan2.2-14b, or tiny-flux,
            tiny-qwen, tiny-wan (for a CPU). Weights are random. flux.1-dev on a GPU and tiny-flux
            on a CPU if left out.
        recipes: Of bf16, linear, attention, linear+attention (FP8), linear+attention+modulation
            (modulation in FP8 weights alone), linear-block (blocks of 128 x 128), linear-static,
            linear-static+attention, linear-static+attention-static (scales found before the step),
            bf16-faster (no FP8, but what else a recipe makes faster), with commas between; bf16 is
            the baseline and must be there.
        layers: Only so many blocks of each kind.
        compile: Compile the blocks, in BF16 as in FP8.
        graphs: By CUDA graphs as well, in BF16 as in FP8; the default on a GPU.
        peers: Folder with FlashAttention-3's *.abi3.so: the baseline attends by whatever is
            fastest, torch's own or these.
    """

    config: str | None = None
    recipes: str = "bf16,linear,linear+attention"
    compile: bool = True
    graphs: bool | None = None
    peers: Annotated[Path | None, Folder] = None


@takes_settings
def diffusion(context: typer.Context, asked: DiffusionBench) -> None:
    """Time one step of a diffusion transformer with random weights, in BF16 and in FP8.

    The baseline is diffusers' own model, compiled block by block, with the fastest BF16 attention
    at hand, with or without CUDA graphs. Layers of the first and the last block are first compared
    with those of the BF16 model on the same inputs, and compiled models with themselves; a wrong
    one is not timed, and the command ends with 1. The memory is that of the weights and one step
    together.
    """
    from octavo.kernels.device import default_device
    from octavo.measure.bench.diffusion import StepCase, run_step

    device = default_device()
    is_cuda = device.capability is not None
    recipes = tuple(split_rows(asked.recipes))
    use_graphs = is_cuda if asked.graphs is None else asked.graphs
    cases = [
        StepCase(name, recipes, asked.layers, asked.compile, use_graphs)
        for name in split_names(asked.config or ("flux.1-dev" if is_cuda else "tiny-flux"))
    ]
    taken = {"recipes": ",".join(recipes)}
    parts = (
        part
        for case in cases
        for part in run_step(
            case,
            device.torch_device,
            repeat_command(context, taken=taken | {"config": case.size}),
            asked.peers,
        )
    )
    by_case = ("model", DIFFUSION_COLUMNS, "{model}, {inputs}; baseline: {baseline}")
    for objection in _run(asked, parts, len(cases) * len(recipes), by_case):
        if objection.operands in recipes:
            failed = f"{objection.operands}: {objection.reason}"
            raise UnsupportedError(f"expected every recipe to run and be right, got {failed}")


@dataclass(frozen=True, kw_only=True)
class GenerateBench(ModelBench):
    """A decoder, and what its cache holds.

    Attributes:
        config: llama-3.1-8b (the default on a GPU) or tiny (the default on a CPU); weights are
            random.
        context: Tokens in the cache, with commas between, such as 32k,128k; the default on a GPU,
            256 elsewhere.
        batch: Sequences.
        recipes: Of bf16, fp8, fp8-head, fp8-token, fp8-unit, stock, with commas between; the first
            is the baseline. bf16 is octavo's own attention over pages that are not quantized. fp8
            has a calibrated scale for the keys and one for the values of each layer, fp8-head one
            for each head, fp8-token one for each token and head; fp8-unit has scales of 1.0, as
            without calibration, and counts what they cannot hold. stock is transformers with a
            static cache.
    """

    config: str | None = None
    context: str | None = None
    batch: Annotated[int, typer.Option(min=1)] = 1
    recipes: str = "bf16,fp8,fp8-token,stock"


@takes_settings
def generate(called: typer.Context, asked: GenerateBench) -> None:
    """Time one token of a decoder after a long context, its KV cache in BF16 and in FP8.

    Everyone has the same weights, and the same random keys and values in the cache; steps are CUDA
    graphs on a GPU and are timed in turn. Logits of the token after the context are compared with
    the baseline's first (relative_rms); wrong ones end the run.
    """
    from octavo.amounts import parse_tokens
    from octavo.integrations.transformers.decoder import make_decoder
    from octavo.kernels.device import default_device
    from octavo.measure.bench.generate import GenerateCase, run_generate

    device = default_device()
    is_cuda = device.capability is not None
    name = asked.config or ("llama-3.1-8b" if is_cuda else "tiny")
    lengths = (asked.context or ("32k,128k" if is_cuda else "256")).split(",")
    cases = [GenerateCase(n, asked.batch) for n in dict.fromkeys(map(parse_tokens, lengths))]
    recipes = split_rows(asked.recipes)
    model = make_decoder(name, device.torch_device, asked.layers)
    about = {"model": name, "layers": model.config.num_hidden_layers}
    taken = {"config": name, "batch": asked.batch, "recipes": ",".join(recipes)}
    commands = {n: repeat_command(called, taken=taken | {"context": n.context}) for n in cases}
    parts = (
        (run_generate(model, case, recipes, about=about, command=command), [])
        for case, command in commands.items()
    )
    caption = "{batch} × {context} tokens; baseline: {baseline}"
    title = f"{name}, random weights: {device.name}"
    _run(asked, parts, len(cases), ("context", GENERATE_COLUMNS, caption), title)


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
    from octavo.measure.bench.requests import make_image_prompts

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
    _print_stages(result, numbers)
    if options.fp8_scale_save_path is not None:
        out.print(f"Scales: {options.fp8_scale_save_path}", soft_wrap=True)
    if output_json is not None:
        write_result(output_json, result, indent=2)


def _print_stages(result: dict[str, Any], percentiles: tuple[float, ...]) -> None:
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
