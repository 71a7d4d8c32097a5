"""octavo advise: what to quantize in a model on a GPU, and why."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err, out, print_table
from octavo.cli.options import Flags, RecordsFile, check_folder, repeat_command, takes_settings
from octavo.errors import ConfigError
from octavo.measure.advise.shape import Workload, parse_size

if TYPE_CHECKING:
    from octavo.measure.advise.gpus import Gpu
    from octavo.measure.advise.shape import ModelShape
    from octavo.measure.records import Measurement


@takes_settings
def advise(
    context: typer.Context,
    workload: Annotated[
        Workload, Flags(names={"num_images": "--images"}, without=("context", "image_size"))
    ],
    model: Annotated[
        str,
        typer.Argument(
            help="A model's folder of transformers or diffusers (its config.json is enough), or "
            "the name of a model that octavo knows: openai/gpt-oss-20b, llama-3.1-8b, qwen3-vl, "
            "flux.1-dev, …",
            show_default=False,
        ),
    ],
    gpu: Annotated[
        str,
        typer.Option(
            help="h200, h100, b200, l40s or a100, or hopper, blackwell, ada, ampere; it need not "
            "be here."
        ),
    ] = "h200",
    prompt_len: Annotated[
        str, typer.Option("--context", help="Tokens of a prompt (8192, 32k).")
    ] = "8k",
    image_size: Annotated[str, typer.Option(help="1920x1080, or hd, fullhd, qhd, 4k.")] = "fullhd",
    results: Annotated[
        Path | None,
        typer.Option(
            help="Records to take speeds from, a JSON Lines file or a folder of them; left out, "
            "those that come with octavo.",
            show_default=False,
        ),
    ] = None,
    is_measured: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run the short benchmarks that decide, on the GPU of this machine."
        ),
    ] = False,
    output: RecordsFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the advice as one JSON object.")
    ] = False,
) -> None:
    """Say what to quantize in a model on a GPU for a workload: a recipe, with reasons.

    octavo advise meta-llama/Llama-3.1-8B-Instruct --gpu h200 --context 32k --concurrency 8

    Times are a sum of parts: each linear layer and each attention at the speed that records of
    kernels say (--results), corrected by records of whole models. No GPU is needed, and no
    weights.
    """
    from octavo.amounts import parse_tokens
    from octavo.measure import store
    from octavo.measure.advise.advice import (
        expectation_table,
        how_to_run,
        memory_table,
        recipe_text,
        sentences,
        title,
    )
    from octavo.measure.advise.advise import advise as make_advice
    from octavo.measure.advise.gpus import find_gpu
    from octavo.measure.advise.shape import find_model

    if output is not None and not is_measured:
        raise ConfigError("-o is for the records of --measure, which is not asked for")
    check_folder(output)
    found_gpu = find_gpu(gpu)
    workload = replace(
        workload, context=parse_tokens(prompt_len), image_size=parse_size(image_size)
    )
    shape = find_model(model)
    records = store.read(store.shipped() if results is None else results)
    if is_measured:
        records += _measure(context, model, shape, found_gpu, workload, output)
    advice = make_advice(shape, found_gpu, workload, records, served=_served(model, shape))
    if as_json:
        typer.echo(advice.to_json())
        return
    out.print(title(advice), soft_wrap=True)
    if advice.expectations:
        print_table(expectation_table(advice))
    if advice.memory:
        print_table(memory_table(advice))
    for line in sentences(advice):
        out.print(line, soft_wrap=True)
    out.print("\nRecipe (recipe.toml)", soft_wrap=True)
    out.print(recipe_text(advice), soft_wrap=True)
    for line in how_to_run(advice):
        out.print(line, soft_wrap=True)


def _served(name: str, shape: "ModelShape") -> str:
    """What the model is called in commands: as it was given, if they can find it by that."""
    path = Path(name)
    if shape.step is not None and path.exists() and not (path / "model_index.json").is_file():
        return "PIPELINE"  # the folder has its transformer alone
    return name if path.exists() or "/" in name else "MODEL"


def _measure(
    context: typer.Context,
    name: str,
    shape: "ModelShape",
    gpu: "Gpu",
    workload: Workload,
    output: Path | None,
) -> "list[Measurement]":
    from octavo.kernels.device import default_device
    from octavo.measure import store
    from octavo.measure.advise.measured import check_measurable, measure

    device = default_device()
    check_measurable(shape, gpu, workload, device)
    height, width = workload.image_size
    taken = {"gpu": gpu.key, "prompt_len": workload.context, "image_size": f"{width}x{height}"}
    with err.status("measuring") as status:
        measured = measure(
            shape,
            workload,
            device.torch_device,
            name=name,
            command=repeat_command(context, taken=taken),
            on_progress=lambda what: status.update(f"measuring {what}"),
        )
    if output is not None:
        store.append(output, measured.records)
    for row, reason in measured.failures:
        err.print(f"not measured: {row}: {reason}", soft_wrap=True)
    return list(measured.records)
