"""The table of diffusion models: how near their images in FP8 are to those in BF16."""

from pathlib import Path

from octavo.measure import store
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, to_markdown
from tables.common import grouped, newest

FILES = ("images_h200.jsonl", "images_cpu.jsonl")
MODULATION_FILES = ("modulation_cpu.jsonl",)  # no default: apart from what is supported
NONE_YET = (
    "No model has a record yet: `octavo eval images` makes one. A model enters this table with its "
    "record, and not before.\n"
)
HEADER = ("model", "row", "PSNR (dB)", "SSIM", "LPIPS", "CLIP score", "images")


def images(results: Path) -> str:
    """Each model's newest record of every row; a sentence if there is none."""
    rows = _newest_rows(results, FILES)
    if not rows:
        return NONE_YET
    table = Table(caption="", header=HEADER, rows=tuple(rows))
    return (
        "Images of each row against those of the row that quantizes nothing, by the same prompts "
        "and seeds: the mean, and the worst of all in brackets. A CLIP score is beside that of the "
        "images it is compared with; – is a score that was not taken. A row's words are those of "
        f"[`octavo eval images`](../how-to/evaluate-images.md).\n\n{to_markdown(table)}\n"
    )


def modulation(results: Path) -> str:
    """What weight-only modulation does to the images of a model."""
    rows = _newest_rows(results, MODULATION_FILES)
    columns = [HEADER.index(name) for name in ("model", "row", "PSNR (dB)", "SSIM", "images")]
    table = Table(
        caption="",
        header=tuple(HEADER[index] for index in columns),
        rows=tuple(tuple(row[index] for index in columns) for row in rows),
    )
    return f"{to_markdown(table)}\n"


def _newest_rows(results: Path, files: tuple[str, ...]) -> list[tuple[str, ...]]:
    paths = [results / name for name in files]
    found = [r for path in paths if path.is_file() for r in store.read(path) if r.op == "images"]
    groups = grouped(newest(found, _key), lambda r: _key(r)[:-1])
    return [row for group in groups for row in _rows(group)]


def _key(record: Measurement) -> tuple[Scalar | None, ...]:
    """What tells records apart: where and what was drawn, and last the row."""
    case = record.case
    names = ("model", "dtype", "prompts_sha256", "num_pictures", "num_inference_steps", "seed")
    size = ("height", "width", "num_frames")
    return (record.machine.gpu, *(case.get(name) for name in (*names, *size)), case["row"])


def _rows(group: list[Measurement]) -> list[tuple[str, ...]]:
    """The rows of one model that are compared with another."""
    plain = next((r for r in group if r.baseline is None), None)
    return [
        (
            str(record.case["model"]),
            f"`{record.case['row']}`",
            _with_worst(record, "psnr_db", 1),
            _with_worst(record, "ssim", 4),
            _with_worst(record, "lpips", 4),
            _clip(record, plain),
            _drawn(record),
        )
        for record in group
        if "psnr_db" in record.values
    ]


def _with_worst(record: Measurement, name: str, digits: int) -> str:
    if name not in record.values:
        return "–"
    mean, worst = record.values[name], record.values[f"worst_{name}"]
    return f"{mean:.{digits}f} ({worst:.{digits}f})"


def _clip(record: Measurement, plain: Measurement | None) -> str:
    own = record.values.get("clip_score")
    before = None if plain is None else plain.values.get("clip_score")
    if own is None:
        return "–"
    return f"{own:.2f}" + ("" if before is None else f" ({record.baseline}: {before:.2f})")


def _drawn(record: Measurement) -> str:
    case = record.case
    frames = f"{case['num_frames']} frames of " if "num_frames" in case else ""
    size = f"{case['num_pictures']} × {frames}{case['width']} × {case['height']}"
    where = record.machine.gpu or "a CPU"
    return f"{size}, {case['num_inference_steps']} steps, on {where}"
