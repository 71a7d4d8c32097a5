"""octavo export: a checkpoint folder with KV-cache scales, for vLLM and compressed-tensors."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from octavo.cli.console import out, progress_bar
from octavo.cli.options import Strict, takes_settings


@takes_settings
def export(
    *,
    model: Annotated[Path, typer.Argument()],
    scales: Path,
    output: Annotated[Path, typer.Option("--output", "-o")],
    format: Literal["compressed-tensors", "modelopt"] = "compressed-tensors",
    strict: Strict = False,
) -> None:
    """Write a checkpoint that carries the scales of its KV cache.

    The new folder has every file of the model's and the scales beside them, announced in
    config.json: per tensor, or per head if the scale file has any such. Weights are not changed:
    they are hard links where the file system allows it. vLLM reads the folder with
    --kv-cache-dtype fp8, transformers with the package compressed-tensors.

    Attributes:
        model: A model's folder: config.json and weights in safetensors.
        scales: A scale file (JSON) for every attention layer.
        output: The folder to write: a new or an empty one.
        format: Names and config of the scales. ModelOpt's has no scales per head or for Q.
    """
    from octavo.calibration.scale_file import load_scales
    from octavo.integrations.checkpoints.export import export_checkpoint

    found = load_scales(scales)
    with progress_bar("writing files") as move:
        exported = export_checkpoint(
            model,
            found,
            output,
            format=format,
            on_file=lambda done, total: move(done=done, total=total),
        )
    granularity = "head" if exported.strategy == "attn_head" else "tensor"
    parts = "q, k and v" if exported.has_q else "k and v"
    out.print(
        f"{exported.folder}: scales of {parts} per {granularity} for {exported.num_layers} layers, "
        f"{exported.num_files} files, {exported.num_linked} of them hard links",
        soft_wrap=True,
    )
    if not exported.has_q and any(layer.q is not None for layer in found.layers.values()):
        out.print("The scales of q are left out: ModelOpt's format has no place for them.")
