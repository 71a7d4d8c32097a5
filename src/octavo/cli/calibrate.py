"""octavo calibrate: static scales for vision attention, a KV cache or a diffusion pipeline."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octavo.brief import list_names
from octavo.calibration.settings import CalibrationSettings
from octavo.cli.console import Collected, out, print_table, progress_bar, write_plots
from octavo.cli.options import (
    Flags,
    Written,
    check_file,
    field_names,
    read_object,
    refuse_flags,
    repeat_command,
    takes_settings,
)
from octavo.errors import ConfigError
from octavo.extras import need
from octavo.integrations.transformers.tokenizer import PromptSettings

if TYPE_CHECKING:
    from octavo.calibration.data import PromptData
    from octavo.calibration.run import Subject
    from octavo.integrations.diffusers.call import Run
    from octavo.recipe import Recipe

NUM_SHOWN = 40  # rows of sensitivity; all are in the records


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Which model is calibrated, and where its scales go.

    Attributes:
        model: A model's folder, or its name on the hub; left out, the small chart reader, with --kv
            SmolLM2-135M-Instruct, with --pipeline the small image model.
        is_kv: Calibrate the KV cache of a language model, from texts.
        is_pipeline: Calibrate a diffusion pipeline, over prompts and timesteps.
        per_head: A scale for each head, not one for all. vLLM reads both.
        scale_save_path: The scale file to write (JSON).
        dtype: The model runs in this: the checkpoint's own, or such as bfloat16.
        device: The GPU if there is one, else the CPU.
        is_resumed: Go on where an interrupted run stopped, or forget what it saw.
        num_prompts: How many of the data's prompts to use; with --kv, windows of text or chats.
    """

    model: Annotated[str | None, typer.Argument()] = None
    is_kv: Annotated[bool, typer.Option("--kv")] = False
    is_pipeline: Annotated[bool, typer.Option("--pipeline")] = False
    per_head: Annotated[bool, typer.Option("--per-head")] = False
    scale_save_path: Path | None = None
    dtype: str = "auto"
    device: str | None = None
    is_resumed: Annotated[bool, typer.Option("--resume/--fresh")] = True
    num_prompts: Annotated[int, typer.Option(min=1)] = 100

    def check_path(self, settings: CalibrationSettings) -> Path:
        """The scale file to write; an error if it cannot be, before anything has run."""
        from octavo.calibration.autosave import check_scale_paths

        path, flag = self.scale_save_path, "--scale-save-path"
        if path is None:
            raise typer.BadParameter(f"expected {flag}, got none", param_hint=flag)
        check_scale_paths(is_fp8=True, save_path=path, margin=settings.margin)
        return path


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
    plot: Written = None

    def open(
        self, run: RunOptions, prompts: PromptSettings | None
    ) -> "tuple[Subject[Any], PromptData[Any]]":
        """A vision tower and the images that it sees; with prompts, a language model and texts."""
        from octavo.calibration.data import open_images, open_texts
        from octavo.integrations.transformers.calibrate import load_image_model
        from octavo.integrations.transformers.text_model import load_text_model

        where: dict[str, Any] = {"split": self.split, "subset": self.subset}
        if prompts is not None:
            texts = open_texts(str(self.data), **where)
            model = load_text_model(run.model, dtype=run.dtype, device=run.device, prompts=prompts)
            return model.subject(), model.cut_windows(texts, self.max_length)
        if self.max_length is not None:
            raise ConfigError("expected --kv with --max-length, got images, which have no windows")
        need("octavo calibrate", "transformers", "PIL")
        images = open_images(str(self.data), **where)
        return load_image_model(run.model, dtype=run.dtype, device=run.device).subject(), images


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a diffusion pipeline runs, and which of its layers are looked at; all with --pipeline.

    Attributes:
        prompts_file: With --pipeline: a file with a prompt in each line, or a .jsonl file with a
            field prompt.
        prompts: With --pipeline: a prompt; may be given more than once.
        num_inference_steps: With --pipeline: denoising steps of each prompt; left out, the
            pipeline's own number.
        height: With --pipeline: in pixels.
        width: With --pipeline: in pixels.
        seed: With --pipeline: of the first prompt's noise; the next has the next.
        call_options: With --pipeline: other arguments of the pipeline's call, as JSON:
            {"guidance_scale": 4}.
        is_attention: With --pipeline: scales of attention as well, in the same file.
        is_text_encoder: With --pipeline: scales of the linear layers of text encoders as well.
        ignored_layers: With --pipeline: a pattern of linear layers to leave; may be given more than
            once.
        weight_only_layers: With --pipeline: a pattern of linear layers whose weight alone will be
            quantized, which need no scale; modulation is all of that kind. May be given more than
            once.
        is_sensitivity: With --pipeline: not scales, but the error of the transformer's result when
            one layer alone is FP8, and from that which layers to ignore.
        by: With --sensitivity: what is quantized at a time: a layer, the layers of one kind in all
            blocks, or those of one block.
        is_all: With --sensitivity: also the layers that the model's defaults leave in BF16.
        num_timesteps: With --sensitivity: at how many of the steps, spread evenly.
        output: With --pipeline: append the records to this JSON Lines file.
    """

    prompts_file: Annotated[Path | None, typer.Option("--prompts")] = None
    prompts: Annotated[tuple[str, ...], typer.Option("--prompt")] = ()
    num_inference_steps: Annotated[int | None, typer.Option(min=1)] = None
    height: Annotated[int | None, typer.Option(min=1)] = None
    width: Annotated[int | None, typer.Option(min=1)] = None
    seed: int = 0
    call_options: str | None = None
    is_attention: Annotated[bool, typer.Option("--attention")] = False
    is_text_encoder: Annotated[bool, typer.Option("--text-encoder")] = False
    ignored_layers: tuple[str, ...] = ()
    weight_only_layers: tuple[str, ...] = ()
    is_sensitivity: Annotated[bool, typer.Option("--sensitivity")] = False
    by: Annotated[Literal["layer", "group", "block"], typer.Option("--sensitivity-by")] = "layer"
    is_all: Annotated[bool, typer.Option("--all")] = False
    num_timesteps: Annotated[int, typer.Option(min=1)] = 4
    output: Annotated[Path | None, typer.Option("--output", "-o", callback=check_file)] = None

    def read_prompts(self, num_prompts: int) -> list[str]:
        """The prompts, from the command line and the file."""
        from octavo.calibration.data import read_prompts

        found = list(self.prompts)
        if self.prompts_file is not None:
            found += read_prompts(self.prompts_file)
        if not found:
            raise ConfigError("expected --prompt or --prompts with --pipeline, got neither")
        return found[:num_prompts]

    def run(self) -> "Run":
        """How the pipeline runs."""
        from octavo.integrations.diffusers.call import Run

        sizes = {"height": self.height, "width": self.width}
        given = {name: size for name, size in sizes.items() if size is not None}
        options = read_object("--call-options", self.call_options) or {}
        return Run(
            num_inference_steps=self.num_inference_steps,
            seed=self.seed,
            call_options={**options, **given},
        )

    def recipe(self) -> "Recipe":
        """What is to be quantized."""
        from octavo.recipe import Recipe

        return Recipe(
            linear="fp8",
            attention="fp8" if self.is_attention else None,
            text_encoder="fp8" if self.is_text_encoder else None,
            ignored_layers=self.ignored_layers,
            weight_only_layers=self.weight_only_layers,
        )


@takes_settings
def calibrate(
    *,
    context: typer.Context,
    source: DataOptions,
    settings: Annotated[
        CalibrationSettings,
        Flags(
            names={"rotate_keys": "--rotate-keys", "center_keys": "--center-keys"},
            without=("granularity",),
        ),
    ],
    texts: PromptSettings,
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
    denoising step of every prompt, since ranges move on the way from noise to an image. Use the
    file by Recipe(linear={"scaling": "static"}, scales=…). --sensitivity finds no scales, but which
    layers matter: the inputs of the transformer are kept at some steps, and run again with one
    layer in FP8 at a time.

    An interrupted run leaves SCALE_SAVE_PATH.partial behind, and the same command goes on from it,
    in whichever pass it was; with --pipeline after the last whole prompt.
    """
    is_pipeline, is_scan, is_kv = run.is_pipeline, pipeline.is_sensitivity, run.is_kv
    of_scan = {"by", "is_all", "num_timesteps"}
    of_language = {"rotate_keys", "center_keys"} | field_names(PromptSettings)
    of_attention = {"is_kv"} | of_language | field_names(DataOptions)
    of_scales = {"observer", "percentile", "margin", "per_head", "is_resumed", "scale_save_path"}
    of_scales |= {"is_attention", "is_text_encoder"}
    not_percentile = f"expected --observer percentile with {{}}, got {settings.observer}"
    refuse_flags(
        context,
        (settings.observer != "percentile", {"percentile"}, not_percentile),
        (not is_pipeline, field_names(PipelineOptions), "expected --pipeline with {}, got none"),
        (is_pipeline, of_attention, "expected --prompt or --prompts with --pipeline, got {}"),
        (not is_scan, of_scan, "expected --sensitivity with {}, got none"),
        (is_scan, of_scales, "expected --sensitivity without {}: it finds no scales"),
        (not is_kv, of_language, "expected --kv with {}, got images"),
    )
    settings = replace(settings, granularity="head" if run.per_head else "tensor")
    command = repeat_command(context, without=("is_resumed", "plot"))
    if not is_pipeline:
        calibrate_attention(run, source, settings, command, texts if is_kv else None)
    elif is_scan:
        scan_layers(run, pipeline, command)
    else:
        calibrate_pipeline(run, pipeline, settings, command)


def calibrate_attention(
    run: RunOptions,
    source: DataOptions,
    settings: CalibrationSettings,
    command: str,
    prompts: PromptSettings | None,
) -> None:
    """Find the scales of attention, print what was seen, write the file; prompts: of texts."""
    from octavo.calibration.run import calibrate_to_file
    from octavo.measure.evaluate.calibration import calibration_records
    from octavo.measure.report.layers import CALIBRATION, calibration_table

    if source.data is None:
        raise typer.BadParameter("expected --data, got none", param_hint="--data")
    path = run.check_path(settings)
    subject, data = source.open(run, prompts)
    num_passes = 2 if settings.center_keys else 1
    num_prompts = min(run.num_prompts, data.num_prompts or run.num_prompts)
    with progress_bar("calibrating", num_passes * num_prompts) as move:
        result = calibrate_to_file(
            subject,
            data,
            path,
            settings,
            num_prompts=run.num_prompts,
            batch_size=source.batch_size,
            is_resumed=run.is_resumed,
            on_prompts=lambda seen: move(done=seen),
        )
        move(done=num_passes * result.num_prompts, total=num_passes * result.num_prompts)
    records = calibration_records(result, command)
    print_table(calibration_table(records))
    num_layers = len(result.scales.layers)
    _print_saved(f"{num_layers} layers, {result.num_prompts} prompts", settings, path)
    if source.plot is not None:
        write_plots(source.plot, CALIBRATION.make(records), records, "octavo calibrate")


def calibrate_pipeline(
    run: RunOptions, options: PipelineOptions, settings: CalibrationSettings, command: str
) -> None:
    """Find the scales of a pipeline's layers, print what was seen, write the scale file."""
    from octavo.integrations.diffusers.calibrate import observe_pipeline
    from octavo.measure.evaluate.calibration import pipeline_records
    from octavo.measure.report.layers import pipeline_table

    # All that can be wrong about the request, before the model is loaded.
    path = run.check_path(settings)
    collected = Collected(options.output)
    prompts, steps = options.read_prompts(run.num_prompts), options.run()
    pipe = _load(run)
    num_steps = steps.num_steps(pipe)
    with progress_bar("calibrating", len(prompts) * num_steps) as move:
        result = observe_pipeline(
            pipe,
            prompts,
            steps,
            settings,
            options.recipe(),
            save_path=path,
            is_resumed=run.is_resumed,
            name=run.model or "small-image",
            on_step=lambda done: move(done=done),
        )
    collected.keep(pipeline_records(result, command, pipe.device))
    print_table(pipeline_table(collected.records))
    scales = result.scales
    what = f"{len(scales.inputs)} linear layers"
    what += f" and {len(scales.layers)} of attention" if scales.layers else ""
    _print_saved(f"{what}, {result.num_prompts} prompts of {num_steps} steps", settings, path)


def scan_layers(run: RunOptions, options: PipelineOptions, command: str) -> None:
    """Print which layers matter and which to ignore; write records if asked."""
    from octavo.integrations.diffusers.sensitivity import Scan
    from octavo.measure.evaluate.calibration import sensitivity_records
    from octavo.measure.report.layers import sensitivity_table

    collected = Collected(options.output)
    prompts, steps = options.read_prompts(run.num_prompts), options.run()
    pipe = _load(run)
    num_steps = steps.num_steps(pipe)
    patterns = (options.ignored_layers, options.weight_only_layers)
    scan = Scan(pipe, "fp8", *patterns, is_all=options.is_all)
    with progress_bar("running as it is", len(prompts) * num_steps) as move:
        scan.record(prompts, steps, options.num_timesteps, on_step=lambda done: move(done=done))
    with progress_bar("one by one", len(scan.units(options.by))) as move:
        found = scan.result(options.by, on_row=lambda done: move(done=done))
        proposed = found.propose()
        rest = scan.error(proposed) if proposed else found.error
    about: dict[str, str | int] = {
        "model": run.model or "small-image",
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "by": options.by,
        "num_prompts": len(prompts),
        "num_inference_steps": num_steps,
        "num_timesteps": min(options.num_timesteps, num_steps),
    }
    collected.keep(
        sensitivity_records(found, proposed, rest, command, about=about, device=pipe.device)
    )
    print_table(sensitivity_table(collected.records, NUM_SHOWN))
    for reason in dict.fromkeys(found.left.values()):
        left = [name for name, why in found.left.items() if why == reason]
        out.print(f"Not tried ({reason}): {list_names(left)}", soft_wrap=True)
    out.print(f"All layers in FP8 that are not kept: {found.error:.2%}", soft_wrap=True)
    words = " ".join(f"--ignored-layers {shlex.quote(pattern)}" for pattern in proposed)
    proposal = f"Proposed, which leaves {rest:.2%}: {words}"
    none = "No layer stands out: nothing to ignore."
    out.print(proposal if proposed else none, soft_wrap=True)


def _print_saved(what: str, settings: CalibrationSettings, path: Path) -> None:
    out.print(f"{what}, observer {settings}, margin {settings.margin:g}: {path}", soft_wrap=True)


def _load(run: RunOptions) -> Any:
    from octavo.integrations.diffusers.load import load_pipeline
    from octavo.integrations.transformers.load import torch_dtype

    pipe = load_pipeline(run.model, torch_dtype(run.dtype), run.device)
    pipe.set_progress_bar_config(disable=True)
    return pipe
