"""Measurement and Machine: what was measured, on what, as one line of JSON.

Every table, plot and sentence with a number is made from these rows. A row says which operation ran
(`op`, `impl`), on what (`case`: the sizes and choices), and what came out (`values`: numbers whose
names end in their unit, such as `median_ms` or `sqnr_db`). Timing and accuracy share this one form.

In JSON a value that is not finite is the string "nan", "inf" or "-inf": an exact result has an SQNR
of inf, and a broken one must stay visible.
"""

import contextlib
import importlib.metadata
import json
import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from octavo.brief import unique_keys
from octavo.errors import CheckpointError, ConfigError
from octavo.version import __version__

SCHEMA = 1

Scalar = str | int | float | bool
_Item = TypeVar("_Item")

_DATE_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_PACKAGES = ("torch", "triton", "numpy", "transformers", "diffusers", "vllm")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a measurement ran on: the hardware and the versions of the software."""

    cpu: str
    python: str
    platform: str
    gpu: str | None = None
    capability: tuple[int, int] | None = None  # (9, 0) on Hopper
    versions: Mapping[str, str] = field(default_factory=dict)  # package -> version

    def __post_init__(self) -> None:
        _check_texts(self, ("cpu", "python", "platform"), optional="gpu")
        if self.capability is not None:
            pair: Any = self.capability  # a list in JSON
            is_pair = isinstance(pair, list | tuple) and len(pair) == 2
            is_right = is_pair and all(isinstance(part, int) for part in pair)
            _must(is_right, "capability", "two integers such as (9, 0)", pair)
            object.__setattr__(self, "capability", tuple(pair))
        object.__setattr__(self, "versions", _checked("versions", self.versions, _text))

    @classmethod
    def current(cls, *, gpu: str | None = None, capability: tuple[int, int] | None = None) -> Self:
        """This machine and the versions installed on it; the GPU's name comes from the caller."""
        versions = {"octavo": __version__}
        for package in _PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        # platform.processor() is empty on most Linux systems.
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpus = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        return cls(
            cpu=next(filter(None, [*cpus, platform.processor(), platform.machine()]), "unknown"),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            gpu=gpu,
            capability=capability,
            versions=versions,
        )

    def __str__(self) -> str:
        torch = self.versions.get("torch")
        return f"{self.gpu or self.cpu}{f', torch {torch}' if torch else ''}"


def utc_now() -> str:
    """The time now as records write it: 2026-01-31T12:00:00Z."""
    return datetime.now(UTC).strftime(_DATE_FORMAT)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One result: what ran, on what, what came out, where, by which command and when."""

    op: str  # what was done: "decode_attention", "quantize", "perplexity"
    impl: str  # who did it: "reference", "triton", "fa3"
    case: Mapping[str, Scalar]  # the sizes and choices: {"head_dim": 128, "granularity": "head"}
    values: Mapping[str, float]  # what came out: {"median_ms": 0.75, "sqnr_db": 31.2}
    machine: Machine
    command: str  # repeats the measurement
    baseline: str | None = None  # what the values are relative to, where they are
    date: str = field(default_factory=utc_now)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if isinstance(self.schema, bool) or self.schema != SCHEMA:
            raise ConfigError(f"this octavo knows records of schema {SCHEMA}, got {self.schema!r}")
        _check_texts(self, ("op", "impl", "command"), optional="baseline")
        try:
            datetime.strptime(_text("date", self.date), _DATE_FORMAT)
        except ValueError:  # a ConfigError is one
            raise ConfigError(
                f"date must look like 2026-01-31T12:00:00Z, got {self.date!r}"
            ) from None
        _must(isinstance(self.machine, Machine), "machine", "a Machine", self.machine)
        object.__setattr__(self, "case", _checked("case", self.case, _scalar))
        object.__setattr__(self, "values", _checked("values", self.values, _number))
        if both := sorted(self.case.keys() & self.values.keys()):
            raise ConfigError(f"a name is a case or a value, not both: {', '.join(both)}")

    def get(self, name: str) -> Scalar | None:
        """The field, case or value called `name`; None if this row has none."""
        if name == "machine":
            return str(self.machine)
        if name in ("op", "impl", "baseline", "command", "date", "tflops", "gb_per_s"):
            found: Scalar | None = getattr(self, name)
            return found
        return self.case.get(name, self.values.get(name))

    @property
    def tflops(self) -> float | None:
        """Speed in TFLOP/s, from the values `flops` and `median_ms`."""
        return self._per_second("flops", 1e12)

    @property
    def gb_per_s(self) -> float | None:
        """Bandwidth in GB/s, from the values `bytes` and `median_ms`."""
        return self._per_second("bytes", 1e9)

    def _per_second(self, name: str, unit: float) -> float | None:
        amount, median_ms = self.values.get(name), self.values.get("median_ms")
        return amount / (median_ms / 1e3) / unit if amount and median_ms else None

    def to_json(self) -> str:
        """The row as one line of ASCII JSON, `schema` first."""
        row = {"schema": self.schema} | {f.name: getattr(self, f.name) for f in fields(self)}
        row["values"] = {n: x if math.isfinite(x) else str(x) for n, x in self.values.items()}
        row["machine"] = {f.name: getattr(self.machine, f.name) for f in fields(Machine)}
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The row that `to_json` wrote; CheckpointError if it is anything else."""
        try:
            row = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
            if not isinstance(row, dict):
                raise ConfigError(f"expected a JSON object, got {type(row).__name__}")
            if row.get("schema") != SCHEMA:
                raise ConfigError(
                    f"expected a record of schema {SCHEMA}, got {row.get('schema')!r}; "
                    "a newer octavo may read it"
                )
            _check_keys(cls, row, "record")
            row["values"] = _checked("values", row["values"], _finite_or_word)
            machine = _mapping("machine", row["machine"])
            _check_keys(Machine, machine, "machine")
            row["machine"] = Machine(**machine)
            return cls(**row)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"not a line of JSON: {error}") from error


def timing(
    samples_ms: Sequence[float], *, flops: float | None = None, bytes: float | None = None
) -> dict[str, float]:
    """The values of a timing row: median and 20/80 % quantiles of the samples, and the work."""
    if not samples_ms or not all(map(math.isfinite, samples_ms)):
        raise ConfigError(f"timing needs one or more finite samples, got {list(samples_ms)}")
    pair_or_more = samples_ms if len(samples_ms) > 1 else [*samples_ms, *samples_ms]
    p20_ms, _, _, p80_ms = statistics.quantiles(pair_or_more, n=5, method="inclusive")
    values = {
        "median_ms": statistics.median(samples_ms),
        "p20_ms": p20_ms,
        "p80_ms": p80_ms,
        "num_samples": len(samples_ms),
    }
    work = {"flops": flops, "bytes": bytes}
    return values | {name: amount for name, amount in work.items() if amount is not None}


def _must(is_right: object, name: str, what: str, value: object) -> None:
    if not is_right:
        raise ConfigError(f"{name} must be {what}, got {value!r}")


def _check_texts(owner: object, names: Sequence[str], optional: str) -> None:
    for name in names if getattr(owner, optional) is None else (*names, optional):
        _text(name, getattr(owner, name))


def _text(name: str, value: Any) -> str:
    _must(isinstance(value, str) and value, name, "a text that is not empty", value)
    return str(value)


def _scalar(name: str, value: Any) -> Scalar:
    is_right = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    _must(is_right, name, "a text, a truth value or a finite number", value)
    return value  # type: ignore[no-any-return]


def _number(name: str, value: Any) -> float:
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    raise ConfigError(f"{name} must be a number, got {value!r}")


def _finite_or_word(name: str, value: Any) -> float:
    """A number of JSON, or the word for one that is not finite."""
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    number = _number(name, value)
    if not math.isfinite(number):
        raise ConfigError(f"{name} is beyond the range of a float")
    return number


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    _must(isinstance(value, Mapping), name, "a mapping of names", value)
    return value  # type: ignore[no-any-return]


def _checked(name: str, value: object, check: Callable[[str, Any], _Item]) -> dict[str, _Item]:
    """The items of a mapping as `check` gives them, by names that are texts."""
    return {
        _text(f"a name in {name}", key): check(f"{name}[{key!r}]", item)
        for key, item in _mapping(name, value).items()
    }


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_keys(cls: type[Measurement] | type[Machine], row: Mapping[str, Any], what: str) -> None:
    expected = {f.name for f in fields(cls)}
    for problem, names in (("unknown", row.keys() - expected), ("missing", expected - row.keys())):
        if names:
            raise ConfigError(f"{problem} key in {what}: {', '.join(sorted(names))}")
