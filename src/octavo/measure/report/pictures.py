"""Pictures that records name, as part of a page: read from beside their file, as data URLs; and
what FP8 does to the pictures of a pipeline.

A record's `picture` is a path from its records file to a JPEG or PNG. Records may come from others,
and a page is passed on: only pictures are read, and only of the records' own folder or project.
"""

import base64
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from octavo.errors import ConfigError
from octavo.measure.records import Measurement
from octavo.measure.report.html import Kind, Rows, Sheet
from octavo.measure.report.plots import Figure, Point, points

NAME = "picture"
PROBLEM = "picture_problem"
MAX_BYTES = 16 * 2**20
_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png"}
_STARTS = {"image/jpeg": b"\xff\xd8\xff", "image/png": b"\x89PNG\r\n\x1a\n"}
_URL = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/]+={0,2}")
_PSNR = ("psnr_db", "worst_psnr_db")
_MAX_PROMPTS = 12  # that a caption names
_PROJECT = (".git", "pyproject.toml")  # what the folder of a project has


def with_pictures(records: Sequence[Measurement], file: Path) -> list[Measurement]:
    """The records of a file, with the pictures that they name inside as data URLs.

    Where one cannot be shown, its record keeps the path, and says why under `picture_problem`.
    """
    urls: dict[str, str] = {}
    found = []
    for record in records:
        name = record.case.get(NAME)
        if name is None or is_picture_url(name):
            found.append(record)
            continue
        case = dict(record.case)
        try:
            path = str(name)
            if path not in urls:
                urls[path] = picture_url(path, file)
            case[NAME] = urls[path]
        except ConfigError as error:
            case[PROBLEM] = str(error)
        found.append(replace(record, case=case))
    return found


def is_picture_url(value: object) -> bool:
    """Whether a value is a picture itself, as a data URL."""
    return isinstance(value, str) and _URL.fullmatch(value) is not None


def picture_url(name: str, file: Path) -> str:
    """The picture at a path from the folder of a records file, as a data URL.

    ConfigError unless it is a JPEG or PNG inside that folder, or inside the project that the
    folder is in.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or "\\" in name or "\0" in name:
        raise ConfigError("expected a path from the records file on")
    media_type = _TYPES.get(path.suffix.lower())
    if media_type is None:
        raise ConfigError(f"expected a picture, one of {', '.join(_TYPES)}")
    folder = file.resolve().parent
    root = _project(folder)
    place = (folder / path).resolve()  # where links lead to
    if not place.is_relative_to(root):
        raise ConfigError("expected a picture in the folder of the records file or its project")
    if not place.is_file():
        raise ConfigError("there is no such file")
    with place.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"expected at most {MAX_BYTES // 2**20} MiB")
    if not content.startswith(_STARTS[media_type]):
        raise ConfigError(f"expected the bytes of {media_type}")
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _project(folder: Path) -> Path:
    """The project that a folder is in; the folder itself if it is in none."""
    for place in (folder, *folder.parents):
        if any((place / mark).exists() for mark in _PROJECT):
            return place
    return folder


def _scored(rows: Rows) -> Rows:
    return [row for row in rows if all(name in row.values for name in _PSNR)]


def _picture_text(rows: Rows) -> str:
    """What is compared, and why a picture that records name is not shown."""
    said = [
        f"Pictures of the same prompts and noise as those of {row.baseline}, after "
        f"{rows[0].case.get('num_inference_steps')} steps."
        for row in _scored(rows)[:1]
    ]
    problems: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        name = row.case.get(NAME)
        if name is not None and not is_picture_url(name):
            unread = "it is read by octavo report, from the records file on"
            key = str(name), str(row.case.get(PROBLEM, unread))
            problems.setdefault(key, []).append(str(row.case["row"]))
    said += [
        f"The picture {name} of {', '.join(own)} is not shown: {why}."
        for (name, why), own in problems.items()
    ]
    return "\n\n".join(said)


def _picture_headline(rows: Rows) -> str:
    lowest = min(_scored(rows), key=lambda row: row.values["worst_psnr_db"], default=None)
    if lowest is None:
        return ""
    return (
        f"{lowest.case['model']}: the worst picture has {lowest.values['worst_psnr_db']:.1f} dB "
        f"PSNR against {lowest.baseline}, with {lowest.case['row']}."
    )


def _picture_figures(rows: Rows) -> Iterable[Figure]:
    some = []
    for row in _scored(rows):
        mean, worst = (row.values[name] for name in _PSNR)
        some.append(Point(str(row.case["row"]), mean, 0.0, mean - worst))
    if some:
        yield points(
            {"PSNR": some},
            caption="Mean PSNR over the pictures of each row; higher is better. Bars reach down to "
            "the worst picture.",
            value_title="PSNR (dB)",
        )


def _picture_sheets(rows: Rows) -> Iterable[Sheet]:
    """Each picture once, with all rows that it is of."""
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        url = row.case.get(NAME)
        if is_picture_url(url):
            found.setdefault(str(url), []).append(row)
    for url, own in found.items():
        firsts = dict.fromkeys(row.baseline for row in own if row.baseline is not None)
        names = dict.fromkeys([*firsts, *(str(row.case["row"]) for row in own)])
        about = f"{own[0].case['model']}: {_prompts(own[0])} in {', '.join(names)}"
        scores = [
            f"{row.case['row']} has {row.values['psnr_db']:.1f} dB PSNR against {row.baseline}, "
            f"the worst of {row.case.get('num_pictures')} pictures "
            f"{row.values['worst_psnr_db']:.1f} dB"
            for row in _scored(own)
        ]
        yield Sheet(
            caption=". ".join([f"{about}, by the same noise", *scores]) + ".",
            alt=f"Pictures side by side, {about}",
            url=url,
        )


def _prompts(record: Measurement) -> str:
    """What was drawn: the prompts that the record or its command names, or their number."""
    said = record.case.get("picture_prompts")
    prompts = str(said).split("; ") if said is not None else _prompts_in(record.command)
    if not prompts:
        return f"{record.case.get('num_pictures', 'some')} prompts"
    more = f" and {len(prompts) - _MAX_PROMPTS} more" if len(prompts) > _MAX_PROMPTS else ""
    return ", ".join(f"“{prompt}”" for prompt in prompts[:_MAX_PROMPTS]) + more


def _prompts_in(command: str) -> list[str]:
    """The texts of --prompt in a command."""
    try:
        words = shlex.split(command)
    except ValueError:  # of a command that somebody wrote by hand
        return []
    return [text for flag, text in zip(words, words[1:], strict=False) if flag == "--prompt"]


# Pictures are those that records have as data URLs (`with_pictures`).
IMAGES = Kind(
    ops=("images",),
    needs=("model", "row"),
    by=("model", "dtype", "prompts_sha256", "num_pictures", "num_inference_steps", "seed"),
    rows=("row",),
    title="Pictures: {model}, {num_pictures} prompts, {machine}",
    text=_picture_text,
    headline=_picture_headline,
    figures=_picture_figures,
    sheets=_picture_sheets,
    caption="Pictures, by row",
    columns=(
        *("row", "psnr_db", "worst_psnr_db", "ssim", "worst_ssim", "lpips", "worst_lpips"),
        *("clip_score", "worst_clip_score"),
    ),
)
