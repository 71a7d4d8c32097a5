"""octavo bench encoder, diffusion and generate: whole models, in BF16 and in FP8."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import Collected, err, out, print_json
from octavo.cli.options import (
    AsJson,
    RecordsFile,
    repeat_command,
    split_names,
    split_rows,
    takes_settings,
)

if TYPE_CHECKING:
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
class EncoderBench:
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
        layers: Only so many layers; with random weights.
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
    layers: Annotated[int | None, typer.Option(min=1)] = None
    peers: Annotated[Path | None, Folder] = None


@takes_settings
def encoder(
    context: typer.Context,
    asked: EncoderBench,
    output: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
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
    from rich.progress import track

    from octavo.errors import ConfigError
    from octavo.integrations.transformers.vision_tower import make_tower, open_tower
    from octavo.kernels.device import default_device
    from octavo.measure.bench.cases import RESOLUTIONS
    from octavo.measure.bench.encoder import EncoderCase, encoder_rows, run_encoder

    model, config, graphs = asked.model, asked.config, asked.graphs
    if model is not None and config is not None:
        raise ConfigError(f"expected a folder or a config, got {model} and {config}")
    device = default_device()
    is_cuda = device.capability is not None
    if model is None and config is None:
        config = "qwen3-vl-30b-a3b" if is_cuda else "tiny"
    names = split_names(asked.resolutions) if asked.resolutions else list(RESOLUTIONS)
    if asked.resolutions is None and config == "tiny":
        names = ["hd", "fullhd"]
    cases = [EncoderCase(name, asked.images) for name in names]
    recipes = split_rows(asked.recipes)
    encoder_rows(recipes)
    collected = Collected(output)
    if model is not None:
        tower = open_tower(model, device.torch_device, num_layers=asked.layers)
    else:
        tower = make_tower(str(config), device.torch_device, num_layers=asked.layers)
    taken = {"config": config, "images": asked.images, "recipes": ",".join(recipes)}
    for case in track(cases, description="measuring", console=err):
        found = run_encoder(
            tower,
            case,
            repeat_command(context, taken=taken | {"resolutions": case.resolution}),
            recipes=recipes,
            use_graphs=is_cuda if graphs is None else graphs,
            folder=asked.peers,
        )
        collected.keep(*found)
    if as_json:
        return print_json(collected.records)
    out.print(f"{tower.name}, {tower.weights} weights, {tower.num_layers} layers: {device.name}")
    caption = "{images} images, {resolution}; baseline: {baseline}"
    collected.print_tables("resolution", ENCODER_COLUMNS, caption)


@dataclass(frozen=True, kw_only=True)
class DiffusionBench:
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
    layers: Annotated[int | None, typer.Option(min=1)] = None
    compile: bool = True
    graphs: bool | None = None
    peers: Annotated[Path | None, Folder] = None


@takes_settings
def diffusion(
    context: typer.Context,
    asked: DiffusionBench,
    output: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
    """Time one step of a diffusion transformer with random weights, in BF16 and in FP8.

    The baseline is diffusers' own model, compiled block by block, with the fastest BF16 attention
    at hand, with or without CUDA graphs. Layers of the first and the last block are first compared
    with those of the BF16 model on the same inputs, and compiled models with themselves; a wrong
    one is not timed, and the command ends with 1. The memory is that of the weights and one step
    together.
    """
    from rich.progress import Progress

    from octavo.errors import UnsupportedError
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
    collected = Collected(output)
    with Progress(console=err) as progress:
        task = progress.add_task("measuring", total=len(cases) * len(recipes))

        def keep(found: "list[Measurement]") -> None:
            collected.keep(found)
            progress.advance(task)

        for case in cases:
            taken = {"config": case.size, "recipes": ",".join(recipes)}
            _, objections = run_step(
                case,
                device.torch_device,
                repeat_command(context, taken=taken),
                asked.peers,
                on_recipe=keep,
            )
            collected.objections += objections
    if as_json:
        print_json(collected.records)
    else:
        collected.print_tables(
            "model", DIFFUSION_COLUMNS, "{model}, {inputs}; baseline: {baseline}"
        )
    objections = [one for one in collected.objections if one.operands in recipes]
    if objections:
        failed = f"{objections[0].operands}: {objections[0].reason}"
        raise UnsupportedError(f"expected every recipe to run and be right, got {failed}")


@dataclass(frozen=True, kw_only=True)
class GenerateBench:
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
        layers: Only so many layers.
    """

    config: str | None = None
    context: str | None = None
    batch: Annotated[int, typer.Option(min=1)] = 1
    recipes: str = "bf16,fp8,fp8-token,stock"
    layers: Annotated[int | None, typer.Option(min=1)] = None


@takes_settings
def generate(
    called: typer.Context,
    asked: GenerateBench,
    output: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
    """Time one token of a decoder after a long context, its KV cache in BF16 and in FP8.

    Everyone has the same weights, and the same random keys and values in the cache; steps are CUDA
    graphs on a GPU and are timed in turn. Logits of the token after the context are compared with
    the baseline's first (relative_rms); wrong ones end the run.
    """
    from rich.progress import track

    from octavo.amounts import parse_tokens
    from octavo.integrations.transformers.decoder import make_decoder
    from octavo.kernels.device import default_device
    from octavo.measure.bench.generate import GenerateCase, run_generate

    device = default_device()
    is_cuda = device.capability is not None
    name = asked.config or ("llama-3.1-8b" if is_cuda else "tiny")
    lengths = (asked.context or ("32k,128k" if is_cuda else "256")).split(",")
    case = GenerateCase(1, asked.batch)
    cases = [replace(case, context=n) for n in dict.fromkeys(map(parse_tokens, lengths))]
    recipes = split_rows(asked.recipes)
    collected = Collected(output)
    model = make_decoder(name, device.torch_device, asked.layers)
    about = {"model": name, "layers": model.config.num_hidden_layers}
    taken = {"config": name, "batch": asked.batch, "recipes": ",".join(recipes)}
    for case in track(cases, description="measuring", console=err):
        command = repeat_command(called, taken=taken | {"context": case.context})
        collected.keep(run_generate(model, case, recipes, about=about, command=command))
    if as_json:
        return print_json(collected.records)
    out.print(f"{name}, random weights: {device.name}")
    caption = "{batch} × {context} tokens; baseline: {baseline}"
    collected.print_tables("context", GENERATE_COLUMNS, caption)
