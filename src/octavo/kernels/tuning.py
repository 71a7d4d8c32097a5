"""Launch settings that won on a GPU, as data: found by name, never searched for at run time.

kernels/tuned/<gpu>.json maps op → problem → settings. An op's config says what a problem is (such
as "float8_e4m3fn head_dim 128"), which settings it takes, and checks them; a GPU without a file, or
a problem without a row, has the defaults. `octavo bench kernels --tune` writes the files.
"""

import json
import re
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from octavo.atomic import write_atomically
from octavo.errors import ConfigError
from octavo.kernels.device import Device

FOLDER = Path(__file__).parent / "tuned"
Config = TypeVar("Config")
Table = dict[str, dict[str, dict[str, int]]]


def file_name(device: Device) -> str:
    """The file of a GPU: "NVIDIA H200" has h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", device.name.lower()).removeprefix("nvidia_") + ".json"


def find(op: str, problem: str, device: Device, kind: type[Config]) -> Config | None:
    """The settings that won for this problem on this GPU, or None where nothing was tuned."""
    if device.capability is None:
        return None
    path = FOLDER / file_name(device)
    row = _read(path).get(op, {}).get(problem)
    if row is None:
        return None
    expected = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if set(row) != expected:
        raise ConfigError(
            f"expected {', '.join(sorted(expected))} for {op} {problem!r} in {path}, got "
            f"{', '.join(sorted(row))}: tune again"
        )
    return kind(**row)


def save(op: str, problem: str, device: Device, config: Any, folder: Path = FOLDER) -> Path:
    """Make `config`, a dataclass of numbers, the winner for this problem; returns the file."""
    path = folder / file_name(device)
    table = {name: dict(rows) for name, rows in _read(path).items()}
    table.setdefault(op, {})[problem] = asdict(config)
    text = json.dumps(table, indent=2, sort_keys=True) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    _read.cache_clear()
    return path


@cache
def _read(path: Path) -> Table:
    if not path.exists():
        return {}
    try:
        table: Table = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"expected tuned settings as JSON in {path}, got: {error}") from error
    return table
