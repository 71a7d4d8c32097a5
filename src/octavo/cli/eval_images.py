"""octavo eval images: what FP8 does to the pictures of a diffusion model."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import err, out
from octavo.cli.options import RecordsFile, Strict, check_folder
from octavo.cli.tables import print_table
from octavo.extras import need

if TYPE_CHECKING:
    from octavo.measure.evaluate.image_rows import ImageRow
    from octavo.measure.evaluate.images import ImageJob

DEFAULT_ROWS = ("fp8", "fp8+attention")


def images(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A pipeline's folder or name; left out, or small-image: the small image model "
            "that comes with octavo.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="A prompt in each line. The small image model has a list of its own.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="A prompt; may be given more than once."),
    ] = None,
    num_pictures: Annotated[
        int | None,
        typer.Option(
            "--num-pictures",
            "-n",
            min=1,
            help="How many; prompts serve again, with other seeds, once all are used. Left out: a "
            "picture for each prompt.",
            show_default=False,
        ),
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(
            "--row",
            help="WORD[+WORD]…, such as bf16, fp8, fp8+attention, fp8+block, static=scales.json, "
            "fp8+ignore=img_mlp; may be given more than once. The others are compared with the "
            "first: bf16, or fp16 or fp32 with that --dtype. Words: see docs/reference/rows.md.",
            show_default=False,
        ),
    ] = None,
    num_inference_steps: Annotated[
        int | None,
        typer.Option("--num-inference-steps", min=1, help="Left out: the pipeline's own default."),
    ] = None,
    height: Annotated[int | None, typer.Option("--height", min=1, help="In pixels.")] = None,
    width: Annotated[int | None, typer.Option("--width", min=1, help="In pixels.")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option("--guidance-scale", help="Left out: the pipeline's own.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of the first picture's noise.")
    ] = 0,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Left out: the GPU if there is one.", show_default=False),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="The pipeline is loaded in.")] = "bfloat16",
    lpips: Annotated[
        bool | None,
        typer.Option("--lpips/--no-lpips", help="Left out: LPIPS if its package is installed."),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option("--clip", help="A CLIP model's folder or name, for the CLIP score."),
    ] = None,
    min_psnr: Annotated[
        float | None,
        typer.Option(
            "--min-psnr",
            help="Exit with 1 if the mean PSNR of a row is below this many dB.",
            show_default=False,
        ),
    ] = None,
    save_pictures: Annotated[
        Path | None,
        typer.Option(
            "--save-pictures",
            help="Write all pictures to this folder, a sheet with rows and prompts, and for each "
            "row a JPEG beside the first row, which its record names for octavo report.",
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    strict: Strict = False,
    output: RecordsFile = None,
) -> None:
    """Draw the same pictures in BF16 and in FP8, and compare them.

    Every row draws each prompt by the same noise. Its pictures are compared with those of the first
    row: PSNR, SSIM, LPIPS where its package is installed, and with --clip how well each fits its
    prompt. A record of each row is written as soon as it is done.
    """
    need("octavo eval images", "diffusers")
    from octavo.measure.evaluate import images as task
    from octavo.measure.evaluate.image_rows import parse_rows, plain_row

    check_folder(output)
    rows = parse_rows(row or [plain_row(dtype), *DEFAULT_ROWS], dtype)
    options = {"height": height, "width": width, "guidance_scale": guidance_scale}
    job = task.ImageJob(
        model=model or "small-image",
        dtype=dtype,
        prompts=_prompts(model, prompts, prompt or [], num_pictures),
        num_inference_steps=num_inference_steps,
        seed=seed,
        options={name: x for name, x in options.items() if x is not None},
    )
    command = _command(job, model, prompts, prompt or [], num_pictures, rows, clip)
    records = _run(job, model, rows, device, lpips, clip, output, save_pictures, command)
    print_table(task.images_table(records))
    _print_notes(records, lpips, clip)
    if output is not None:
        out.print(f"Records: {output}", soft_wrap=True)
    failures = task.rows_below(records, min_psnr) if min_psnr is not None else []
    for sentence in failures:
        err.print(sentence, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def _prompts(
    model: str | None, path: Path | None, given: list[str], num_pictures: int | None
) -> tuple[str, ...]:
    from octavo.errors import ConfigError
    from octavo.measure.evaluate import images as task

    if path is not None and given:
        raise ConfigError("expected --prompts FILE or --prompt TEXT, got both")
    if path is None and not given and not task.is_small_image(model):
        raise ConfigError(f"expected prompts for {model}, got none: --prompts FILE")
    return task.choose_prompts(given or task.read_prompts(path), num_pictures)


def _run(
    job: "ImageJob",
    model: str | None,
    rows: "list[ImageRow]",
    device: str | None,
    lpips: bool | None,
    clip: str | None,
    output: Path | None,
    save_pictures: Path | None,
    command: str,
) -> list[Any]:
    """Draw all rows with a bar of progress, keeping records and pictures."""
    from rich.progress import Progress

    from octavo.integrations.diffusers.load import load_pipeline
    from octavo.measure import store
    from octavo.measure.evaluate import images as task
    from octavo.measure.evaluate.contact_sheet import save_pictures as save
    from octavo.measure.evaluate.kept_pictures import keep_compared

    scorer = None
    if clip is not None:
        from octavo.integrations.transformers.clip_score import load_clip_scorer

        scorer = load_clip_scorer(clip)
    if save_pictures is not None:  # before anything is drawn for it
        save_pictures.mkdir(parents=True, exist_ok=True)
    drawn: list[tuple[str, Any]] = []

    def keep(record: Any, pictures: Any) -> None:
        drawn.append((str(record.case["row"]), pictures))
        if output is not None:
            store.append(output, [record])

    try:
        with Progress(console=err) as progress:
            bar = progress.add_task("loading", total=len(rows) * len(job.prompts))
            return task.evaluate(
                lambda: load_pipeline(model, task.torch_dtype(job.dtype), device),
                rows,
                job,
                command=command,
                lpips=lpips,
                scorer=scorer,
                keep=keep_compared(save_pictures, job.prompts, output),
                on_picture=lambda name: progress.update(bar, advance=1, description=name),
                on_row=keep,
            )
    finally:
        if save_pictures is not None and drawn:  # those of the rows before one that fails, too
            sheet = save(save_pictures, job.prompts, drawn)
            out.print(f"Pictures: {sheet}", soft_wrap=True)


def _print_notes(records: list[Any], lpips: bool | None, clip: str | None) -> None:
    """Say which scores were not taken, and why."""
    from octavo.measure.evaluate.image_scores import why_no_lpips

    if not any("lpips" in record.values for record in records):
        case = records[0].case
        out.print(why_no_lpips(lpips, min(case["height"], case["width"])), soft_wrap=True)
    if clip is None:
        out.print("The CLIP score is left out: --clip FOLDER names a CLIP model", soft_wrap=True)


def _command(
    job: "ImageJob",
    model: str | None,
    path: Path | None,
    given: list[str],
    num_pictures: int | None,
    rows: "list[ImageRow]",
    clip: str | None,
) -> str:
    """The command line that repeats this run."""
    parts = ["octavo", "eval", "images", *([model] if model else [])]
    parts += ["--prompts", str(path)] if path else []
    parts += [part for text in given for part in ("--prompt", text)]
    parts += ["--num-pictures", str(num_pictures)] if num_pictures else []
    parts += [part for row in rows for part in ("--row", row.name)]
    if job.num_inference_steps is not None:
        parts += ["--num-inference-steps", str(job.num_inference_steps)]
    for name, value in job.options.items():
        parts += [f"--{name.replace('_', '-')}", str(value)]
    parts += ["--seed", str(job.seed), "--dtype", job.dtype]
    return shlex.join([*parts, *(["--clip", clip] if clip else [])])
