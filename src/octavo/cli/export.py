"""octavo export: a checkpoint folder with FP8 weights or KV-cache scales, for vLLM and others."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octavo.cli.console import out, progress_bar
from octavo.cli.model_options import LinearOptions
from octavo.cli.options import Flags, Strict, takes_settings
from octavo.errors import ConfigError
from octavo.extras import need

if TYPE_CHECKING:
    from octavo.calibration.scale_file import ScaleSet
    from octavo.integrations.checkpoints.export import Exported
    from octavo.recipe import Recipe

LinearFlags = Annotated[
    LinearOptions,
    Flags(
        help={
            "quantization": "Of linear layers: fp8, a scale for each output of a weight; readers "
            "quantize activations per token. Routers, experts that transformers keeps in one "
            "tensor, and heads stay as they are.",
            "ignored_layers": "Linear layers that --quantization leaves as they are: a part of a "
            "name (down_proj, visual), a glob, re:…, the number or range of a layer; may be given "
            "more than once. What vLLM computes as one product (q, k, v; gate, up) stays together.",
            "recipe_path": "A recipe (.toml or .json) for linear layers in place of these flags: "
            "weights in blocks, or weights alone.",
        },
        without=("weight_only_layers",),
    ),
]


@takes_settings
def export(
    *,
    model: Annotated[Path, typer.Argument()],
    linear: LinearFlags,
    scales: Path | None = None,
    output: Annotated[Path, typer.Option("--output", "-o")],
    format: Literal["compressed-tensors", "modelopt"] = "compressed-tensors",
    strict: Strict = False,
) -> None:
    """Write a checkpoint with FP8 weights, or with the scales of its KV cache, or with both.

    octavo export path/to/model --quantization fp8 -o path/to/new

    octavo export path/to/model --scales scales.json -o path/to/new

    The new folder has the model's other files too, and its config.json says what is quantized.
    vLLM reads it without flags (scales of the cache with --kv-cache-dtype fp8), octavo does, and
    transformers with the package compressed-tensors.

    Weights are quantized by themselves, without data: the numbers are those of octavo serve MODEL
    --quantization fp8. With --scales alone weights are not changed: they are hard links where the
    file system allows it.

    Attributes:
        model: A model's folder: config.json and weights in safetensors.
        scales: A scale file (JSON) for every attention layer, which octavo calibrate --kv writes.
        output: The folder to write: a new or an empty one.
        format: Names and config of the scales. ModelOpt's has no scales per head or for Q, and no
            place for weights of --quantization.
    """
    recipe = _read_recipe(linear)
    if recipe is None and scales is None:
        raise typer.BadParameter("expected --quantization fp8, --scales or --recipe, got none")
    if recipe is not None and format == "modelopt":
        raise ConfigError(
            "expected --format compressed-tensors with FP8 weights, got modelopt, which is for "
            "--scales alone"
        )
    from octavo.calibration.scale_file import load_scales

    found = None if scales is None else load_scales(scales)
    if recipe is not None:
        _export_weights(model, recipe, found, output)
    elif found is not None:
        _export_scales(model, found, output, format)


def _read_recipe(linear: LinearOptions) -> "Recipe | None":
    """The recipe that a file or the flags mean; None without any."""
    from octavo.recipe import Recipe

    recipe = linear.load_recipe(has_others=False)
    if recipe is not None or linear.quantization is None:
        return recipe
    return Recipe(linear=linear.quantization, **linear.patterns)


def _export_weights(model: Path, recipe: "Recipe", scales: "ScaleSet | None", output: Path) -> None:
    need("octavo export --quantization", "transformers")
    from rich.filesize import decimal

    from octavo.integrations.checkpoints.export_linear import export_weights
    from octavo.integrations.transformers.export_plan import plan_export

    plan = plan_export(model, recipe)
    settings = recipe.linear
    assert settings is not None
    with progress_bar("quantizing layers") as move:
        done = export_weights(
            model,
            plan,
            settings,
            output,
            cache_scales=scales,
            on_layer=lambda done, total: move(done=done, total=total),
        )
    before, after = map(decimal, (done.num_bytes_before, done.num_bytes))
    inputs = "in the model's dtype" if settings.activation is None else f"per {settings.activation}"
    out.print(
        f"{done.folder}: {done.num_layers} linear layers in FP8 (weights per {settings.weight}, "
        f"activations {inputs}), {len(plan.left)} left alone, {before} -> {after}",
        soft_wrap=True,
    )
    command = ["vllm", "serve", str(done.folder)]
    if done.cache is not None:
        out.print(f"with {_describe(done.cache)}", soft_wrap=True)
        command += ["--kv-cache-dtype", "fp8"]
    out.print(f"serve it: {shlex.join(command)}", soft_wrap=True)


def _export_scales(
    model: Path, scales: "ScaleSet", output: Path, format: Literal["compressed-tensors", "modelopt"]
) -> None:
    from octavo.integrations.checkpoints.export import export_checkpoint

    with progress_bar("writing files") as move:
        exported = export_checkpoint(
            model,
            scales,
            output,
            format=format,
            on_file=lambda done, total: move(done=done, total=total),
        )
    out.print(
        f"{exported.folder}: {_describe(exported)}, {exported.num_files} files, "
        f"{exported.num_linked} of them hard links",
        soft_wrap=True,
    )
    if not exported.has_q and any(layer.q is not None for layer in scales.layers.values()):
        out.print("The scales of q are left out: ModelOpt's format has no place for them.")


def _describe(exported: "Exported") -> str:
    """The scales of a KV cache that were written."""
    granularity = "head" if exported.strategy == "attn_head" else "tensor"
    parts = "q, k and v" if exported.has_q else "k and v"
    return f"scales of {parts} per {granularity} for {exported.num_layers} layers"
