"""GPUs as data (gpus.toml), how far octavo was tried (tried.toml), and what this machine has."""

import platform
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.measure.report.kernels import Roof
from octavo.measure.report.tables import Table

if TYPE_CHECKING:
    from octavo.kernels.device import Device


FILE = Path(__file__).with_name("gpus.toml")
TRIED_FILE = FILE.with_name("tried.toml")
# The GPU whose measured rates say how much of a data sheet can be had.
REFERENCE = "h200"


@dataclass(frozen=True)
class Gpu:
    """A GPU by its short name; peak: of its data sheet; measured: what was reached on one."""

    key: str
    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    peak: Roof
    measured: Roof | None = None

    @property
    def has_fp8(self) -> bool:
        """Whether octavo has kernels for FP8 there."""
        return self.capability >= (8, 9)

    @property
    def architecture(self) -> str:
        """What NVIDIA calls its kind (Hopper)."""
        return architectures()[self.capability].name

    @property
    def caution(self) -> str | None:
        """What to know if octavo never ran on it; None if it did."""
        return caution_of_gpu(self.name, self.capability)

    @property
    def device(self) -> "Device":
        """The GPU as the selection of implementations sees it."""
        from octavo.kernels.device import Device  # by torch, which reports go without

        return Device("cuda", self.name, self.capability, self.num_sms, self.memory_bytes)

    @property
    def ceilings(self) -> Roof:
        """The rates that can be had: measured ones, or the share of the peak that an H200 has."""
        if self.measured is not None:
            return self.measured
        reference = find_gpu(REFERENCE)
        best, peak = reference.measured, reference.peak
        assert best is not None
        fp8_share = best.tflops("FP8") / peak.tflops("FP8")
        return Roof(
            self.name,
            self.peak.gb_per_s * best.gb_per_s / peak.gb_per_s,
            self.peak.bf16_tflops * best.bf16_tflops / peak.bf16_tflops,
            self.peak.fp8_tflops and self.peak.fp8_tflops * fp8_share,
            f"{self.peak.source}, times the shares that {reference.name} reaches of its own",
        )


@cache
def all_gpus() -> Mapping[str, Gpu]:
    """Every GPU of the file by its short name."""
    return {key: _read(key, row) for key, row in tomllib.loads(FILE.read_text("utf-8")).items()}


def find_gpu(name: str) -> Gpu:
    """The GPU of a short name (h200), of the name that it has itself (NVIDIA H200), or of an
    architecture (ada): the first one in the file.
    """
    found = all_gpus()
    wanted = name.strip().lower()
    for gpu in found.values():
        if wanted in (gpu.key, gpu.name.lower(), gpu.architecture.lower()):
            return gpu
    kinds = dict.fromkeys(gpu.architecture.lower() for gpu in found.values())
    raise ConfigError(f"expected a GPU of {', '.join([*found, *kinds])}; got {name!r}")


def _read(key: str, row: Mapping[str, Any]) -> Gpu:
    def roof(rates: Mapping[str, Any]) -> Roof:
        names = ("gb_per_s", "bf16_tflops", "fp8_tflops", "source")
        values: Any = map(rates.get, names)
        return Roof(row["name"], *values)

    major, minor = row["capability"]
    memory_bytes = int(row["memory_gb"] * 1e9)
    measured = roof(row["measured"]) if "measured" in row else None
    return Gpu(key, row["name"], (major, minor), row["num_sms"], memory_bytes, roof(row), measured)


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
    gpus = {
        f"{one}: {', '.join(one.gpus)}" if one.gpus else str(one): one.how
        for one in architectures().values()
    }
    rows = []
    for what, tried in {**packages(), "GPU": gpus}.items():
        by_how = [", ".join(x for x, of in tried.items() if of == how) for how in HOW]
        here = [] if versions is None else [versions.get(what, "none")]
        rows.append((what, *here, *by_how))
    header = ("what", *([] if versions is None else ["here"]), *HOW.values())
    return Table(caption="What octavo was tried with", header=header, rows=tuple(rows))


def describe_machine() -> "Iterator[Table | str]":
    """What this machine has: tables, and warnings between them."""
    from octavo import env
    from octavo.internals import SUPPORTED, version_warning
    from octavo.kernels.device import default_device
    from octavo.measure.records import Machine
    from octavo.ops.explain import explain

    device = default_device()
    machine = Machine.current(gpu=device.gpu, capability=device.capability)
    versions, capability, gpu = machine.versions, device.capability, "none that torch can use"
    if capability is not None:
        memory = f"{device.num_sms} SMs, {device.memory_bytes / 2**30:.0f} GiB"
        gpu = f"{device.name}, compute capability {capability[0]}.{capability[1]}, {memory}"
    python = f"{machine.python} on {platform.system()} {platform.machine()}"
    facts = {"GPU": gpu, "CPU": machine.cpu, "Python": python, **versions}
    yield Table(caption="This machine", header=("what", "found"), rows=tuple(facts.items()))
    yield tried_table({**versions, "GPU": device.name if capability else "none"})
    if capability is not None and (caution := caution_of_gpu(device.name, capability)):
        yield caution
    yield from cautions_of_versions(versions, has_gpu=capability is not None)
    ops = (
        (row.op, row.operands, row.selection.impl if row.selection else "none", row.reason)
        for row in explain(device)
    )
    header: tuple[str, ...] = ("op", "operands", "impl", "why")
    yield Table(caption="What each op runs here", header=header, rows=tuple(ops))
    variables = tuple((v.name, v.read(), v.meaning) for v in env.VARIABLES)
    header = ("variable", "value", "meaning")
    yield Table(caption="Environment variables", header=header, rows=variables)
    for name in env.unknown_variables():
        yield f"warning: {name} is set, but octavo has no such variable"
    for library, version in versions.items():
        if library in SUPPORTED and (warning := version_warning(library, version)):
            yield f"warning: {warning}"


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(TRIED_FILE.read_text("utf-8"))
