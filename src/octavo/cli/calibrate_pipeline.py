"""octavo calibrate --pipeline: static scales of a diffusion pipeline, or which layers matter."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.brief import list_names
from octavo.cli.calibrate_pipeline_flags import By
from octavo.cli.console import err, out
from octavo.cli.options import check_folder
from octavo.cli.tables import print_table
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.calibration.observers import CalibrationSettings
    from octavo.integrations.diffusers.steps import Run
    from octavo.recipe import Recipe

NUM_SHOWN = 40  # rows of sensitivity; all are in the records

# Fields of a request that other calibrations do not have, as the command line says them.
OWN_OPTIONS = {
    "prompts_file": "--prompts",
    "prompts": "--prompt",
    "num_inference_steps": "--num-inference-steps",
    "height": "--height",
    "width": "--width",
    "seed": "--seed",
    "call_options": "--call-options",
    "is_attention": "--attention",
    "is_text_encoder": "--text-encoder",
    "ignored_layers": "--ignored-layers",
    "weight_only_layers": "--weight-only-layers",
    "is_sensitivity": "--sensitivity",
    "by": "--sensitivity-by",
    "is_all": "--all",
    "num_timesteps": "--num-timesteps",
    "output": "--output",
}
SHARED_OPTIONS = {
    "num_prompts": "--num-prompts",
    "dtype": "--dtype",
    "device": "--device",
    "scale_save_path": "--scale-save-path",
}


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """What is asked of a pipeline, in the words of the command line."""

    model: str | None = None
    scale_save_path: Path | None = None
    num_prompts: int = 100
    dtype: str = "auto"
    device: str | None = None
    is_resumed: bool = True
    prompts_file: Path | None = None
    prompts: tuple[str, ...] = ()
    num_inference_steps: int | None = None
    height: int | None = None
    width: int | None = None
    seed: int = 0
    call_options: str | None = None
    is_attention: bool = False
    is_text_encoder: bool = False
    ignored_layers: tuple[str, ...] = ()
    weight_only_layers: tuple[str, ...] = ()
    is_sensitivity: bool = False
    by: By = By.layer
    is_all: bool = False
    num_timesteps: int = 4
    output: Path | None = None

    @property
    def name(self) -> str:
        """The model's name, in files."""
        return self.model or "small-image"

    def given(self, options: Mapping[str, str]) -> list[tuple[str, Any]]:
        """Those of the options that are not as they are left out, with their values."""
        defaults = {each.name: each.default for each in fields(self)}
        values = {name: getattr(self, name) for name in options}
        return [(options[n], value) for n, value in values.items() if value != defaults[n]]

    def read_prompts(self) -> list[str]:
        """The prompts, from the command line and the file."""
        from octavo.calibration.prompt_file import read_prompts

        found = list(self.prompts)
        if self.prompts_file is not None:
            found += read_prompts(self.prompts_file)
        if not found:
            raise ConfigError("expected --prompt or --prompts with --pipeline, got neither")
        return found[: self.num_prompts]

    def run(self) -> "Run":
        """How the pipeline runs."""
        from octavo.integrations.diffusers.steps import Run

        sizes = {"height": self.height, "width": self.width}
        given = {name: size for name, size in sizes.items() if size is not None}
        return Run(
            num_inference_steps=self.num_inference_steps,
            seed=self.seed,
            call_options={**self._read_options(), **given},
        )

    def _read_options(self) -> Mapping[str, Any]:
        if self.call_options is None:
            return {}
        try:
            options = json.loads(self.call_options)
        except ValueError as error:
            raise ConfigError(f"--call-options: expected JSON: {error}") from None
        if not isinstance(options, dict):
            raise ConfigError(f"--call-options: expected an object, got {self.call_options}")
        return options

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

    def load(self) -> Any:
        """The pipeline."""
        from octavo.integrations.diffusers.load import load_pipeline
        from octavo.integrations.transformers.load import torch_dtype

        pipe = load_pipeline(self.model, torch_dtype(self.dtype), self.device)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def command(self) -> str:
        """A command line that does the same again."""
        words = ["octavo", "calibrate", *([] if self.model is None else [self.model])]
        words.append("--pipeline")
        for option, value in self.given(OWN_OPTIONS | SHARED_OPTIONS):
            if value is True:
                words.append(option)
                continue
            for one in value if isinstance(value, tuple) else (value,):
                words += [option, str(one)]
        return shlex.join(words)


def bar() -> Progress:
    """A bar with how many are done, and how long it will take."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=err)


def _words(settings: "CalibrationSettings") -> str:
    words = ["--observer", settings.observer, "--margin", f"{settings.margin:g}"]
    if settings.observer == "percentile":
        words += ["--percentile", f"{settings.percentile:g}"]
    return shlex.join([*words, *(["--per-head"] if settings.granularity == "head" else [])])


def calibrate_pipeline(request: PipelineRequest, settings: "CalibrationSettings") -> None:
    """Scales, or with --sensitivity which layers matter."""
    if request.is_sensitivity:
        if settings != type(settings)() or not request.is_resumed:
            options = "--observer, --percentile, --margin, --per-head or --fresh"
            raise ConfigError(f"expected --sensitivity without {options}: it finds no scales")
        scan_layers(request)
        return
    others = {name: OWN_OPTIONS[name] for name in ("by", "is_all", "num_timesteps")}
    if given := [option for option, _ in request.given(others)]:
        raise ConfigError(f"expected --sensitivity with {', '.join(given)}, got none")
    calibrate_scales(request, settings)


def scan_layers(request: PipelineRequest) -> None:
    """Print which layers matter and which to ignore; write records if asked."""
    from octavo.integrations.diffusers.sensitivity import Scan
    from octavo.measure.evaluate.calibration import sensitivity_records
    from octavo.measure.report.sensitivity import sensitivity_table
    from octavo.measure.store import append

    others = ("scale_save_path", "is_attention", "is_text_encoder")
    names = {name: (OWN_OPTIONS | SHARED_OPTIONS)[name] for name in others}
    if given := [option for option, _ in request.given(names)]:
        raise ConfigError(f"expected --sensitivity without {', '.join(given)}: it finds no scales")
    check_folder(request.output)
    prompts, run = request.read_prompts(), request.run()
    pipe = request.load()
    patterns = (request.ignored_layers, request.weight_only_layers)
    scan = Scan(pipe, "fp8", *patterns, is_all=request.is_all)
    with bar() as progress:
        total = len(prompts) * run.num_steps(pipe)
        first = progress.add_task("running as it is", total=total)
        second = progress.add_task("one by one", total=len(scan.units(request.by.value)))
        scan.record(
            *(prompts, run, request.num_timesteps),
            on_step=lambda done: progress.update(first, completed=done),
        )
        found = scan.result(
            request.by.value, on_row=lambda done: progress.update(second, completed=done)
        )
        proposed = found.propose()
        rest = scan.error(proposed) if proposed else found.error
    about: dict[str, str | int] = {
        "model": request.name,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "by": request.by.value,
        "num_prompts": len(prompts),
        "num_inference_steps": run.num_steps(pipe),
        "num_timesteps": min(request.num_timesteps, run.num_steps(pipe)),
    }
    records = sensitivity_records(
        *(found, proposed, rest, request.command()), about=about, device=pipe.device
    )
    if request.output is not None:
        append(request.output, records)
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


def calibrate_scales(request: PipelineRequest, settings: "CalibrationSettings") -> None:
    """Find the scales, print what was seen, write the scale file."""
    from octavo.calibration.autosave import check_scale_paths
    from octavo.integrations.diffusers.calibrate import observe_pipeline
    from octavo.measure.evaluate.calibration import pipeline_records
    from octavo.measure.report.calibration import pipeline_table
    from octavo.measure.store import append

    # All that can be wrong about the request, before the model is loaded.
    if request.scale_save_path is None:
        raise typer.BadParameter("expected the scale file to write", param_hint="--scale-save-path")
    check_scale_paths(is_fp8=True, save_path=request.scale_save_path, margin=settings.margin)
    check_folder(request.output)
    prompts, run, recipe = request.read_prompts(), request.run(), request.recipe()
    pipe = request.load()
    with bar() as progress:
        task = progress.add_task("calibrating", total=len(prompts) * run.num_steps(pipe))
        result = observe_pipeline(
            *(pipe, prompts, run, settings, recipe),
            save_path=request.scale_save_path,
            is_resumed=request.is_resumed,
            name=request.name,
            on_step=lambda done: progress.update(task, completed=done),
        )
    command = f"{request.command()} {_words(settings)}"
    records = pipeline_records(result, command, pipe.device)
    print_table(pipeline_table(records))
    if request.output is not None:
        append(request.output, records)
    scales = result.scales
    what = f"{len(scales.inputs)} linear layers"
    what += f" and {len(scales.layers)} of attention" if scales.layers else ""
    steps = f"{result.num_prompts} prompts of {run.num_steps(pipe)} steps"
    found = f"{what}, {steps}, observer {settings}, margin {settings.margin:g}"
    out.print(f"{found}: {request.scale_save_path}", soft_wrap=True)
