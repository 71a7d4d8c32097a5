"""Pages of sections: one HTML file that needs nothing else, or Markdown.

Styles, data, plots, images and plotly.js are inside the HTML file. A record's `picture` is a path
from its records file to a JPEG or PNG. Records may come from others, and a page is passed on: only
images are read, and only of the records' own folder or project.
"""

import base64
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from octavo.atomic import write_atomically
from octavo.errors import ConfigError
from octavo.extras import need
from octavo.measure.records import Machine, Measurement, utc_now
from octavo.measure.report.sections import Section
from octavo.measure.report.tables import to_markdown
from octavo.measure.report.verdict import (
    LEAST_PERCENT,
    MISSING_WORDS,
    RATING_WORDS,
    THRESHOLDS,
    Reading,
    Verdict,
    counted,
    verdict_lines,
)
from octavo.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

IMAGE, IMAGE_PROBLEM = "picture", "picture_problem"  # names in a record's case
ABOUT = "About these numbers"  # sections that stand under no other heading
MAX_BYTES = 16 * 2**20
_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png"}
_STARTS = {"image/jpeg": b"\xff\xd8\xff", "image/png": b"\x89PNG\r\n\x1a\n"}
_URL = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/]+={0,2}")
_PROJECT = (".git", "pyproject.toml")  # what the folder of a project has


def describe(machine: Machine) -> str:
    """All that is known of a machine, in one line."""
    capability = ".".join(map(str, machine.capability or ()))
    gpu = f"{machine.gpu} (compute capability {capability})" if capability else machine.gpu
    versions = [f"{package} {version}" for package, version in machine.versions.items()]
    parts = [gpu, machine.cpu, machine.platform, f"Python {machine.python}", *versions]
    return " · ".join(part for part in parts if part)


def with_images(records: Sequence[Measurement], file: Path) -> list[Measurement]:
    """The records of a file, with the images that they name inside as data URLs.

    Where one cannot be shown, its record keeps the path, and says why under `picture_problem`.
    """
    read = cache(lambda name: image_url(name, file))
    found = []
    for record in records:
        name = record.case.get(IMAGE)
        if name is not None and not is_image_url(name):
            try:
                seen = {IMAGE: read(str(name))}
            except ConfigError as error:
                seen = {IMAGE_PROBLEM: str(error)}
            record = replace(record, case={**record.case, **seen})
        found.append(record)
    return found


def is_image_url(value: object) -> bool:
    """Whether a value is an image itself, as a data URL."""
    return isinstance(value, str) and _URL.fullmatch(value) is not None


def image_url(name: str, file: Path) -> str:
    """The image at a path from the folder of a records file, as a data URL.

    ConfigError unless it is a JPEG or PNG inside that folder, or inside the project that the
    folder is in.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or "\\" in name or "\0" in name:
        raise ConfigError("expected a path from the records file on")
    media_type = _TYPES.get(path.suffix.lower())
    if media_type is None:
        raise ConfigError(f"expected an image, one of {', '.join(_TYPES)}")
    folder = file.resolve().parent
    above = (folder, *folder.parents)
    projects = (up for up in above if any((up / mark).exists() for mark in _PROJECT))
    root = next(projects, folder)
    place = (folder / path).resolve()  # where links lead to
    if not place.is_relative_to(root):
        raise ConfigError("expected an image in the folder of the records file or its project")
    if not place.is_file():
        raise ConfigError("there is no such file")
    with place.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"expected at most {MAX_BYTES // 2**20} MiB")
    if not content.startswith(_STARTS[media_type]):
        raise ConfigError(f"expected the bytes of {media_type}")
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def write_report(sections: Sequence[Section], path: str | os.PathLike[str], **about: Any) -> None:
    """Write the page in one step: a reader sees the old page or the new one, never half of it.

    about: the title and what else `render` takes.
    """
    page = render(sections, **about)
    write_atomically(path, page.encode("utf-8", "backslashreplace"))


def check_packages() -> None:
    """Raise UnsupportedError if a page could not be written, before anything has run for it."""
    need("a report", "jinja2", "plotly")


def render(
    sections: Sequence[Section],
    *,
    title: str = "octavo report",
    summary: str = "",
    machines: Sequence[Machine] = (),
    commands: Sequence[str] = (),
    verdicts: Sequence[Verdict] = (),
) -> str:
    """The page as text; every string that is given is escaped.

    machines: what the numbers were measured on. commands: what repeats the measurements.
    verdicts: what the page says first.
    """
    check_packages()
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("octavo.measure.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["finite"] = _finite
    environment.filters["spark"] = _spark
    has_figures = any(section.figures for section in sections)
    numbered = list(enumerate(sections, 1))
    groups = groupby(numbered, key=lambda one: one[1].group)
    return environment.get_template("report.html").render(
        title=title,
        summary=summary,
        sections=sections,
        groups=[(name, list(own)) for name, own in groups],
        verdicts={name: list(own) for name, own in groupby(verdicts, key=lambda one: one.machine)},
        counts=counted(verdicts),
        about=ABOUT,
        thresholds=THRESHOLDS,
        ratings=RATING_WORDS,
        missing=MISSING_WORDS,
        machines=list(dict.fromkeys(map(describe, machines))),
        commands=list(dict.fromkeys(commands)),
        plotly_js=get_plotlyjs() if has_figures else "",
        date=utc_now(),
        version=__version__,
    )


def _finite(value: Any) -> Any:
    """The value without numbers that JSON does not have: they have no place on an axis."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def _spark(reading: Reading) -> "Markup":
    """The small plot of a reading: bars from 0, or the interval of a share, and the reference."""
    from markupsafe import Markup

    is_share = reading.reference == 100
    ends = [end for end in (reading.low, reading.high) if end is not None]
    values = [value for _, value in reading.points]
    if not all(map(math.isfinite, [*values, *ends])):
        return Markup("")
    low = min([*values, *ends, LEAST_PERCENT]) if is_share else 0.0
    high = max([*values, *ends, reading.reference]) + 0.05 * (reading.reference - low)

    def x(value: float) -> float:
        return round(200 * (value - low) / (high - low), 1)

    step = 40 / len(values)
    shapes = []
    for i, value in enumerate(values):
        y = round(step * i + step / 2 + 1, 1)
        if ends:
            shapes.append(f'<path d="M{x(min(ends))} {y}H{x(max(ends))}" stroke-width="2"/>')
        start = x(value) - 4 if is_share else 0
        height = min(10, step - 2)
        shapes.append(f'<path d="M{start} {y}H{x(value) + 4 * is_share}" stroke-width="{height}"/>')
    shapes.append(f'<path class="reference" d="M{x(reading.reference)} 0V42"/>')
    return Markup("".join(shapes))  # numbers alone


def sections_markdown(
    sections: Sequence[Section],
    *,
    title: str,
    summary: str = "",
    verdicts: Sequence[Verdict] = (),
) -> str:
    """A page of sections: verdicts, texts, tables; what plots and images show is said in words."""
    parts = [f"# {title}", *([summary] if summary else [])]
    parts += [text if rating is None else f"**{text}**" for rating, text in verdict_lines(verdicts)]
    group = ""
    for section in sections:
        if section.group != group:
            group = section.group
            parts += [f"## {group or ABOUT}"]
        headline = [section.headline] if section.headline else []
        parts += [f"### {section.title}", *headline, *section.paragraphs]
        parts += [f"Plot: {figure.caption}" for figure in section.figures]
        parts += [f"Image: {sheet.caption}" for sheet in section.sheets]
        for table in section.tables:
            parts += [f"**{table.caption}**", to_markdown(table)]
    return "\n\n".join(parts) + "\n"
