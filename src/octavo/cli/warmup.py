"""octavo warmup: compile ahead what a model will need."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octavo.cli.console import out, progress_bar
from octavo.cli.options import split_numbers, takes_settings
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.ops.warm_up import Layers


@takes_settings
def warmup(
    model: Annotated[Path | None, typer.Argument(exists=True)] = None,
    shapes: str | None = None,
    tokens: str | None = None,
    linear: Literal["channel", "tensor", "block", "static", "weights"] = "channel",
    kv_cache_dtype: str = "fp8",
) -> None:
    """Compile every kernel that a model or linear layers will need: no first request waits.

    Kernels go to OCTAVO_CACHE_DIR (~/.cache/octavo if unset), a folder that survives restarts and
    that an image can carry to machines with the same GPU. Needs the GPU that the model will run on.

    Attributes:
        model: A model's folder, or its config.json; weights are not needed. Of diffusers: a
            transformer's, or a pipeline's folder.
        shapes: Linear layers as MxKxN (tokens, inputs, outputs), such as 4608x3072x12288, with
            commas between them.
        tokens: Numbers of tokens for the model's linear layers, with commas between them: of a
            transformer of diffusers, those of an image and its prompt.
        linear: Linear layers: weights per channel and activations per token; one scale for each
            tensor; blocks; static activations; weights alone.
        kv_cache_dtype: Of the KV cache: fp8 (e4m3), fp8_e5m2, or bf16.
    """
    if model is None and shapes is None:
        raise ConfigError("expected a model or --shapes, got neither")
    if model is None and tokens is not None:
        raise ConfigError("--tokens is for a model's layers, which is not there")
    expected = "numbers of tokens such as 4608,512"
    num_tokens = () if tokens is None else split_numbers(tokens, expected, int)
    if any(number < 1 for number in num_tokens):
        raise ConfigError(f"expected {expected}; got {tokens!r}")
    from octavo import env
    from octavo.integrations.model_layers import layers_to_warm_up
    from octavo.layers.warmup import check_fp8, linear_layers, parse_shapes
    from octavo.measure.rows import WORDS
    from octavo.ops.warm_up import LinearLayers, check_gpu, warm_up_calls

    settings = {"channel": {}, **WORDS["linear"].values}[linear]
    layers: list[Layers] = []
    if shapes is not None:
        layers += linear_layers(parse_shapes(shapes), settings)
    if model is not None:
        layers += layers_to_warm_up(model, num_tokens, settings, kv_cache_dtype)
    device = check_gpu()
    # A model may be served with plain linear layers where FP8 ones cannot run.
    if all(isinstance(one, LinearLayers) for one in layers):
        check_fp8(layers, device.torch_device)  # type: ignore[arg-type]
    num_calls = 0
    with progress_bar("compiling", len(layers)) as move:
        for num_done, one in enumerate(layers):  # one after the other: each has a weight
            for name, call in warm_up_calls([one], device.torch_device):
                move(name, num_done)
                call()
                num_calls += 1
        move(done=len(layers))
    place = env.compiled_dir()
    out.print(f"{num_calls} calls compiled for {device.name} into {place}", soft_wrap=True)
