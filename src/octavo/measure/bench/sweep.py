"""Recipes × workloads of a TOML file, one after the other; what has run before is not run again.

Keys are the flags of `octavo bench latency` and `octavo bench throughput`, with underscores. A
combination is known by the command that repeats it, the digest of its recipe's file, the version of
octavo and the machine: all of them are in its records. Recipes after the first are compared with
the first one's records, whether it ran now or before.
"""

import os
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from octavo.errors import ConfigError, OctavoError
from octavo.measure import store
from octavo.measure.bench.cases import LatencyCase, ThroughputCase
from octavo.measure.bench.engine import Subject, check_rows, make_rows, open_subject
from octavo.measure.bench.engine_load import run_load
from octavo.measure.bench.expect import expect
from octavo.measure.bench.timing import machine_of
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.tables import Cell, Table, format_column
from octavo.measure.rows import Row
from octavo.measure.run import command_line
from octavo.serving.engine.settings import EngineSettings
from octavo.settings import Settings, Tokens


class Flagged(Settings):
    """Settings that are flags of a command, by their names with hyphens."""

    @property
    def flags(self) -> dict[str, Any]:
        """Those of the command."""
        return {f"--{name.replace('_', '-')}": value for name, value in self}


class LatencyLoad(Flagged):
    """One batch by itself, at each of these lengths: the flags of octavo bench latency."""

    input_len: tuple[Tokens, ...]
    output_len: int = 128
    batch_size: int = 1
    num_iters: int = 3
    num_iters_warmup: int = 1
    seed: int = 0
    kind: ClassVar[str] = "latency"

    def case(self) -> LatencyCase:
        """What runs."""
        own = self.model_dump(exclude={"input_len", "num_iters_warmup"})
        return LatencyCase(input_lens=self.input_len, num_warmups=self.num_iters_warmup, **own)

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once."""
        return self.batch_size

    @property
    def flags(self) -> dict[str, Any]:
        """Those of the command, the lengths as one."""
        return {**super().flags, "--input-len": ",".join(map(str, self.input_len))}

    def __str__(self) -> str:
        lengths = ", ".join(f"{length:,}" for length in self.input_len)
        return f"{lengths} in, {self.output_len} out, {self.batch_size} at once"


class ThroughputLoad(Flagged):
    """Many requests, so many of them open at once: the flags of octavo bench throughput."""

    num_prompts: int = 48
    input_len: Tokens
    output_len: Tokens
    range_ratio: float = 0.0
    max_concurrency: int | None = None
    num_warmups: int | None = None
    max_num_seqs: int = 256
    seed: int = 0
    kind: ClassVar[str] = "throughput"

    def case(self) -> ThroughputCase:
        """What runs."""
        return ThroughputCase(**self.model_dump(exclude={"max_num_seqs"}))

    def __str__(self) -> str:
        limit = "all" if self.max_concurrency is None else self.max_concurrency
        sizes = f"{self.input_len:,} in, {self.output_len:,} out"
        return f"{self.num_prompts} × {sizes}, {limit} at once"


class EngineOptions(Flagged):
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
            memory_fraction=self.gpu_memory_utilization,
            cuda_graphs=False if self.enforce_eager else None,
            **self.model_dump(exclude={"gpu_memory_utilization", "enforce_eager"}),
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
            found = cls(**tomllib.loads(Path(path).read_text("utf-8")))
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
        is_one = (self.model is None) != (self.config is None)
        got = f"{self.model} and {self.config}"
        expect(is_one, 'a model or a config such as "tiny"', got)
        names = list(self.recipes)
        expect(len(set(names)) == len(names) > 0, "different recipes", names)
        expect(bool(self.loads), "one or more workloads, [[latency]] or [[throughput]]", "none")
        cases = [load.case() for load in self.loads]
        expect(all(cases.count(case) == 1 for case in cases), "different workloads", "one twice")
        self.engine.settings(1)
        check_rows(self.recipes, self.skip_layers)


@dataclass(frozen=True)
class Combination:
    """A recipe under a workload; command: what repeats it, beside the first recipe."""

    row: Row
    load: LatencyLoad | ThroughputLoad
    command: str

    def __str__(self) -> str:
        return f"{self.load.kind}, {self.row.name}, {self.load}"


@dataclass(frozen=True)
class Outcome:
    """What became of a combination: its records are new, were there before, or it failed."""

    combination: Combination
    state: Literal["measured", "skipped", "failed"]
    records: tuple[Measurement, ...] = ()
    reason: str = ""


def combinations(sweep: SweepFile, *, peers: bool = False) -> list[Combination]:
    """All of a sweep: for each workload the recipes in their order; peers: whether with peers."""
    shared: dict[str, Any] = {
        "--config": sweep.config,
        "--kv-cache-dtype-skip-layers": sweep.skip_layers,
        "--layers": sweep.layers,
        "--dtype": sweep.dtype,
        **sweep.engine.flags,
    }
    found = []
    for load in sweep.loads:
        for row in check_rows(sweep.recipes, sweep.skip_layers):
            names = list(dict.fromkeys([sweep.recipes[0], row.name]))
            flags = {**shared, **load.flags, "--kv-cache-dtype": names}
            if peers:
                flags["--peers"] = "FOLDER"  # whichever it was on this machine
            command = command_line("octavo", "bench", load.kind, sweep.model, flags=flags)
            found.append(Combination(row, load, command))
    return found


def stored_records(
    combination: Combination, records: Sequence[Measurement], machine: Machine
) -> tuple[Measurement, ...]:
    """Its records among these, from this machine and version; none unless all are there."""

    def place(machine: Machine) -> object:
        return machine.gpu, machine.cpu, machine.versions.get("octavo")

    row, load = combination.row, combination.load
    same = [
        record
        for record in records
        if (record.op, record.command) == (load.kind, combination.command)
        and record.case.get("row") == row.name
        and record.case.get("recipe_digest") == row.digest
        and place(record.machine) == place(machine)
    ]
    if isinstance(load, ThroughputLoad):
        return tuple(same[-1:])
    newest = {record.case["input_len"]: record for record in same}
    is_whole = set(load.input_len) <= newest.keys()
    return tuple(newest[length] for length in load.input_len) if is_whole else ()


def run_sweep(
    sweep: SweepFile, todo: Sequence[Combination], path: Path, *, device: str
) -> Iterator[Outcome]:
    """Run what the file has no records of, and append records as each combination ends.

    One that fails has its reason; the others go on, without a comparison if it was the first.
    """

    @cache  # made when something first needs it
    def opened() -> tuple[Subject, dict[str, Row]]:
        own: Any = {"dtype": sweep.dtype, "device": device, "layers": sweep.layers}
        subject = open_subject(sweep.model, sweep.config, **own)
        rows = make_rows(sweep.recipes, subject, skip_layers=sweep.skip_layers)
        return subject, {row.name: row for row in rows}

    def run(one: Combination, baseline: Sequence[Measurement]) -> Outcome:
        settings = sweep.engine.settings(one.load.max_num_seqs)
        options: Any = {"command": one.command, "baseline": baseline}
        subject, rows = opened()
        try:
            result = run_load(subject, [rows[one.row.name]], one.load.case(), settings, **options)
        except Exception as error:  # whatever it is, hours of others must not be lost to it
            kind = "" if isinstance(error, OctavoError) else f"{type(error).__name__}: "
            return Outcome(one, "failed", reason=f"{kind}{error}")
        for reason in result.failures.values():
            return Outcome(one, "failed", reason=reason)
        store.append(path, result.records)
        return Outcome(one, "measured", result.records)

    records = store.read(path) if path.exists() else []
    machine = machine_of(device)
    baselines: dict[LatencyLoad | ThroughputLoad, tuple[Measurement, ...]] = {}
    for one in todo:
        found = stored_records(one, records, machine)
        skipped = Outcome(one, "skipped", found)
        outcome = skipped if found else run(one, baselines.get(one.load, ()))
        if outcome.state != "failed" and one.row.name == sweep.recipes[0]:
            baselines[one.load] = outcome.records
        yield outcome


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """One line for each combination, with its median times where it has some."""
    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        one, values = outcome.combination, [record.values for record in outcome.records]
        medians = [
            ", ".join(format_column([v[name] for v in values if name in v])) or None
            for name in ("median_ttft_ms", "median_itl_ms", "output_throughput")
        ]
        rows.append((one.load.kind, str(one.load), one.row.name, outcome.state, *medians))
    header = ("benchmark", "workload", "recipe", "", "TTFT (ms)", "ITL (ms)", "output tokens/s")
    return Table(caption="Sweep: medians", header=header, rows=tuple(rows))
