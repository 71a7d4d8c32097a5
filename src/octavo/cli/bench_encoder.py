"""octavo bench encoder: a whole vision tower, in BF16 and in FP8."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import err, out
from octavo.cli.options import AsJson, RecordsFile, check_folder, split_names
from octavo.cli.records import print_file, print_json
from octavo.cli.tables import print_objections, print_table

COLUMNS = (
    *("impl", "recipe", "graphs", "tokens", "median_ms", "p20_ms", "p80_ms", "speedup"),
    *("fused_speedup", "relative_rms", "tower_relative_rms"),
)


def encoder(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A model's folder; without weights in it they are random.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="Instead of a folder: qwen3-vl-30b-a3b (the default on a GPU), qwen3-vl-8b, or "
            "tiny (the default on a CPU); weights are random.",
        ),
    ] = None,
    resolutions: Annotated[
        str | None,
        typer.Option(
            "--resolutions",
            help="Of hd, fullhd, qhd, 4k, with commas between; all of them, or hd,fullhd for tiny.",
        ),
    ] = None,
    images: Annotated[int, typer.Option("--images", min=1, help="Images in one request.")] = 3,
    recipes: Annotated[
        str,
        typer.Option(
            "--recipes",
            help="Of bf16 (stock), fused-bf16 (octavo's path in BF16), dynamic, static (both FP8), "
            "with commas between.",
        ),
    ] = "bf16,fused-bf16,dynamic,static",
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Also by CUDA graphs, those who can be captured; the default on a GPU.",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="Only so many layers; with random weights."),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers",
            help="Folder with FlashAttention-3's *.abi3.so, which then attends in a stock tower, "
            "and in octavo's in BF16 if it is the fastest.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
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
    from octavo.measure import store
    from octavo.measure.bench.benchmark import Objection
    from octavo.measure.bench.encoder import RESOLUTIONS, EncoderCase, check_recipes, run_encoder
    from octavo.measure.records import Measurement
    from octavo.measure.report.tables import from_records

    if model is not None and config is not None:
        raise ConfigError(f"expected a folder or a config, got {model} and {config}")
    device = default_device()
    is_cuda = device.capability is not None
    if model is None and config is None:
        config = "qwen3-vl-30b-a3b" if is_cuda else "tiny"
    names = split_names(resolutions) if resolutions else list(RESOLUTIONS)
    if resolutions is None and config == "tiny":
        names = ["hd", "fullhd"]
    cases = [EncoderCase(name, images) for name in names]
    chosen = split_names(recipes)
    check_recipes(chosen)
    check_folder(output)
    if model is not None:
        tower = open_tower(model, device.torch_device, num_layers=layers)
    else:
        tower = make_tower(str(config), device.torch_device, num_layers=layers)
    what = str(model) if model is not None else f"--config {config}"
    what += f" --layers {layers}" if layers is not None else ""
    what += "" if graphs is None else f" --{'' if graphs else 'no-'}graphs"
    what += " --peers FOLDER" if peers is not None else ""  # whichever it was on this machine
    records: list[Measurement] = []
    objections: list[Objection] = []
    for case in track(cases, description="measuring", console=err):
        about = f"--resolutions {case.resolution} --images {images} --recipes {','.join(chosen)}"
        found, objected = run_encoder(
            tower,
            case,
            f"octavo bench encoder {what} {about}",
            recipes=chosen,
            use_graphs=is_cuda if graphs is None else graphs,
            folder=peers,
        )
        records += found
        objections += objected
        if output is not None:
            store.append(output, found)
    if as_json:
        print_json(records)
        return
    out.print(f"{tower.name}, {tower.weights} weights, {tower.num_layers} layers: {device.name}")
    for case in cases:
        of_case = [r for r in records if r.case["resolution"] == case.resolution]
        if of_case:
            caption = f"{images} images, {case.resolution}; baseline: {of_case[0].baseline}"
            print_table(from_records(of_case, caption=caption, columns=COLUMNS))
    print_objections(objections)
    print_file(output)
