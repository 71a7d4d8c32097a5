"""octavo calibrate: static scales for vision attention, a KV cache or a diffusion pipeline."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.calibration.settings import CalibrationSettings
from octavo.cli.calibrate_pipeline import (
    PipelineOptions,
    RunOptions,
    bar,
    calibrate_scales,
    check_pipeline,
    scan_layers,
)
from octavo.cli.console import out
from octavo.cli.options import (
    Flags,
    check_folder,
    field_names,
    given_flags,
    repeat_command,
    takes_settings,
)
from octavo.cli.prompt_flags import AddBos, ChatTemplate
from octavo.cli.tables import print_table
from octavo.errors import ConfigError
from octavo.extras import need

if TYPE_CHECKING:
    from octavo.calibration.data import PromptData
    from octavo.calibration.run import Subject
    from octavo.integrations.transformers.tokenizer import PromptSettings
    from octavo.measure.records import Measurement


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The images or texts that a model sees, and how.

    Attributes:
        data: A folder of images, a .jsonl or .parquet file with a field image or images, or a data
            set's name such as lmarena-ai/VisionArena-Chat. With --kv: a file or folder of text, a
            .jsonl or .parquet file with a field text, messages or conversations, or a data set's
            name.
        split: Of a data set.
        subset: Of a data set.
        max_length: With --kv: tokens of a window, 2048 or the model's context if that is shorter.
        batch_size: Prompts that run at once.
        plot: Also write a page with a plot of every number.
    """

    data: str | None = None
    split: Annotated[str, typer.Option("--hf-split")] = "train"
    subset: Annotated[str | None, typer.Option("--hf-subset")] = None
    max_length: Annotated[int | None, typer.Option(min=1)] = None
    batch_size: Annotated[int, typer.Option(min=1)] = 1
    plot: Path | None = None

    def open_images(self, run: RunOptions) -> "tuple[Subject[Any], PromptData[Any]]":
        """A model with a vision tower, and the images that it sees."""
        from octavo.calibration.image_data import open_images
        from octavo.integrations.transformers.calibrate import load_image_model

        if self.max_length is not None:
            raise ConfigError("expected --kv with --max-length, got images, which have no windows")
        need("octavo calibrate", "transformers", "PIL")
        images = open_images(str(self.data), split=self.split, subset=self.subset)
        model = load_image_model(run.model, dtype=run.dtype, device=run.device)
        return model.subject(), images

    def open_texts(
        self, run: RunOptions, prompts: "PromptSettings"
    ) -> "tuple[Subject[Any], PromptData[Any]]":
        """A language model, and the windows of text that it sees."""
        from octavo.calibration.text_data import open_texts
        from octavo.integrations.transformers.text_model import load_text_model

        texts = open_texts(str(self.data), split=self.split, subset=self.subset)
        model = load_text_model(run.model, dtype=run.dtype, device=run.device, prompts=prompts)
        return model.subject(), model.cut_windows(texts, self.max_length)


@takes_settings
def calibrate(
    *,
    context: typer.Context,
    is_kv: Annotated[
        bool,
        typer.Option("--kv", help="Calibrate the KV cache of a language model, from texts."),
    ] = False,
    is_pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline",
            help="Calibrate a diffusion pipeline, over prompts and timesteps: MODEL is its folder "
            "or its name on the hub; left out, the small image model.",
        ),
    ] = False,
    source: DataOptions,
    settings: Annotated[
        CalibrationSettings,
        Flags(
            names={"rotate_keys": "--rotate-keys", "center_keys": "--center-keys"},
            without=("percentile", "granularity"),
        ),
    ],
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
    chat_template: ChatTemplate = None,
    add_bos: AddBos = None,
    run: RunOptions,
    pipeline: PipelineOptions,
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
    # All that can be wrong about the request, before the model is loaded.
    if percentile is not None and settings.observer != "percentile":
        raise ConfigError(
            "expected --observer percentile with --percentile, got the observer "
            f"{settings.observer}"
        )
    settings = replace(
        settings,
        percentile=settings.percentile if percentile is None else percentile,
        granularity="head" if per_head else "tensor",
    )
    command = repeat_command(context, without=("is_resumed", "plot"))
    if is_pipeline:
        others = {"is_kv", "rotate_keys", "center_keys", "chat_template", "add_bos"}
        if given_flags(context, others | field_names(DataOptions)):
            raise ConfigError(
                "expected --prompt or --prompts with --pipeline, got options of images, texts or "
                "plots: leave them out"
            )
        check_pipeline(context, run, pipeline)
        if pipeline.is_sensitivity:
            scan_layers(run, pipeline, command)
        else:
            calibrate_scales(run, pipeline, settings, command)
        return
    if given := given_flags(context, field_names(PipelineOptions)):
        raise ConfigError(f"expected --pipeline with {', '.join(given)}, got none")
    from octavo.integrations.transformers.tokenizer import PromptSettings

    prompts = PromptSettings(add_bos=add_bos, chat_template=chat_template)
    if not is_kv and (settings.rotate_keys or settings.center_keys):
        raise ConfigError("expected --kv with --rotate-keys or --center-keys, got images")
    if not is_kv and prompts.command:
        raise ConfigError("expected --kv with --add-bos or --chat-template, got images")
    calibrate_attention(run, source, settings, command, prompts if is_kv else None)


def calibrate_attention(
    run: RunOptions,
    source: DataOptions,
    settings: CalibrationSettings,
    command: str,
    prompts: "PromptSettings | None",
) -> None:
    """Find the scales of attention, print what was seen, write the file; prompts: of texts."""
    from octavo.calibration.autosave import check_scale_paths
    from octavo.calibration.run import calibrate_to_file
    from octavo.measure.evaluate.calibration import calibration_records
    from octavo.measure.report.layers import calibration_table

    path = run.scale_save_path
    if source.data is None or path is None:
        missing = "--data" if source.data is None else "--scale-save-path"
        raise typer.BadParameter(f"expected {missing}, got none", param_hint=missing)
    check_scale_paths(is_fp8=True, save_path=path, margin=settings.margin)
    check_folder(source.plot)
    subject, data = source.open_texts(run, prompts) if prompts else source.open_images(run)
    with bar() as progress:
        num_passes = 2 if settings.center_keys else 1
        total = num_passes * min(run.num_prompts, data.num_prompts or run.num_prompts)
        task = progress.add_task("calibrating", total=total)
        result = calibrate_to_file(
            *(subject, data, path, settings),
            num_prompts=run.num_prompts,
            batch_size=source.batch_size,
            is_resumed=run.is_resumed,
            on_prompts=lambda seen: progress.update(task, completed=seen),
        )
        progress.update(task, total=num_passes * result.num_prompts)
    records = calibration_records(result, command)
    print_table(calibration_table(records))
    saved = f"{len(result.scales.layers)} layers, {result.num_prompts} prompts, observer {settings}"
    out.print(f"{saved}, margin {settings.margin:g}: {path}", soft_wrap=True)
    if source.plot is not None:
        _write_plot(source.plot, records, command)


def _write_plot(plot: Path, records: "list[Measurement]", command: str) -> None:
    from octavo.measure.report.html import write_report
    from octavo.measure.report.layers import CALIBRATION

    write_report(
        CALIBRATION.make(records),
        plot,
        title="octavo calibrate",
        machines=[records[0].machine],
        commands=[command],
    )
    out.print(f"Plots: {plot}", soft_wrap=True)
