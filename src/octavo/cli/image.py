"""octavo image: pictures and videos from words."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.console import err
from octavo.cli.image_drawing import Drawing, name_of
from octavo.cli.model_options import DeviceName, LinearOptions, OmniOptions
from octavo.cli.options import Flags, Strict, read_object, takes_settings
from octavo.errors import ConfigError
from octavo.extras import need
from octavo.serving.engine.image_request import ImageSampling

LinearFlags = Annotated[
    LinearOptions,
    Flags(
        help={
            "quantization": "Of the transformer's linear layers: fp8. Modulation, embeddings and "
            "the first and last projection stay as they are.",
            "ignored_layers": "Linear layers that --quantization leaves as they are: a part of a "
            "name (img_mlp), a glob, re:…, a block's number or range; may be given more than once.",
            "weight_only_layers": "Linear layers of which --quantization changes the weight alone; "
            "modulation is all of that kind, which else stay as they are. May be given more than "
            "once.",
        }
    ),
]
SamplingFlags = Annotated[
    ImageSampling,
    Flags(
        names={"num_images_per_prompt": "--batch -n"},
        help={
            "seed": "Of the first picture of each prompt; the next ones have the seeds after it. "
            "Left out: a random one, which is printed."
        },
        without=("extra_args",),
    ),
]


@takes_settings
def image(
    *,
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
    linear: LinearFlags,
    pipeline: OmniOptions,
    strict: Strict = False,
    sampling: SamplingFlags,
    extra_args: Annotated[
        str | None,
        typer.Option(
            "--extra-args",
            help="Other arguments of the pipeline as JSON, by their names there.",
            show_default=False,
        ),
    ] = None,
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
    words = pipeline.words(linear)
    sampling = replace(sampling, extra_args=read_object("--extra-args", extra_args) or {})
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
