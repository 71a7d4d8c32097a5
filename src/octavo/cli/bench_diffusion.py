"""octavo bench diffusion: one step of a diffusion transformer, in BF16 and in FP8."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err
from octavo.cli.options import AsJson, RecordsFile, check_folder, split_names
from octavo.cli.records import print_file, print_json
from octavo.cli.tables import print_objections, print_table

if TYPE_CHECKING:
    from octavo.measure.bench.benchmark import Objection
    from octavo.measure.records import Measurement

COLUMNS = (
    *(
        "recipe",
        "graphs",
        "attention",
        "median_ms",
        "p20_ms",
        "p80_ms",
        "speedup",
        "peak_bytes_ratio",
    ),
    *("linear_relative_rms", "attention_relative_rms", "relative_rms"),
)


def diffusion(
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="Sizes, with commas between: flux.1-dev, qwen-image, wan2.2-14b, or tiny-flux, "
            "tiny-qwen, tiny-wan (for a CPU). Weights are random. flux.1-dev on a GPU and "
            "tiny-flux on a CPU if left out.",
            show_default=False,
        ),
    ] = None,
    recipes: Annotated[
        str,
        typer.Option(
            "--recipes",
            help="Of bf16, linear, attention, linear+attention (FP8), linear+attention+modulation "
            "(modulation in FP8 weights alone), linear-block (blocks of 128 x 128), "
            "linear-static, linear-static+attention, linear-static+attention-static (scales found "
            "before the step), bf16-faster (no FP8, but what else a recipe makes faster), with "
            "commas between; bf16 is the baseline and must be there.",
        ),
    ] = "bf16,linear,linear+attention",
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers", min=1, help="Only so many blocks of each kind.", show_default=False
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the blocks, in BF16 as in FP8.")
    ] = True,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="By CUDA graphs as well, in BF16 as in FP8; the default on a GPU.",
        ),
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers",
            help="Folder with FlashAttention-3's *.abi3.so: the baseline attends by whatever is "
            "fastest, torch's own or these.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
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
    from octavo.measure import store
    from octavo.measure.bench.diffusion import StepCase, run_step

    device = default_device()
    names = split_names(config or ("tiny-flux" if device.capability is None else "flux.1-dev"))
    chosen = tuple(split_names(recipes))
    by_graphs = device.capability is not None if graphs is None else graphs
    cases = [StepCase(name, chosen, layers, compile, by_graphs) for name in names]
    check_folder(output)
    records: list[Measurement] = []
    objections: list[Objection] = []
    options = "" if layers is None else f" --layers {layers}"
    options += "" if compile else " --no-compile"
    options += "" if graphs is None else f" --{'' if graphs else 'no-'}graphs"
    options += "" if peers is None else " --peers FOLDER"  # whichever it was on this machine
    with Progress(console=err) as progress:
        task = progress.add_task("measuring", total=len(cases) * len(chosen))

        def keep(found: "list[Measurement]") -> None:
            records.extend(found)
            if output is not None:
                store.append(output, found)
            progress.advance(task)

        for case in cases:
            command = f"octavo bench diffusion --config {case.size} --recipes {','.join(chosen)}"
            where = (device.torch_device, command + options, peers)
            objections += run_step(case, *where, on_recipe=keep)[1]
    if as_json:
        print_json(records)
    else:
        _print(records, objections)
        print_file(output)
    if failed := [f"{o.operands}: {o.reason}" for o in objections if o.operands in chosen]:
        raise UnsupportedError(f"expected every recipe to run and be right, got {failed[0]}")


def _print(records: "list[Measurement]", objections: "list[Objection]") -> None:
    from octavo.measure.report.tables import from_records

    for model in dict.fromkeys(record.case["model"] for record in records):
        found = [record for record in records if record.case["model"] == model]
        caption = f"{model}, {found[0].case['inputs']}; baseline: {found[0].baseline}"
        print_table(from_records(found, caption=caption, columns=COLUMNS))
    print_objections(objections)
