"""What octavo was tried with (tried.toml): run on a GPU, run on a CPU only, or compiled only."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from octavo.measure.report.tables import Table

FILE = Path(__file__).with_name("tried.toml")
# How far something was tried, in words, best first.
HOW = {"gpu": "run on a GPU", "cpu": "run on a CPU only", "compiled": "compiled only"}
Capability = tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """GPUs of one compute capability; how: of HOW; gpus: those that kernels ran on."""

    capability: Capability
    name: str
    how: str
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]})"


@cache
def packages() -> Mapping[str, Mapping[str, str]]:
    """Every package that was tried: its versions, and how far (HOW)."""
    return {name: rows for name, rows in _document().items() if name != "architectures"}


@cache
def architectures() -> Mapping[Capability, Architecture]:
    """Every architecture of GPUs that kernels ran on or are compiled for."""
    found = {}
    for key, row in _document()["architectures"].items():
        major, minor = map(int, key.split("."))
        gpus = tuple(row.get("gpus", ()))
        found[major, minor] = Architecture((major, minor), row["name"], row["how"], gpus)
    return found


def caution_of_gpu(name: str, capability: Capability) -> str | None:
    """What to know of a GPU that octavo never ran on; None if it did."""
    found = architectures().get(capability)
    if found is None:
        sm = f"sm_{capability[0]}{capability[1]}"
        return f"octavo was never run on {name} ({sm}), nor are its kernels compiled for {sm}."
    if found.how != "gpu":
        return (
            f"octavo was never run on {name}, nor on any other GPU of {found}: its kernels are "
            "compiled for it in tests, and may be slow or wrong there."
        )
    if name not in found.gpus:
        ran = " and ".join(found.gpus)
        return f"octavo was never run on {name}; its kernels for {found} were run on {ran}."
    return None


def cautions_of_versions(versions: Mapping[str, str], *, has_gpu: bool) -> Iterator[str]:
    """A sentence for each package here whose version was not run, on a GPU if there is one."""
    for package, tried in packages().items():
        version = versions.get(package)
        if version is None:
            continue
        how = tried.get(version.partition("+")[0])  # 2.13.0+cpu is a build of 2.13.0
        if how is None:
            known = ", ".join(f"{one} ({HOW[of]})" for one, of in tried.items())
            yield f"octavo was never tried with {package} {version}; it was with {known}."
        elif how == "compiled" or (has_gpu and how == "cpu"):
            yield f"octavo was never run on a GPU with {package} {version}: {HOW[how]}."


def tried_table(versions: Mapping[str, str] | None = None) -> Table:
    """Versions and GPUs by how far they were tried; versions: of this machine, for a column."""
    rows: list[tuple[str, ...]] = [
        _row(package, dict(tried)) for package, tried in packages().items()
    ]
    gpus = {
        f"{one}: {', '.join(one.gpus)}" if one.gpus else str(one): one.how
        for one in architectures().values()
    }
    rows.append(_row("GPU", gpus))
    header: tuple[str, ...] = ("what", *HOW.values())
    if versions is not None:
        header = ("what", "here", *HOW.values())
        rows = [(row[0], versions.get(row[0], "none"), *row[1:]) for row in rows]
    return Table(caption="What octavo was tried with", header=header, rows=tuple(rows))


def _row(what: str, tried: Mapping[str, str]) -> tuple[str, ...]:
    return (what, *(", ".join(x for x, of in tried.items() if of == how) for how in HOW))


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text("utf-8"))
