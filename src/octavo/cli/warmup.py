"""octavo warmup: compile ahead what a model will need."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import err, out


def warmup(
    model: Annotated[
        Path,
        typer.Argument(
            help="A model's folder, or its config.json; weights are not needed.", exists=True
        ),
    ],
    kv_cache_dtype: Annotated[
        str,
        typer.Option("--kv-cache-dtype", help="Of the KV cache: fp8 (e4m3), fp8_e5m2, or bf16."),
    ] = "fp8",
) -> None:
    """Compile every kernel that a model will need, so that its first request does not wait.

    Kernels go to OCTAVO_CACHE_DIR, a folder that an image can carry to machines with the same GPU,
    or where that is unset to Triton's own cache. Needs the GPU that the model will run on.
    """
    from rich.progress import Progress

    from octavo import env
    from octavo.errors import UnsupportedError
    from octavo.integrations.transformers.model_layers import read_layers
    from octavo.kernels.device import default_device
    from octavo.ops.warm_up import warm_up_calls

    device = default_device()
    if device.capability is None:
        raise UnsupportedError(
            f"kernels are compiled on the GPU they will run on, got {device.name}"
        )
    layers = read_layers(model, kv_cache_dtype)
    calls = warm_up_calls(layers, device.torch_device)
    with Progress(console=err) as progress:
        task = progress.add_task("compiling", total=len(calls))
        for name, call in calls:
            progress.update(task, description=name)
            call()
            progress.advance(task)
    folder = env.CACHE_DIR.read() or "Triton's cache"
    out.print(f"{len(calls)} calls compiled for {device.name} into {folder}", soft_wrap=True)
