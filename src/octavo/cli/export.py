"""octavo export: a checkpoint folder with KV-cache scales, for vLLM and compressed-tensors."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import err, out
from octavo.cli.options import Strict


class FormatName(StrEnum):
    """The formats, as the command line knows them."""

    compressed_tensors = "compressed-tensors"
    modelopt = "modelopt"


def export(
    model: Annotated[
        Path, typer.Argument(help="A model's folder: config.json and weights in safetensors.")
    ],
    scales: Annotated[
        Path, typer.Option("--scales", help="A scale file (JSON) for every attention layer.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write: a new or an empty one.")
    ],
    format: Annotated[
        FormatName,
        typer.Option(
            "--format",
            help="Names and config of the scales. ModelOpt's has no scales per head or for Q.",
        ),
    ] = FormatName.compressed_tensors,
    strict: Strict = False,
) -> None:
    """Write a checkpoint that carries the scales of its KV cache.

    The new folder has every file of the model's and the scales beside them, announced in
    config.json: per tensor, or per head if the scale file has any such. Weights are not changed:
    they are hard links where the file system allows it. vLLM reads the folder with
    --kv-cache-dtype fp8, transformers with the package compressed-tensors.
    """
    from rich.progress import Progress

    from octavo.calibration.scale_file import load_scales
    from octavo.integrations.checkpoints.export import export_checkpoint

    scale_set = load_scales(scales)
    with Progress(console=err) as progress:
        task = progress.add_task("writing files")
        exported = export_checkpoint(
            model,
            scale_set,
            output,
            format=format.value,
            on_file=lambda done, total: progress.update(task, completed=done, total=total),
        )
    granularity = "head" if exported.strategy == "attn_head" else "tensor"
    parts = "q, k and v" if exported.has_q else "k and v"
    out.print(
        f"{exported.folder}: scales of {parts} per {granularity} for {exported.num_layers} layers, "
        f"{exported.num_files} files, {exported.num_linked} of them hard links",
        soft_wrap=True,
    )
    if not exported.has_q and any(layer.q is not None for layer in scale_set.layers.values()):
        out.print("The scales of q are left out: ModelOpt's format has no place for them.")
