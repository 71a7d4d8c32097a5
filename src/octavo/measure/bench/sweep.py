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
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from octavo.amounts import parse_tokens
from octavo.errors import ConfigError, OctavoError
from octavo.measure import store
from octavo.measure.bench.cases import LatencyCase, ThroughputCase, Workload
from octavo.measure.bench.engine import Subject, check_rows, make_rows, open_subject
from octavo.measure.bench.engine_run import RowResult
from octavo.measure.bench.latency import run_latency
from octavo.measure.bench.throughput import run_throughput
from octavo.measure.bench.timing import machine_of
from octavo.measure.records import Machine, Measurement
from octavo.measure.rows import Row
from octavo.serving.engine.settings import EngineSettings
from octavo.settings import Settings

Tokens = int | str  # 4096, or "4k"


def _tokens(value: Tokens) -> int:
    return parse_tokens(str(value))


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

    @property
    def case(self) -> LatencyCase:
        """What runs."""
        return LatencyCase(
            input_lens=tuple(map(_tokens, self.input_len)),
            output_len=self.output_len,
            batch_size=self.batch_size,
            num_iters=self.num_iters,
            num_warmups=self.num_iters_warmup,
            seed=self.seed,
        )

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once."""
        return self.batch_size

    @property
    def flags(self) -> dict[str, Any]:
        """Those of octavo bench latency."""
        return _flags(self, input_len=",".join(map(str, self.case.input_lens)))

    def __str__(self) -> str:
        lengths = ", ".join(f"{length:,}" for length in self.case.input_lens)
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

    @property
    def case(self) -> ThroughputCase:
        """What runs."""
        work = Workload(
            num_prompts=self.num_prompts,
            input_len=_tokens(self.input_len),
            output_len=_tokens(self.output_len),
            range_ratio=self.range_ratio,
            seed=self.seed,
        )
        return ThroughputCase(
            workload=work, max_concurrency=self.max_concurrency, num_warmups=self.num_warmups
        )

    @property
    def flags(self) -> dict[str, Any]:
        """Those of octavo bench throughput."""
        lengths = {name: _tokens(getattr(self, name)) for name in ("input_len", "output_len")}
        return _flags(self, **lengths)

    def __str__(self) -> str:
        work, limit = self.case.workload, self.max_concurrency
        return (
            f"{work.num_prompts} × {work.input_len:,} in, {work.output_len:,} out, "
            f"{'all' if limit is None else limit} at once"
        )


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
        return "latency" if isinstance(self.load, LatencyLoad) else "throughput"

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
            kind = "latency" if isinstance(load, LatencyLoad) else "throughput"
            found.append(Combination(row, load, _command(kind, sweep.model, flags)))
    return found


def _command(kind: str, model: str | None, flags: Mapping[str, Any]) -> str:
    """The command that repeats a measurement; flags of None, False or () are left out."""
    parts = ["octavo", "bench", kind, *([model] if model else [])]
    for flag, value in flags.items():
        if value is True:
            parts.append(flag)
        elif value is not None and value is not False:
            for one in value if isinstance(value, list | tuple) else [value]:
                parts += [flag, str(one)]
    return shlex.join(parts)


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
    lengths = combination.load.case.input_lens
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
    baselines: dict[int, RowResult] = {}  # by workload
    for combination in todo:
        on_start(combination)
        number = sweep.loads.index(combination.load)
        if found := stored_records(combination, records, machine):
            outcome = Outcome(combination, "skipped", found)
        else:
            outcome = _run(model, combination, baselines.get(number), path, on_step)
        if outcome.state != "failed" and combination.row.name == sweep.recipes[0]:
            baselines[number] = RowResult(combination.row, outcome.records)
        outcomes.append(outcome)
        on_end(outcome)
    return outcomes


@dataclass(frozen=True)
class _Model:
    """The model and its rows, made when something first needs them."""

    sweep: SweepFile
    device: str

    @cached_property
    def subject(self) -> Subject:
        made, device = self.sweep, self.device
        return open_subject(
            made.model, made.config, dtype=made.dtype, device=device, layers=made.layers
        )

    @cached_property
    def rows(self) -> dict[str, Row]:
        rows = make_rows(self.sweep.recipes, self.subject, skip_layers=self.sweep.skip_layers)
        return {row.name: row for row in rows}


def _run(
    model: _Model,
    combination: Combination,
    baseline: RowResult | None,
    path: Path,
    on_step: Callable[[str], None],
) -> Outcome:
    rows, case = [model.rows[combination.row.name]], combination.load.case
    settings = model.sweep.engine.settings(combination.load.max_num_seqs)
    options: Any = {"command": combination.command, "baseline": baseline}
    try:
        if isinstance(case, LatencyCase):
            options["on_run"] = on_step
            (result,) = run_latency(model.subject, rows, case, settings, **options)
        else:
            options["on_token"] = on_step
            (result,) = run_throughput(model.subject, rows, case, settings, **options)
    except Exception as error:  # whatever it is, hours of others must not be lost to it
        is_ours = isinstance(error, OctavoError)
        reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
        return Outcome(combination, "failed", reason=reason)
    if result.failure is not None:
        return Outcome(combination, "failed", reason=result.failure)
    store.append(path, result.records)
    return Outcome(combination, "measured", result.records)
