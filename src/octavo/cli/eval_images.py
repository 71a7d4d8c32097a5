"""octavo eval images: what FP8 does to the images of a diffusion model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import err, out
from octavo.cli.options import RecordsFile, Strict, check_folder, takes_settings
from octavo.cli.records import print_file
from octavo.cli.tables import print_table
from octavo.errors import ConfigError
from octavo.extras import need

if TYPE_CHECKING:
    from octavo.measure.evaluate.images import ImageJob
    from octavo.measure.records import Measurement
    from octavo.measure.rows import Row

DEFAULT_ROWS = ("fp8", "fp8+attention")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """What is drawn, and by which rows.

    Attributes:
        prompts: A prompt in each line. The small image model has a list of its own.
        prompt: A prompt; may be given more than once.
        num_images: How many; prompts serve again, with other seeds, once all are used. Left out: an
            image for each prompt.
        row: WORD[+WORD]…, such as bf16, fp8, fp8+attention, fp8+block, static=scales.json,
            fp8+ignore=img_mlp; may be given more than once. The others are compared with the first:
            bf16, or fp16 or fp32 with that --dtype. Words: see docs/evaluation.md.
        num_inference_steps: Left out: the pipeline's own default.
        height: In pixels.
        width: In pixels.
        guidance_scale: Left out: the pipeline's own.
        seed: Of the first image's noise.
        device: Left out: the GPU if there is one.
        dtype: The pipeline is loaded in.
    """

    prompts: Annotated[Path | None, typer.Option(exists=True, dir_okay=False)] = None
    prompt: tuple[str, ...] = ()
    num_images: Annotated[int | None, typer.Option("--num-pictures", "-n", min=1)] = None
    row: tuple[str, ...] = ()
    num_inference_steps: Annotated[int | None, typer.Option(min=1)] = None
    height: Annotated[int | None, typer.Option(min=1)] = None
    width: Annotated[int | None, typer.Option(min=1)] = None
    guidance_scale: float | None = None
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0
    device: str | None = None
    dtype: str = "bfloat16"

    def job(self, model: str | None) -> "ImageJob":
        """What every row draws."""
        from octavo.measure.evaluate import images as task

        if self.prompts is not None and self.prompt:
            raise ConfigError("expected --prompts FILE or --prompt TEXT, got both")
        if self.prompts is None and not self.prompt and not task.is_small_image(model):
            raise ConfigError(f"expected prompts for {model}, got none: --prompts FILE")
        options = ("height", "width", "guidance_scale")
        return task.ImageJob(
            model=model or "small-image",
            dtype=self.dtype,
            prompts=task.choose_prompts(
                self.prompt or task.read_prompts(self.prompts), self.num_images
            ),
            num_inference_steps=self.num_inference_steps,
            seed=self.seed,
            options={x: getattr(self, x) for x in options if getattr(self, x) is not None},
        )

    def flags(self, rows: "list[Row]") -> dict[str, Any]:
        """Flags that repeat this, for a command line."""
        return {
            "--prompts": self.prompts,
            "--prompt": self.prompt,
            "--num-pictures": self.num_images,
            "--row": [row.name for row in rows],
            "--num-inference-steps": self.num_inference_steps,
            "--height": self.height,
            "--width": self.width,
            "--guidance-scale": self.guidance_scale,
            "--seed": self.seed,
            "--dtype": self.dtype,
        }


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """How images are compared and kept.

    Attributes:
        lpips: Left out: LPIPS if its package is installed.
        clip: A CLIP model's folder or name, for the CLIP score.
        min_psnr: Exit with 1 if the mean PSNR of a row is below this many dB.
        save_images: Write all images to this folder, a sheet with rows and prompts, and for each
            row a JPEG beside the first row, which its record names for octavo report.
    """

    lpips: Annotated[bool | None, typer.Option("--lpips/--no-lpips")] = None
    clip: str | None = None
    min_psnr: float | None = None
    save_images: Annotated[Path | None, typer.Option("--save-pictures", file_okay=False)] = None


@takes_settings
def images(
    asked: ImageOptions,
    scores: ScoreOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A pipeline's folder or name; left out, or small-image: the small image model "
            "that comes with octavo.",
            show_default=False,
        ),
    ] = None,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Draw the same images in BF16 and in FP8, and compare them.

    Every row draws each prompt by the same noise. Its images are compared with those of the first
    row: PSNR, SSIM, LPIPS where its package is installed, and with --clip how well each fits its
    prompt. A record of each row is written as soon as it is done.
    """
    need("octavo eval images", "diffusers")
    from octavo.measure.evaluate import images as task
    from octavo.measure.rows import plain_row

    check_folder(output)
    names = asked.row or (plain_row(asked.dtype), *DEFAULT_ROWS)
    rows = task.parse_image_rows(names, asked.dtype)
    records = _run(asked, scores, model, rows, output)
    print_table(task.images_table(records))
    _print_notes(records, scores)
    print_file(output)
    failures = [] if scores.min_psnr is None else task.rows_below(records, scores.min_psnr)
    for sentence in failures:
        err.print(sentence, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def _run(
    asked: ImageOptions,
    scores: ScoreOptions,
    model: str | None,
    rows: "list[Row]",
    output: Path | None,
) -> "list[Measurement]":
    """Draw all rows with a bar of progress, keeping records and images."""
    from rich.progress import Progress

    from octavo.integrations.diffusers.load import load_pipeline
    from octavo.measure import store
    from octavo.measure.evaluate import images as task
    from octavo.measure.evaluate.image_scores import keep_compared, save_images
    from octavo.measure.run import command_line

    job, folder, scorer = asked.job(model), scores.save_images, None
    if scores.clip is not None:
        from octavo.integrations.transformers.clip_score import load_clip_scorer

        scorer = load_clip_scorer(scores.clip)
    if folder is not None:  # before anything is drawn for it
        folder.mkdir(parents=True, exist_ok=True)
    drawn: list[tuple[str, Any]] = []
    flags = {**asked.flags(rows), "--clip": scores.clip}

    def keep(record: "Measurement", images: Any) -> None:
        drawn.append((str(record.case["row"]), images))
        if output is not None:
            store.append(output, [record])

    try:
        with Progress(console=err) as progress:
            bar = progress.add_task("loading", total=len(rows) * len(job.prompts))
            return task.evaluate(
                lambda: load_pipeline(model, task.torch_dtype(job.dtype), asked.device),
                rows,
                job,
                command=command_line("octavo", "eval", "images", model, flags=flags),
                lpips=scores.lpips,
                scorer=scorer,
                keep=keep_compared(folder, job.prompts, output),
                on_image=lambda name: progress.update(bar, advance=1, description=name),
                on_row=keep,
            )
    finally:
        if folder is not None and drawn:  # those of the rows before one that fails, too
            sheet = save_images(folder, job.prompts, drawn)
            out.print(f"Pictures: {sheet}", soft_wrap=True)


def _print_notes(records: "list[Measurement]", scores: ScoreOptions) -> None:
    """Say which scores were not taken, and why."""
    from octavo.measure.evaluate.image_scores import why_no_lpips

    if not any("lpips" in record.values for record in records):
        case = records[0].case
        side = min(int(case["height"]), int(case["width"]))
        out.print(why_no_lpips(scores.lpips, side), soft_wrap=True)
    if scores.clip is None:
        out.print("The CLIP score is left out: --clip FOLDER names a CLIP model", soft_wrap=True)
