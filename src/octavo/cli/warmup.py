"""octavo warmup: compile ahead what a model will need."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo.cli.console import out, progress_bar
from octavo.cli.options import takes_settings
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.ops.warm_up import Layers


SETTINGS: dict[str, dict[str, Any]] = {
    "channel": {},
    "tensor": {"weight": "tensor", "activation": "tensor"},
    "block": {"weight": "block 128x128"},
    "static": {"scaling": "static"},
    "weights": {"activation": None},
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What will run.

    Attributes:
        shapes: Linear layers as MxKxN (tokens, inputs, outputs), such as 4608x3072x12288, with
            commas between them.
        tokens: Numbers of tokens for the model's linear layers, with commas between them: of a
            transformer of diffusers, those of an image and its prompt.
        linear: Linear layers: weights per channel and activations per token; one scale for each
            tensor; blocks; static activations; weights alone.
        kv_cache_dtype: Of the KV cache: fp8 (e4m3), fp8_e5m2, or bf16.
    """

    model: Annotated[
        Path | None,
        typer.Argument(
            help="A model's folder, or its config.json; weights are not needed. Of diffusers: a "
            "transformer's, or a pipeline's folder.",
            exists=True,
            show_default=False,
        ),
    ] = None
    shapes: str | None = None
    tokens: str | None = None
    linear: Literal["channel", "tensor", "block", "static", "weights"] = "channel"
    kv_cache_dtype: str = "fp8"

    def __post_init__(self) -> None:
        if self.model is None and self.shapes is None:
            raise ConfigError("expected a model or --shapes, got neither")
        if self.model is None and self.tokens is not None:
            raise ConfigError("--tokens is for a model's layers, which is not there")

    @property
    def num_tokens(self) -> list[int]:
        """The numbers of tokens that were asked for."""
        parts = [] if self.tokens is None else self.tokens.split(",")
        if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
            raise ConfigError(f"expected numbers of tokens such as 4608,512, got {self.tokens!r}")
        return [int(part) for part in parts]


@takes_settings
def warmup(asked: Wanted) -> None:
    """Compile every kernel that a model or linear layers will need: no first request waits.

    Kernels go to OCTAVO_CACHE_DIR (~/.cache/octavo if unset), a folder that survives restarts and
    that an image can carry to machines with the same GPU. Needs the GPU that the model will run on.
    """
    from octavo import env
    from octavo.integrations.model_layers import layers_to_warm_up
    from octavo.layers.warmup import check_fp8, linear_layers, parse_shapes
    from octavo.ops.warm_up import LinearLayers, check_gpu, warm_up_calls

    settings = SETTINGS[asked.linear]
    layers: list[Layers] = []
    if asked.shapes is not None:
        layers += linear_layers(parse_shapes(asked.shapes), settings)
    if asked.model is not None:
        kv_cache_dtype = asked.kv_cache_dtype
        layers += layers_to_warm_up(asked.model, asked.num_tokens, settings, kv_cache_dtype)
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
