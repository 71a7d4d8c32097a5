"""Recipes × workloads of a TOML file, one after the other; what has run before is not run again.

    config = "llama-3.1-8b"
    recipes = ["auto", "fp8"]

    [[latency]]
    input_len = [256, "4k", "32k", "125k"]

    [[throughput]]
    num_prompts = 48
    input_len = 20000
    output_len = 2000
    max_concurrency = 8

Keys are the flags of `octavo bench latency` and `octavo bench throughput`, with underscores. A
combination is known by the command that repeats it, the digest of its recipe's file, the version of
octavo and the machine: all of them are in its records. Recipes after the first are compared with
the first one's records, whether it ran now or before.
"""

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from octavo.errors import ConfigError, OctavoError
from octavo.measure import store
from octavo.measure.bench.cases import LatencyCase, ThroughputCase, Workload
from octavo.measure.bench.engine import Subject, check_rows, make_rows, open_subject
from octavo.measure.bench.engine_load import run_load
from octavo.measure.bench.timing import machine_of
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.tables import Cell, Table, format_column
from octavo.measure.rows import Row
from octavo.measure.run import command_line
from octavo.serving.engine.settings import EngineSettings
from octavo.settings import Settings, Tokens


def _flags(settings: Settings, **changed: object) -> dict[str, Any]:
    """Settings by the names of the command line."""
    found = {**dict(settings), **changed}
    return {f"--{name.replace('_', '-')}": value for name, value in found.items()}


class LatencyLoad(Settings):
    """One batch by itself, at each of these lengths."""

    input_len: tuple[Tokens, ...]
    output_len: int = 128
    batch_size: int = 1
    num_iters: int = 3
    num_iters_warmup: int = 1
    seed: int = 0
    kind: ClassVar[str] = "latency"

    @property
    def case(self) -> LatencyCase:
        """What runs."""
        own = dict(self)
        lengths, num_warmups = own.pop("input_len"), own.pop("num_iters_warmup")
        return LatencyCase(input_lens=lengths, num_warmups=num_warmups, **own)

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once."""
        return self.batch_size

    @property
    def flags(self) -> dict[str, Any]:
        """Those of octavo bench latency."""
        return _flags(self, input_len=",".join(map(str, self.input_len)))

    def __str__(self) -> str:
        lengths = ", ".join(f"{length:,}" for length in self.input_len)
        return f"{lengths} in, {self.output_len} out, {self.batch_size} at once"


class ThroughputLoad(Settings):
    """Many requests, so many of them open at once."""

    num_prompts: int = 48
    input_len: Tokens
    output_len: Tokens
    range_ratio: float = 0.0
    max_concurrency: int | None = None
    num_warmups: int | None = None
    max_num_seqs: int = 256
    seed: int = 0
    kind: ClassVar[str] = "throughput"

    @property
    def case(self) -> ThroughputCase:
        """What runs."""
        names = {own.name for own in fields(Workload)}
        work = Workload(**{name: value for name, value in self if name in names})
        return ThroughputCase(
            workload=work, max_concurrency=self.max_concurrency, num_warmups=self.num_warmups
        )

    @property
    def flags(self) -> dict[str, Any]:
        """Those of octavo bench throughput."""
        return _flags(self)

    def __str__(self) -> str:
        limit = "all" if self.max_concurrency is None else self.max_concurrency
        sizes = f"{self.input_len:,} in, {self.output_len:,} out"
        return f"{self.num_prompts} × {sizes}, {limit} at once"


class EngineOptions(Settings):
    """What all combinations have in common."""

    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    num_pages: int | None = None
    page_size: int = 64
    enforce_eager: bool = False
    compile: bool = False

    def settings(self, max_num_seqs: int) -> EngineSettings:
        """Those of an engine for so many requests at once."""
        return EngineSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            memory_fraction=self.gpu_memory_utilization,
            num_pages=self.num_pages,
            page_size=self.page_size,
            cuda_graphs=False if self.enforce_eager else None,
            compile=self.compile,
        )


class SweepFile(Settings):
    """A model (or the config of one with random weights), recipes, and workloads.

    The first recipe is what the others are compared with.
    """

    model: str | None = None
    config: str | None = None
    layers: int | None = None
    dtype: str = "auto"
    recipes: tuple[str, ...]
    skip_layers: tuple[str, ...] = ()
    engine: EngineOptions = EngineOptions()
    latency: tuple[LatencyLoad, ...] = ()
    throughput: tuple[ThroughputLoad, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SweepFile":
        """The sweep in a TOML file; ConfigError for whatever could not run."""
        try:
            document = tomllib.loads(Path(path).read_text("utf-8"))
            found = cls(**document)
            found.check()
        except (OSError, ValueError) as error:  # a ConfigError is a ValueError
            raise ConfigError(f"{os.fspath(path)}: {error}") from None
        return found

    @property
    def loads(self) -> tuple[LatencyLoad | ThroughputLoad, ...]:
        """All workloads, in the order they run."""
        return (*self.latency, *self.throughput)

    def check(self) -> None:
        """Raise ConfigError before a model is loaded for it."""
        if (self.model is None) == (self.config is None):
            raise ConfigError(
                f"expected a model or a config, got {self.model} and {self.config}; "
                'such as config = "tiny"'
            )
        if not self.recipes or len(set(self.recipes)) != len(self.recipes):
            raise ConfigError(f"expected different recipes, got {list(self.recipes)}")
        if not self.loads:
            raise ConfigError("expected one or more workloads: [[latency]] or [[throughput]]")
        cases = [load.case for load in self.loads]
        if any(case in cases[:number] for number, case in enumerate(cases)):
            raise ConfigError("expected different workloads, got one twice")
        self.engine.settings(1)
        check_rows(self.recipes, self.skip_layers)

    @property
    def flags(self) -> Mapping[str, Any]:
        """Those that all combinations share, beside the recipe's."""
        return {
            "--config": self.config,
            "--kv-cache-dtype-skip-layers": self.skip_layers,
            "--layers": self.layers,
            "--dtype": self.dtype,
            **_flags(self.engine),
        }


@dataclass(frozen=True)
class Combination:
    """A recipe under a workload; command: what repeats it, beside the first recipe."""

    row: Row
    load: LatencyLoad | ThroughputLoad
    command: str

    @property
    def kind(self) -> str:
        """The benchmark: latency or throughput."""
        return self.load.kind

    def __str__(self) -> str:
        return f"{self.kind}, {self.row.name}, {self.load}"


@dataclass(frozen=True)
class Outcome:
    """What became of a combination: its records are new, were there before, or it failed."""

    combination: Combination
    state: Literal["measured", "skipped", "failed"]
    records: tuple[Measurement, ...] = ()
    reason: str = ""


def combinations(sweep: SweepFile, *, peers: bool = False) -> list[Combination]:
    """All of a sweep: for each workload the recipes in their order; peers: whether with peers."""
    found = []
    for load in sweep.loads:
        for row in check_rows(sweep.recipes, sweep.skip_layers):
            names = list(dict.fromkeys([sweep.recipes[0], row.name]))
            flags = {**sweep.flags, **load.flags, "--kv-cache-dtype": names}
            if peers:
                flags["--peers"] = "FOLDER"  # whichever it was on this machine
            command = command_line("octavo", "bench", load.kind, sweep.model, flags=flags)
            found.append(Combination(row, load, command))
    return found


def stored_records(
    combination: Combination, records: Sequence[Measurement], machine: Machine
) -> tuple[Measurement, ...]:
    """Its records among these, from this machine and version; none unless all are there."""
    same = [
        record
        for record in records
        if record.op == combination.kind
        and record.command == combination.command
        and record.case.get("row") == combination.row.name
        and record.case.get("recipe_digest") == combination.row.digest
        and _is_same(record.machine, machine)
    ]
    if not isinstance(combination.load, LatencyLoad):
        return tuple(same[-1:])
    by_length = {record.case["input_len"]: record for record in same}  # the newest is the last
    lengths = combination.load.input_len
    return tuple(by_length[n] for n in lengths) if set(lengths) <= by_length.keys() else ()


def _is_same(machine: Machine, other: Machine) -> bool:
    versions = machine.versions.get("octavo"), other.versions.get("octavo")
    return (machine.gpu, machine.cpu, versions[0]) == (other.gpu, other.cpu, versions[1])


def run_sweep(
    sweep: SweepFile,
    todo: Sequence[Combination],
    path: Path,
    *,
    device: str,
    on_start: Callable[[Combination], None] = lambda combination: None,
    on_step: Callable[[str], None] = lambda what: None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run what the file has no records of, and append records as each combination ends.

    One that fails has its reason; the others go on, without a comparison if it was the first.
    """
    records = store.read(path) if path.exists() else []
    machine, model = machine_of(device), _Model(sweep, device)
    outcomes: list[Outcome] = []
    baselines: dict[int, tuple[Measurement, ...]] = {}  # by workload
    for combination in todo:
        on_start(combination)
        number = sweep.loads.index(combination.load)
        if found := stored_records(combination, records, machine):
            outcome = Outcome(combination, "skipped", found)
        else:
            outcome = _run(model, combination, baselines.get(number, ()), path, on_step)
        if outcome.state != "failed" and combination.row.name == sweep.recipes[0]:
            baselines[number] = outcome.records
        outcomes.append(outcome)
        on_end(outcome)
    return outcomes


class _Model:
    """The model and its rows, made when something first needs them."""

    def __init__(self, sweep: SweepFile, device: str) -> None:
        self.sweep, self.device = sweep, device

    @cached_property
    def subject(self) -> Subject:
        own = {name: getattr(self.sweep, name) for name in ("dtype", "layers")}
        return open_subject(self.sweep.model, self.sweep.config, device=self.device, **own)

    @cached_property
    def rows(self) -> dict[str, Row]:
        rows = make_rows(self.sweep.recipes, self.subject, skip_layers=self.sweep.skip_layers)
        return {row.name: row for row in rows}


def _run(
    model: _Model,
    combination: Combination,
    baseline: Sequence[Measurement],
    path: Path,
    on_step: Callable[[str], None],
) -> Outcome:
    load, rows = combination.load, [model.rows[combination.row.name]]
    settings = model.sweep.engine.settings(load.max_num_seqs)
    options: Any = {"command": combination.command, "baseline": baseline, "on_step": on_step}
    try:
        result = run_load(model.subject, rows, load.case, settings, **options)
    except Exception as error:  # whatever it is, hours of others must not be lost to it
        is_ours = isinstance(error, OctavoError)
        reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
        return Outcome(combination, "failed", reason=reason)
    for reason in result.failures.values():
        return Outcome(combination, "failed", reason=reason)
    store.append(path, result.records)
    return Outcome(combination, "measured", result.records)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """One line for each combination, with its median times where it has some."""
    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        one, values = outcome.combination, [record.values for record in outcome.records]
        medians = [
            ", ".join(format_column([v[name] for v in values if name in v])) or None
            for name in ("median_ttft_ms", "median_itl_ms", "output_throughput")
        ]
        rows.append((one.kind, str(one.load), one.row.name, outcome.state, *medians))
    header = ("benchmark", "workload", "recipe", "", "TTFT (ms)", "ITL (ms)", "output tokens/s")
    return Table(caption="Sweep: medians", header=header, rows=tuple(rows))
