"""What FP8 does to images: each row's against the first row's, of the same prompts and seeds."""

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.integrations.apply import apply_
from octavo.integrations.changes import Changes
from octavo.integrations.embedded_models import ASSETS, SMALL_IMAGE_MODEL
from octavo.measure.bench.timing import machine_of
from octavo.measure.evaluate.image_requests import ImageRequest
from octavo.measure.evaluate.image_scores import (
    DrawnRow,
    compare_images,
    save_row,
    why_no_lpips,
)
from octavo.measure.records import Machine, Measurement, Scalar
from octavo.measure.report.tables import Table, filled_table
from octavo.measure.rows import IMAGES, PLAIN, Row, parse_rows, plain_row
from octavo.measure.run import Outcome, Participant, Records, Watch, run_whole

if TYPE_CHECKING:
    from octavo.integrations.transformers.clip_score import ClipScorer

DEFAULT_PROMPTS = ASSETS / "small_image_prompts.txt"
DEFAULT_ROWS = ("fp8", "fp8+attention")  # after the first
RESULTS = ("images", "frames", "video")  # what pipelines call what they have made


@dataclass(frozen=True, kw_only=True)
class ImageJob:
    """What every row draws: an image for each prompt, the i-th by the noise of seed + i.

    num_inference_steps: None is the pipeline's own. options: further arguments of its call.
    """

    model: str
    dtype: str
    prompts: tuple[str, ...]
    num_inference_steps: int | None = None
    seed: int = 0
    options: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("expected a prompt to draw, got none")

    @property
    def about(self) -> dict[str, Scalar]:
        """What all records say of it, with the beginning of the hash of the prompts."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "num_pictures": len(self.prompts),
            "seed": self.seed,
            "prompts_sha256": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16],
            **self.options,
        }

    def num_steps(self, pipe: Any) -> int:
        """The steps that are asked for, or else those of the pipeline's own default."""
        from octavo.integrations.diffusers.call import Run

        return Run(num_inference_steps=self.num_inference_steps).num_steps(pipe)


def parse_image_rows(names: Sequence[str], dtype: str) -> list[Row]:
    """The rows of these names; a first row that quantizes, or in another dtype, is an error.

    dtype: of the pipeline, such as "bfloat16".
    """
    if len(names) < 2 or len(set(names)) != len(names):
        raise ConfigError(f"expected two different rows or more, got {list(names)}")
    rows = parse_rows(names, IMAGES)
    if not rows[0].is_plain:
        raise ConfigError(
            f"expected a first row to compare with, {', '.join(PLAIN)}, got {names[0]!r}"
        )
    for row in rows:
        row.recipe()  # what is still missing, such as scales, is an error before anything is drawn
        if (PLAIN.get(row.name) or dtype) != dtype:
            raise ConfigError(f"expected rows in {dtype}, as the pipeline is, got {row.name!r}")
    return rows


def evaluate(
    make_pipeline: Callable[[], Any],
    rows: Sequence[Row],
    job: ImageJob,
    *,
    command: str,
    lpips: bool | None = None,
    scorer: "ClipScorer | None" = None,
    on_image: Callable[[str], None] = lambda row: None,
    on_row: Callable[[Sequence[DrawnRow]], Mapping[str, Scalar]] = lambda rows: {},
    records: Records | None = None,
) -> list[Measurement]:
    """One record for each row: how near its images are to the first row's.

    make_pipeline: makes a pipeline as it is loaded, for every row: linear layers in FP8 cannot be
    restored. lpips: as in `compare_images`. scorer: tells how well images fit their prompts.
    on_image: is told a row's name after each image. on_row: is given all rows so far after each
    row, and tells what its record says besides.
    """
    if lpips:
        why_no_lpips(lpips)  # what must be there and is not raises before anything is drawn
    drawn: list[DrawnRow] = []

    def measure(work: tuple[Any, Changes | None]) -> Outcome:
        (pipe, changes), name = work, rows[len(drawn)].name
        values: dict[str, float] = {}
        try:
            images = draw(pipe, job, on_image=partial(on_image, name))
            if drawn:
                first = torch.cat(list(drawn[0][1]))
                values = compare_images(torch.cat(images), first, lpips=lpips).values()
        except ConfigError as error:
            raise ConfigError(f"row {name}: {error}") from error
        num_frames, _, height, width = images[0].shape
        about: dict[str, Scalar] = {
            "pipeline": type(pipe).__name__,
            **({"num_frames": num_frames} if num_frames > 1 else {}),
            "num_inference_steps": job.num_steps(pipe),
            "height": height,
            "width": width,
        }
        kinds = Counter({"linear": 0, "attention": 0})  # layers in FP8, of all components
        for layer_kind, layers in ({} if changes is None else changes.layers).items():
            kinds[layer_kind.rpartition(".")[2]] += len(layers)
        about |= {f"num_{kind}": number for kind, number in kinds.items()}
        if scorer is not None:
            pairs = zip(images, job.prompts, strict=True)
            fits = [s for frames, text in pairs for s in scorer.score(frames, [text] * len(frames))]
            about["clip_model"] = scorer.name
            values |= {"clip_score": fmean(fits), "worst_clip_score": min(fits)}
        drawn.append((name, images))
        return Outcome(values, {**about, **on_row(drawn)}, machine_of(pipe.device))

    participants = [
        Participant(
            name=row.name,
            impl="diffusers",
            about={},
            machine=Machine.current(),
            open=partial(_open_pipeline, make_pipeline, row),
        )
        for row in rows
    ]
    return run_whole(
        participants, measure, records, op="images", command=command, about=job.about, row_key="row"
    )


@contextmanager
def _open_pipeline(
    make_pipeline: Callable[[], Any], row: Row
) -> Iterator[tuple[Any, Changes | None]]:
    """A pipeline with a row's recipe, and what the recipe changed in it."""
    from octavo.integrations.diffusers.pipeline import check_plain

    gc.collect()  # the pipeline of the row before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    pipe, recipe = make_pipeline(), row.recipe()
    if recipe is not None:
        yield pipe, apply_(pipe, recipe)
        return
    try:
        check_plain(pipe)
    except ConfigError as error:
        raise ConfigError(f"row {row.name}: {error}") from error
    yield pipe, None


def draw(pipe: Any, job: ImageJob, on_image: Callable[[], None] = lambda: None) -> list[Tensor]:
    """The images of each prompt, float32 [frames, 3, height, width] on the CPU, 0 to 1."""
    from octavo.integrations.diffusers.call import check_options

    check_options(pipe, job.options)
    images = []
    for place, prompt in enumerate(job.prompts):
        try:
            result = pipe(
                prompt=prompt,
                num_inference_steps=job.num_steps(pipe),
                generator=torch.Generator().manual_seed(job.seed + place),
                output_type="pt",
                **job.options,
            )
        except ConfigError:
            raise
        except ValueError as error:  # of arguments that the pipeline refuses
            raise ConfigError(f"{type(pipe).__name__}: {error}") from error
        made = (getattr(result, name, None) for name in RESULTS)
        found = next((x for x in made if x is not None), None)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if not isinstance(found, Tensor) or found.dim() < 3 or found.shape[-3] != 3:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"expected images [..., 3, height, width] of a pipeline, got {got}")
        frames = found.detach().to("cpu", torch.float32).reshape(-1, *found.shape[-3:])
        images.append(frames)
        on_image()
    return images


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """The lines of a file that are not blank; None is the list for the small image model."""
    try:
        text = (DEFAULT_PROMPTS if path is None else path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected prompts in UTF-8, got {error}") from None
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise ConfigError(f"{path}: expected a prompt in each line, got none")
    return prompts


def run(request: ImageRequest, output: Path | None, watch: Watch) -> list[Measurement]:
    """Draw all rows; records go to the file `output`, and images to the request's folder."""
    from octavo.integrations.diffusers.load import load_pipeline

    records = Records.of_file(output)
    plain = plain_row(request.dtype)  # an error unless a row has this dtype
    request = replace(request, row=request.row or (plain, *DEFAULT_ROWS))
    rows, job = parse_image_rows(request.row, request.dtype), make_job(request)
    scorer, folder = None, request.save_pictures
    if request.clip is not None:
        from octavo.integrations.transformers.clip_score import load_clip_scorer

        scorer = load_clip_scorer(request.clip)
    if folder is not None:  # before anything is drawn for it
        folder.mkdir(parents=True, exist_ok=True)
    places = count(1)
    return evaluate(
        lambda: load_pipeline(request.model, getattr(torch, job.dtype), request.device),
        rows,
        job,
        command=request.command,
        lpips=request.lpips,
        scorer=scorer,
        on_image=lambda name: watch(name, next(places), len(rows) * len(job.prompts)),
        on_row=lambda drawn: save_row(folder, job.prompts, drawn, output) if folder else {},
        records=records,
    )


def make_job(request: ImageRequest) -> ImageJob:
    """What every row of a request draws."""
    is_small = request.model is None or SMALL_IMAGE_MODEL.matches(request.model)
    if request.prompts is None and not request.prompt and not is_small:
        raise ConfigError(f"expected prompts for {request.model}, got none: --prompts FILE")
    prompts = request.prompt or read_prompts(request.prompts)
    options = {name: getattr(request, name) for name in ("height", "width", "guidance_scale")}
    return ImageJob(
        model=request.model or "small-image",
        dtype=request.dtype,
        prompts=tuple(islice(cycle(prompts), request.num_pictures or len(prompts))),
        num_inference_steps=request.num_inference_steps,
        seed=request.seed,
        options={name: value for name, value in options.items() if value is not None},
    )


def missing_scores(request: ImageRequest, records: Sequence[Measurement]) -> list[str]:
    """Which scores were not taken, and why."""
    notes = []
    if not any("lpips" in record.values for record in records):
        case = records[0].case
        side = min(int(case["height"]), int(case["width"]))
        notes.append(str(why_no_lpips(request.lpips, side)))
    if request.clip is None:
        notes.append("The CLIP score is left out: --clip FOLDER names a CLIP model")
    return notes


def rows_below(records: Sequence[Measurement], min_psnr_db: float) -> list[str]:
    """A sentence for each row whose mean PSNR is below a limit."""
    return [
        f"row {r.case['row']}: expected a mean PSNR of {min_psnr_db:g} dB or more against "
        f"{r.baseline}, got {r.values['psnr_db']:.2f} dB"
        for r in records
        if "psnr_db" in r.values and r.values["psnr_db"] < min_psnr_db
    ]


def images_table(records: Sequence[Measurement]) -> Table:
    """The rows with the mean and the worst of each score that was taken."""
    case = records[0].case
    scores = ("psnr_db", "ssim", "lpips", "clip_score")
    return filled_table(
        records,
        caption=f"images: {case['model']}, {case['num_pictures']} images of {case['width']} × "
        f"{case['height']}, {case['num_inference_steps']} steps, against {case['row']}",
        columns=("row", *(f"{worst}{score}" for score in scores for worst in ("", "worst_"))),
    )
