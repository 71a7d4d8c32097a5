"""octavo calibrate: static scales for vision attention, a KV cache or a diffusion pipeline."""

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import calibrate_pipeline as pipeline
from octavo.cli import calibrate_pipeline_flags as flags
from octavo.cli.console import out
from octavo.cli.options import check_folder
from octavo.cli.prompt_flags import AddBos, ChatTemplate
from octavo.cli.tables import print_table
from octavo.errors import ConfigError
from octavo.extras import need

if TYPE_CHECKING:
    from octavo.calibration.data import PromptData
    from octavo.calibration.observers import CalibrationSettings
    from octavo.calibration.run import Subject
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.measure.records import Measurement


DEFAULT_SPLIT = "train"
DEFAULT_DTYPE = "auto"


class ObserverName(StrEnum):
    """The observers, as the command line knows them."""

    amax = "amax"
    percentile = "percentile"
    mse = "mse"


def calibrate(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder, or its name on the hub; left out, the small chart reader, "
            "with --kv SmolLM2-135M-Instruct, with --pipeline the small image model.",
            show_default=False,
        ),
    ] = None,
    is_kv: Annotated[
        bool,
        typer.Option("--kv", help="Calibrate the KV cache of a language model, from texts."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="A folder of images, a .jsonl or .parquet file with a field image or images, or "
            "a data set's name such as lmarena-ai/VisionArena-Chat. With --kv: a file or folder of "
            "text, a .jsonl or .parquet file with a field text, messages or conversations, or a "
            "data set's name.",
        ),
    ] = None,
    scale_save_path: Annotated[
        Path | None, typer.Option("--scale-save-path", help="The scale file to write (JSON).")
    ] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="Headroom: every scale is this many times larger.")
    ] = 1.5,
    observer: Annotated[
        ObserverName,
        typer.Option(
            "--observer",
            help="What a scale reaches to: the largest value, a percentile of the absolute values, "
            "or wherever the squared error of e4m3 is least.",
        ),
    ] = ObserverName.amax,
    percentile: Annotated[
        float | None,
        typer.Option(
            "--percentile",
            help="Of the observer of that name; 99.99 if left out.",
            show_default=False,
        ),
    ] = None,
    per_head: Annotated[
        bool,
        typer.Option("--per-head", help="A scale for each head, not one for all. vLLM reads both."),
    ] = False,
    rotate_keys: Annotated[
        bool,
        typer.Option(
            "--rotate-keys",
            help="With --kv: scales of keys and queries that are multiplied by a Hadamard matrix, "
            'for Recipe(kv_cache={…, "rotate_keys": true}).',
        ),
    ] = False,
    center_keys: Annotated[
        bool,
        typer.Option(
            "--center-keys",
            help="With --kv: scales of keys without their mean, and the mean, found by a pass over "
            'the data of its own, for Recipe(kv_cache={…, "center_keys": true}).',
        ),
    ] = False,
    num_prompts: Annotated[
        int,
        typer.Option(
            "--num-prompts",
            min=1,
            help="How many of the data's prompts to use; with --kv, windows of text or chats.",
        ),
    ] = 100,
    chat_template: ChatTemplate = None,
    add_bos: AddBos = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            min=1,
            help="With --kv: tokens of a window, 2048 or the model's context if that is shorter.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Prompts that run at once.")
    ] = 1,
    split: Annotated[str, typer.Option("--hf-split", help="Of a data set.")] = DEFAULT_SPLIT,
    subset: Annotated[str | None, typer.Option("--hf-subset", help="Of a data set.")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="The model runs in this: the checkpoint's own, or such as bfloat16."
        ),
    ] = DEFAULT_DTYPE,
    device: Annotated[
        str | None, typer.Option("--device", help="The GPU if there is one, else the CPU.")
    ] = None,
    is_resumed: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh",
            help="Go on where an interrupted run stopped, or forget what it saw.",
        ),
    ] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also write a page with a plot of every number.")
    ] = None,
    is_pipeline: flags.IsPipeline = False,
    prompts_file: flags.PromptsFile = None,
    prompt: flags.PromptTexts = None,
    num_inference_steps: flags.NumSteps = None,
    height: flags.Height = None,
    width: flags.Width = None,
    seed: flags.Seed = 0,
    call_options: flags.CallOptions = None,
    is_attention: flags.IsAttention = False,
    is_text_encoder: flags.IsTextEncoder = False,
    ignored_layers: flags.IgnoredLayers = None,
    weight_only_layers: flags.WeightOnlyLayers = None,
    is_sensitivity: flags.IsSensitivity = False,
    sensitivity_by: flags.SensitivityBy = flags.By.layer,
    is_all: flags.IsAll = False,
    num_timesteps: flags.NumTimesteps = 4,
    output: flags.Records = None,
) -> None:
    """Find static FP8 scales: for vision attention from images, for a KV cache from texts (--kv),
    for the layers of a diffusion pipeline from prompts (--pipeline).

    The model runs in its own dtype while every attention layer's queries, keys and values are
    counted. Prints amax, headroom and SQNR of each layer and writes the scale file, with vLLM's
    layer names for vision towers of the Qwen families. Use it by
    Recipe(vision_attention={"scaling": "static"}, scales="scales.json"), or vLLM's
    --mm-encoder-fp8-scale-path; with --kv by Recipe(kv_cache={"scaling": "static"}, scales=…).

    Texts are cut into windows of --max-length tokens by the model's tokenizer; chats ({"messages":
    …} or ShareGPT's {"conversations": …} per row) go through its chat template. There is no padding
    and no warm-up pass: nothing but the tokens of the data is counted.

    Scales of rotated or centered keys are for octavo's KV cache alone: vLLM stores keys as they
    are, and octavo export refuses such a file.

    With --pipeline, the linear layers that Recipe(linear="fp8") would quantize are watched at every
    denoising step of every prompt, since ranges move on the way from noise to a picture. Use the
    file by Recipe(linear={"scaling": "static"}, scales=…). --sensitivity finds no scales, but which
    layers matter: the inputs of the transformer are kept at some steps, and run again with one
    layer in FP8 at a time.

    An interrupted run leaves SCALE_SAVE_PATH.partial behind, and the same command goes on from it,
    in whichever pass it was; with --pipeline after the last whole prompt.
    """
    from octavo.calibration.autosave import check_scale_paths
    from octavo.calibration.observers import CalibrationSettings
    from octavo.calibration.run import calibrate_to_file
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.measure.evaluate.calibration import calibration_records
    from octavo.measure.report.layers import calibration_table

    # All that can be wrong about the request, before the model is loaded.
    if percentile is not None and observer is not ObserverName.percentile:
        raise ConfigError(
            f"expected --observer percentile with --percentile, got the observer {observer.value}"
        )
    settings = CalibrationSettings(
        observer=observer.value,
        percentile=CalibrationSettings.percentile if percentile is None else percentile,
        granularity="head" if per_head else "tensor",
        margin=margin,
        rotate_keys=rotate_keys,
        center_keys=center_keys,
    )
    texts = PromptSettings(add_bos=add_bos, chat_template=chat_template)
    asked = pipeline.PipelineRequest(
        model=model,
        scale_save_path=scale_save_path,
        num_prompts=num_prompts,
        dtype=dtype,
        device=device,
        is_resumed=is_resumed,
        prompts_file=prompts_file,
        prompts=tuple(prompt or ()),
        num_inference_steps=num_inference_steps,
        height=height,
        width=width,
        seed=seed,
        call_options=call_options,
        is_attention=is_attention,
        is_text_encoder=is_text_encoder,
        ignored_layers=tuple(ignored_layers or ()),
        weight_only_layers=tuple(weight_only_layers or ()),
        is_sensitivity=is_sensitivity,
        by=sensitivity_by,
        is_all=is_all,
        num_timesteps=num_timesteps,
        output=output,
    )
    if is_pipeline:
        others = (is_kv, data, rotate_keys, center_keys, max_length, batch_size != 1, plot, subset)
        if any((*others, texts.command)) or split != DEFAULT_SPLIT:
            raise ConfigError(
                "expected --prompt or --prompts with --pipeline, got options of images, texts or "
                "plots: leave them out"
            )
        pipeline.calibrate_pipeline(asked, settings)
        return
    if given := [option for option, _ in asked.given(pipeline.OWN_OPTIONS)]:
        raise ConfigError(f"expected --pipeline with {', '.join(given)}, got none")
    if data is None or scale_save_path is None:
        missing = "--data" if data is None else "--scale-save-path"
        raise typer.BadParameter(f"expected {missing}, got none", param_hint=missing)
    if (rotate_keys or center_keys) and not is_kv:
        raise ConfigError("expected --kv with --rotate-keys or --center-keys, got images")
    if texts.command and not is_kv:
        raise ConfigError("expected --kv with --add-bos or --chat-template, got images")
    check_scale_paths(is_fp8=True, save_path=scale_save_path, margin=margin)
    check_folder(plot)
    request = _Request(model, data, split, subset, max_length, batch_size, dtype, device, texts)
    subject, prompts = _open_texts(request) if is_kv else _open_images(request)
    with pipeline.bar() as progress:
        num_passes = 2 if center_keys else 1
        total = num_passes * min(num_prompts, prompts.num_prompts or num_prompts)
        task = progress.add_task("calibrating", total=total)
        result = calibrate_to_file(
            subject,
            prompts,
            scale_save_path,
            settings,
            num_prompts=num_prompts,
            batch_size=request.batch_size,
            is_resumed=is_resumed,
            on_prompts=lambda seen: progress.update(task, completed=seen),
        )
        progress.update(task, total=num_passes * result.num_prompts)
    command = _command(request, is_kv, scale_save_path, settings, num_prompts)
    records = calibration_records(result, command)
    print_table(calibration_table(records))
    saved = f"{len(result.scales.layers)} layers, {result.num_prompts} prompts, observer {settings}"
    out.print(f"{saved}, margin {margin:g}: {scale_save_path}", soft_wrap=True)
    if plot is not None:
        _write_plot(plot, records, command)


@dataclass(frozen=True)
class _Request:
    """Which model runs on which data, and how."""

    model: str | None
    data: str
    split: str
    subset: str | None
    max_length: int | None
    batch_size: int
    dtype: str
    device: str | None
    prompts: "PromptSettings"


def _open_images(request: _Request) -> "tuple[Subject[Any], PromptData[Any]]":
    from octavo.calibration.image_data import open_images
    from octavo.integrations.transformers.calibrate import load_image_model

    if request.max_length is not None:
        raise ConfigError("expected --kv with --max-length, got images, which have no windows")
    need("octavo calibrate", "transformers", "PIL")
    images = open_images(request.data, split=request.split, subset=request.subset)
    model = load_image_model(request.model, dtype=request.dtype, device=request.device)
    return model.subject(), images


def _open_texts(request: _Request) -> "tuple[Subject[Any], PromptData[Any]]":
    from octavo.calibration.text_data import open_texts
    from octavo.integrations.transformers.text_model import load_text_model

    texts = open_texts(request.data, split=request.split, subset=request.subset)
    model = load_text_model(
        request.model, dtype=request.dtype, device=request.device, prompts=request.prompts
    )
    return model.subject(), model.cut_windows(texts, request.max_length)


def _command(
    request: _Request,
    is_kv: bool,
    path: Path,
    settings: "CalibrationSettings",
    num_prompts: int,
) -> str:
    """A command line that finds these scales again."""
    words = ["octavo", "calibrate"]
    words += [request.model] if request.model is not None else []
    words += ["--kv"] if is_kv else []
    words += ["--data", request.data, "--scale-save-path", str(path)]
    words += ["--observer", settings.observer, "--margin", f"{settings.margin:g}"]
    if settings.observer == "percentile":
        words += ["--percentile", f"{settings.percentile:g}"]
    if settings.granularity == "head":
        words.append("--per-head")
    words += ["--rotate-keys"] if settings.rotate_keys else []
    words += ["--center-keys"] if settings.center_keys else []
    for option, value, default in (
        ("--hf-split", request.split, DEFAULT_SPLIT),
        ("--hf-subset", request.subset, None),
        ("--max-length", request.max_length, None),
        ("--batch-size", request.batch_size, 1),
        ("--dtype", request.dtype, DEFAULT_DTYPE),
        ("--device", request.device, None),
    ):
        words += [option, str(value)] if value != default else []
    words += request.prompts.command
    return shlex.join([*words, "--num-prompts", str(num_prompts)])


def _write_plot(plot: Path, records: "list[Measurement]", command: str) -> None:
    from octavo.measure.report.layers import calibration_section
    from octavo.measure.report.html import write_report

    write_report(
        [calibration_section(records)],
        plot,
        title="octavo calibrate",
        machines=[records[0].machine],
        commands=[command],
    )
    out.print(f"Plots: {plot}", soft_wrap=True)
