"""Pictures that records name, as part of a page: read from beside their file, as data URLs.

A record's `picture` is a path from its records file to a JPEG or PNG. Records may come from others,
and a page is passed on: only pictures are read, and only of the records' own folder or project.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from octavo.errors import ConfigError
from octavo.measure.records import Measurement

NAME = "picture"
PROBLEM = "picture_problem"
MAX_BYTES = 16 * 2**20
_TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png"}
_STARTS = {"image/jpeg": b"\xff\xd8\xff", "image/png": b"\x89PNG\r\n\x1a\n"}
_URL = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/]+={0,2}")
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
