"""octavo calibrate --pipeline: static scales of a diffusion pipeline, or which layers matter."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.brief import list_names
from octavo.calibration.settings import CalibrationSettings
from octavo.cli.console import err, out
from octavo.cli.options import check_folder, given_flags, read_object
from octavo.cli.tables import print_table
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.integrations.diffusers.steps import Run
    from octavo.recipe import Recipe

NUM_SHOWN = 40  # rows of sensitivity; all are in the records


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Which model is calibrated, and where its scales go.

    Attributes:
        scale_save_path: The scale file to write (JSON).
        dtype: The model runs in this: the checkpoint's own, or such as bfloat16.
        device: The GPU if there is one, else the CPU.
        is_resumed: Go on where an interrupted run stopped, or forget what it saw.
        num_prompts: How many of the data's prompts to use; with --kv, windows of text or chats.
    """

    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's folder, or its name on the hub; left out, the small chart reader, "
            "with --kv SmolLM2-135M-Instruct, with --pipeline the small image model.",
            show_default=False,
        ),
    ] = None
    scale_save_path: Path | None = None
    dtype: str = "auto"
    device: str | None = None
    is_resumed: Annotated[bool, typer.Option("--resume/--fresh")] = True
    num_prompts: Annotated[int, typer.Option(min=1)] = 100


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
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None

    def read_prompts(self, num_prompts: int) -> list[str]:
        """The prompts, from the command line and the file."""
        from octavo.calibration.text_data import read_prompts

        found = list(self.prompts)
        if self.prompts_file is not None:
            found += read_prompts(self.prompts_file)
        if not found:
            raise ConfigError("expected --prompt or --prompts with --pipeline, got neither")
        return found[:num_prompts]

    def run(self) -> "Run":
        """How the pipeline runs."""
        from octavo.integrations.diffusers.steps import Run

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


def bar() -> Progress:
    """A bar with how many are done, and how long it will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=err)


def check_pipeline(context: typer.Context, run: RunOptions, options: PipelineOptions) -> None:
    """Raise for flags that have no meaning with, or without, --sensitivity."""
    if not options.is_sensitivity:
        if given := given_flags(context, ("by", "is_all", "num_timesteps")):
            raise ConfigError(f"expected --sensitivity with {', '.join(given)}, got none")
        return
    of_scales = ("observer", "percentile", "margin", "per_head")
    if given_flags(context, of_scales) or not run.is_resumed:
        names = "--observer, --percentile, --margin, --per-head or --fresh"
        raise ConfigError(f"expected --sensitivity without {names}: it finds no scales")
    if given := given_flags(context, ("scale_save_path", "is_attention", "is_text_encoder")):
        raise ConfigError(f"expected --sensitivity without {', '.join(given)}: it finds no scales")


def scan_layers(run: RunOptions, options: PipelineOptions, command: str) -> None:
    """Print which layers matter and which to ignore; write records if asked."""
    from octavo.integrations.diffusers.sensitivity import Scan
    from octavo.measure.evaluate.calibration import sensitivity_records
    from octavo.measure.report.layers import sensitivity_table
    from octavo.measure.store import append

    check_folder(options.output)
    prompts, steps = options.read_prompts(run.num_prompts), options.run()
    pipe = _load(run)
    patterns = (options.ignored_layers, options.weight_only_layers)
    scan = Scan(pipe, "fp8", *patterns, is_all=options.is_all)
    with bar() as progress:
        total = len(prompts) * steps.num_steps(pipe)
        first = progress.add_task("running as it is", total=total)
        second = progress.add_task("one by one", total=len(scan.units(options.by)))
        scan.record(
            *(prompts, steps, options.num_timesteps),
            on_step=lambda done: progress.update(first, completed=done),
        )
        found = scan.result(options.by, on_row=lambda done: progress.update(second, completed=done))
        proposed = found.propose()
        rest = scan.error(proposed) if proposed else found.error
    about: dict[str, str | int] = {
        "model": run.model or "small-image",
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "by": options.by,
        "num_prompts": len(prompts),
        "num_inference_steps": steps.num_steps(pipe),
        "num_timesteps": min(options.num_timesteps, steps.num_steps(pipe)),
    }
    records = sensitivity_records(found, proposed, rest, command, about=about, device=pipe.device)
    if options.output is not None:
        append(options.output, records)
    print_table(sensitivity_table(records, NUM_SHOWN))
    for reason in dict.fromkeys(found.left.values()):
        left = [name for name, why in found.left.items() if why == reason]
        out.print(f"Not tried ({reason}): {list_names(left)}", soft_wrap=True)
    out.print(f"All layers in FP8 that are not kept: {found.error:.2%}", soft_wrap=True)
    if not proposed:
        out.print("No layer stands out: nothing to ignore.")
        return
    words = " ".join(f"--ignored-layers {shlex.quote(pattern)}" for pattern in proposed)
    out.print(f"Proposed, which leaves {rest:.2%}: {words}", soft_wrap=True)


def calibrate_scales(
    run: RunOptions, options: PipelineOptions, settings: CalibrationSettings, command: str
) -> None:
    """Find the scales, print what was seen, write the scale file."""
    from octavo.calibration.autosave import check_scale_paths
    from octavo.integrations.diffusers.calibrate import observe_pipeline
    from octavo.measure.evaluate.calibration import pipeline_records
    from octavo.measure.report.layers import pipeline_table
    from octavo.measure.store import append

    # All that can be wrong about the request, before the model is loaded.
    if run.scale_save_path is None:
        raise typer.BadParameter("expected the scale file to write", param_hint="--scale-save-path")
    check_scale_paths(is_fp8=True, save_path=run.scale_save_path, margin=settings.margin)
    check_folder(options.output)
    prompts, steps = options.read_prompts(run.num_prompts), options.run()
    pipe = _load(run)
    with bar() as progress:
        task = progress.add_task("calibrating", total=len(prompts) * steps.num_steps(pipe))
        result = observe_pipeline(
            *(pipe, prompts, steps, settings, options.recipe()),
            save_path=run.scale_save_path,
            is_resumed=run.is_resumed,
            name=run.model or "small-image",
            on_step=lambda done: progress.update(task, completed=done),
        )
    records = pipeline_records(result, command, pipe.device)
    print_table(pipeline_table(records))
    if options.output is not None:
        append(options.output, records)
    scales = result.scales
    what = f"{len(scales.inputs)} linear layers"
    what += f" and {len(scales.layers)} of attention" if scales.layers else ""
    seen = f"{result.num_prompts} prompts of {steps.num_steps(pipe)} steps"
    found = f"{what}, {seen}, observer {settings}, margin {settings.margin:g}"
    out.print(f"{found}: {run.scale_save_path}", soft_wrap=True)


def _load(run: RunOptions) -> Any:
    from octavo.integrations.diffusers.load import load_pipeline
    from octavo.integrations.transformers.load import torch_dtype

    pipe = load_pipeline(run.model, torch_dtype(run.dtype), run.device)
    pipe.set_progress_bar_config(disable=True)
    return pipe
