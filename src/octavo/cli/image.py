"""octavo image: pictures and videos from words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.console import err
from octavo.cli.engine_flags import DeviceName
from octavo.cli.image_drawing import Drawing, name_of
from octavo.cli.omni_flags import (
    Attention,
    CacheBackend,
    CacheConfig,
    IgnoredLayers,
    Quantization,
    QuantizationConfig,
    RecipePath,
    ScalePath,
    WeightOnlyLayers,
    quantization_words,
    read_object,
)
from octavo.cli.options import Strict
from octavo.errors import ConfigError
from octavo.extras import need


def image(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A pipeline's folder or hub name. Left out: small-image, which comes with octavo "
            "and draws 48 × 48 pixels from simple words.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="What to draw; may be given more than once.", show_default=False
        ),
    ] = None,
    negative_prompt: Annotated[
        str | None,
        typer.Option("--negative-prompt", help="What not to draw.", show_default=False),
    ] = None,
    quantization: Quantization = None,
    ignored_layers: IgnoredLayers = None,
    weight_only_layers: WeightOnlyLayers = None,
    quantization_config: QuantizationConfig = None,
    attention: Attention = None,
    scale_path: ScalePath = None,
    strict: Strict = False,
    recipe_path: RecipePath = None,
    cache_backend: CacheBackend = None,
    cache_config: CacheConfig = None,
    num_inference_steps: Annotated[
        int | None,
        typer.Option("--num-inference-steps", help="Denoising steps.", show_default=False),
    ] = None,
    guidance_scale: Annotated[
        float | None,
        typer.Option(
            "--guidance-scale", help="How closely the prompt is followed.", show_default=False
        ),
    ] = None,
    true_cfg_scale: Annotated[
        float | None,
        typer.Option(
            "--true-cfg-scale",
            help="The same by a second pass, of pipelines that have both (FLUX.1, Qwen-Image).",
            show_default=False,
        ),
    ] = None,
    height: Annotated[int | None, typer.Option("--height", show_default=False)] = None,
    width: Annotated[int | None, typer.Option("--width", show_default=False)] = None,
    num_frames: Annotated[
        int | None, typer.Option("--num-frames", help="Of a video.", show_default=False)
    ] = None,
    max_sequence_length: Annotated[
        int | None,
        typer.Option(
            "--max-sequence-length",
            help="Tokens of a prompt, of its text encoder.",
            show_default=False,
        ),
    ] = None,
    extra_args: Annotated[
        str | None,
        typer.Option(
            "--extra-args",
            help="Other arguments of the pipeline as JSON, by their names there.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Of the first picture of each prompt; the next ones have the seeds after it. Left "
            "out: a random one, which is printed.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-n", help="Pictures of each prompt.")] = 1,
    max_batch_size: Annotated[
        int | None,
        typer.Option("--max-batch-size", help="Pictures at once; left out, all.", min=1),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the weights: bfloat16, float16 or float32.")
    ] = "bfloat16",
    device: DeviceName = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="out.png if left out; several are out-0.png, out-1.png, … A video: .mp4 (needs "
            "imageio and imageio-ffmpeg), .gif, or a folder of PNG files.",
            show_default=False,
        ),
    ] = None,
    fps: Annotated[float, typer.Option("--fps", help="Frames of a video in a second.")] = 16.0,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            help="bf16: draw the same seeds without quantization and cache first, and write both "
            "and their difference beside each other (out-compare.png); print PSNR, SSIM, LPIPS if "
            "installed, and the time of both.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Draw pictures, or a video, from words: in FP8 if asked for.

    octavo image --prompt "cat on blue" --quantization fp8 --compare bf16

    octavo image --model Qwen/Qwen-Image --prompt "a lighthouse at dusk" --quantization fp8
    --ignored-layers img_mlp --attention fp8 --num-inference-steps 50 --seed 1 -o lighthouse.png

    Prompt, seed and recipe are in the PNG file. An option that the pipeline does not have is an
    error, and so is a pattern that matches no layer.
    """
    need("octavo image", "diffusers")
    from octavo.serving.engine.image_request import ImageSampling

    patterns = {"ignored_layers": ignored_layers, "weight_only_layers": weight_only_layers}
    words = quantization_words(
        *(recipe_path, quantization, patterns, quantization_config, attention, scale_path)
    )
    if cache_config is not None and cache_backend is None:
        raise ConfigError("--cache-config: expected a --cache-backend with it, got none")
    words["cache_backend"] = cache_backend
    words["cache_config"] = read_object("--cache-config", cache_config)
    sampling = ImageSampling(
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        true_cfg_scale=true_cfg_scale,
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        max_sequence_length=max_sequence_length,
        num_images_per_prompt=batch,
        seed=seed,
        extra_args=read_object("--extra-args", extra_args) or {},
    )
    _check_compare(compare, dtype, words)
    if not fps > 0:
        raise ConfigError(f"expected --fps above 0, got {fps}")
    if not prompt:
        raise ConfigError('expected a --prompt, such as --prompt "cat on blue", got none')
    drawing = Drawing(prompt, sampling, output, fps, force, max_batch_size)
    from octavo.serving.engine.omni import Omni

    with err.status("loading the pipeline"):
        plain = Omni(model, dtype=dtype, device=device, max_batch_size=max_batch_size)
    if compare is None:
        drawing.draw(plain, words)
    else:
        drawing.draw_both(plain, words)


def _check_compare(compare: str | None, dtype: str, words: Mapping[str, Any]) -> None:
    if compare is None:
        return
    if compare != "bf16":
        raise ConfigError(f"expected --compare bf16, got {compare!r}")
    if dtype != "bfloat16":
        raise ConfigError(f"--compare bf16: expected --dtype bfloat16, got {dtype}")
    if not name_of(words):
        raise ConfigError(
            "--compare bf16: expected something to compare it with, got neither --quantization, "
            "--attention nor --cache-backend"
        )
