"""octavo warmup: compile ahead what a model will need."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import err, out

if TYPE_CHECKING:
    from octavo.ops.warm_up import Layers


class LinearName(StrEnum):
    """Kinds of FP8 linear layers, as the command line knows them."""

    channel = "channel"
    tensor = "tensor"
    block = "block"
    static = "static"
    weights = "weights"


SETTINGS: dict[LinearName, dict[str, Any]] = {
    LinearName.channel: {},
    LinearName.tensor: {"weight": "tensor", "activation": "tensor"},
    LinearName.block: {"weight": "block 128x128"},
    LinearName.static: {"scaling": "static"},
    LinearName.weights: {"activation": None},
}


def warmup(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A model's folder, or its config.json; weights are not needed. Of diffusers: a "
            "transformer's, or a pipeline's folder.",
            exists=True,
            show_default=False,
        ),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            "--shapes",
            help="Linear layers as MxKxN (tokens, inputs, outputs), such as 4608x3072x12288, with "
            "commas between them.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            help="Numbers of tokens for the model's linear layers, with commas between them: of a "
            "transformer of diffusers, those of a picture and its prompt.",
            show_default=False,
        ),
    ] = None,
    linear: Annotated[
        LinearName,
        typer.Option(
            "--linear",
            help="Linear layers: weights per channel and activations per token; one scale for "
            "each tensor; blocks; static activations; weights alone.",
        ),
    ] = LinearName.channel,
    kv_cache_dtype: Annotated[
        str,
        typer.Option("--kv-cache-dtype", help="Of the KV cache: fp8 (e4m3), fp8_e5m2, or bf16."),
    ] = "fp8",
) -> None:
    """Compile every kernel that a model or linear layers will need: no first request waits.

    Kernels go to OCTAVO_CACHE_DIR (~/.cache/octavo if unset), a folder that survives restarts and
    that an image can carry to machines with the same GPU. Needs the GPU that the model will run on.
    """
    from rich.progress import Progress

    from octavo import env
    from octavo.errors import ConfigError
    from octavo.layers.warmup import check_fp8, linear_layers, parse_shapes
    from octavo.ops.warm_up import LinearLayers, check_gpu, warm_up_calls

    if model is None and shapes is None:
        raise ConfigError("expected a model or --shapes, got neither")
    layers: list[Layers] = []
    if shapes is not None:
        layers += linear_layers(parse_shapes(shapes), SETTINGS[linear])
    if model is not None:
        layers += _layers(model, _numbers(tokens), SETTINGS[linear], kv_cache_dtype)
    elif tokens is not None:
        raise ConfigError("--tokens is for a model's layers, which is not there")
    device = check_gpu()
    # A model may be served with plain linear layers where FP8 ones cannot run.
    if all(isinstance(one, LinearLayers) for one in layers):
        check_fp8(layers, device.torch_device)  # type: ignore[arg-type]
    num_calls = 0
    with Progress(console=err) as progress:
        task = progress.add_task("compiling", total=len(layers))
        for one in layers:  # one after the other: each has a weight
            for name, call in warm_up_calls([one], device.torch_device):
                progress.update(task, description=name)
                call()
                num_calls += 1
            progress.advance(task)
    out.print(
        f"{num_calls} calls compiled for {device.name} into {env.compiled_dir()}", soft_wrap=True
    )


def _layers(
    model: Path, tokens: list[int], settings: dict[str, Any], kv_cache_dtype: str
) -> "list[Layers]":
    """The layers of a model of transformers or diffusers."""
    from dataclasses import replace

    from octavo.errors import ConfigError
    from octavo.integrations.transformers.model_layers import read_layers
    from octavo.layers.warmup import linear_layers
    from octavo.ops.warm_up import ROWS, LinearLayers

    if _is_diffusers(model):
        from octavo.integrations.diffusers.linear_shapes import read_linear_shapes

        if not tokens:
            raise ConfigError(f"expected --tokens for {model}, of diffusers, got none")
        sizes = read_linear_shapes(model)
        return [*linear_layers([(m, k, n) for k, n in sizes for m in tokens], settings)]
    found = read_layers(model, kv_cache_dtype)
    rows = tuple(sorted({*ROWS, *tokens}))
    like = linear_layers([(1, 16, 16)], settings)[0]
    return [
        replace(like, columns=one.columns, depth=one.depth, rows=rows)
        if isinstance(one, LinearLayers)
        else one
        for one in found
    ]


def _is_diffusers(model: Path) -> bool:
    # Without importing diffusers, which models of transformers do not need.
    file = model / "config.json" if model.is_dir() else model
    has_index = (model / "model_index.json").is_file()
    return has_index or (file.is_file() and '"_class_name"' in file.read_text("utf-8", "replace"))


def _numbers(text: str | None) -> list[int]:
    from octavo.errors import ConfigError

    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise ConfigError(f"expected numbers of tokens such as 4608,512, got {text!r}")
    return [int(part) for part in parts]
