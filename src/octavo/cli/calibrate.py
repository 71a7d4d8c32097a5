"""octavo calibrate: static scales for a model's vision attention, from real images."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.cli.console import err, out
from octavo.cli.tables import print_table
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.calibration.observers import CalibrationSettings
    from octavo.measure.records import Measurement


class ObserverName(StrEnum):
    """The observers, as the command line knows them."""

    amax = "amax"
    percentile = "percentile"
    mse = "mse"


def calibrate(
    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the hub.")],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="A folder of images, a .jsonl or .parquet file with a field image or images, or "
            "a data set's name such as lmarena-ai/VisionArena-Chat.",
        ),
    ],
    scale_save_path: Annotated[
        Path, typer.Option("--scale-save-path", help="The scale file to write (JSON).")
    ],
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
        float, typer.Option("--percentile", help="Of the observer of that name.")
    ] = 99.99,
    per_head: Annotated[
        bool,
        typer.Option("--per-head", help="A scale for each head, not one for all. vLLM reads both."),
    ] = False,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, help="How many of the data's prompts to use.")
    ] = 100,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Prompts that run at once.")
    ] = 1,
    split: Annotated[str, typer.Option("--hf-split", help="Of a data set.")] = "train",
    subset: Annotated[str | None, typer.Option("--hf-subset", help="Of a data set.")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="The model runs in this: the checkpoint's own, or such as bfloat16."
        ),
    ] = "auto",
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
) -> None:
    """Find static FP8 scales for a model's vision attention, from real images.

    The model runs in its own dtype while every attention layer's queries, keys and values are
    counted. Prints amax, headroom and SQNR of each layer and writes the scale file, with vLLM's
    layer names for the Qwen families. Use it by Recipe(vision_attention={"scaling": "static"},
    scales="scales.json"), or vLLM's --mm-encoder-fp8-scale-path.

    An interrupted run leaves SCALE_SAVE_PATH.partial behind, and the same command goes on from it.
    """
    from octavo.calibration.autosave import check_scale_paths
    from octavo.calibration.image_data import open_images
    from octavo.calibration.observers import CalibrationSettings
    from octavo.calibration.run import calibrate_to_file
    from octavo.integrations.transformers.calibrate import load_image_model
    from octavo.measure.evaluate.calibration import calibration_records
    from octavo.measure.report.calibration import calibration_table

    # All that can be wrong about the request, before the model is loaded.
    settings = CalibrationSettings(
        observer=observer.value,
        percentile=percentile,
        granularity="head" if per_head else "tensor",
        margin=margin,
    )
    check_scale_paths(is_fp8=True, save_path=scale_save_path, margin=margin)
    _check_folder(plot)
    images = open_images(data, split=split, subset=subset)
    image_model = load_image_model(model, dtype=dtype, device=device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err) as progress:
        total = min(num_prompts, images.num_prompts or num_prompts)
        task = progress.add_task("calibrating", total=total)
        result = calibrate_to_file(
            image_model.subject(),
            images,
            scale_save_path,
            settings,
            num_prompts=num_prompts,
            batch_size=batch_size,
            is_resumed=is_resumed,
            on_prompts=lambda seen: progress.update(task, completed=seen),
        )
    command = _command(model, data, scale_save_path, settings, num_prompts)
    records = calibration_records(result, command)
    print_table(calibration_table(records))
    saved = f"{len(result.scales.layers)} layers, {result.num_prompts} prompts, observer {settings}"
    out.print(f"{saved}, margin {margin:g}: {scale_save_path}", soft_wrap=True)
    if plot is not None:
        _write_plot(plot, records, command)


def _command(
    model: str, data: str, path: Path, settings: "CalibrationSettings", num_prompts: int
) -> str:
    """A command line that finds these scales again."""
    words = ["octavo", "calibrate", model, "--data", data, "--scale-save-path", str(path)]
    words += ["--observer", settings.observer, "--margin", f"{settings.margin:g}"]
    if settings.observer == "percentile":
        words += ["--percentile", f"{settings.percentile:g}"]
    if settings.granularity == "head":
        words.append("--per-head")
    return shlex.join([*words, "--num-prompts", str(num_prompts)])


def _check_folder(plot: Path | None) -> None:
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigError(f"expected an existing folder for {plot}, got none")


def _write_plot(plot: Path, records: "list[Measurement]", command: str) -> None:
    from octavo.measure.report.calibration import calibration_section
    from octavo.measure.report.html import write_report

    write_report(
        [calibration_section(records)],
        plot,
        title="octavo calibrate",
        machines=[records[0].machine],
        commands=[command],
    )
    out.print(f"Plots: {plot}", soft_wrap=True)
