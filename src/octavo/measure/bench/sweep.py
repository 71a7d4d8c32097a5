"""Recipes × workloads, one after the other; what has run before is not run again.

A combination is known by the command that repeats it, the digest of its recipe's file, the version
of octavo and the machine: all of them are in its records. Recipes after the first are compared with
the first one's records, whether it ran now or before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import OctavoError
from octavo.kernels.device import describe
from octavo.measure import store
from octavo.measure.bench.engine_rows import (
    EngineRow,
    Subject,
    check_rows,
    make_rows,
    open_subject,
)
from octavo.measure.bench.latency import LatencyResult, run_latency
from octavo.measure.bench.sweep_file import LatencyLoad, SweepFile, ThroughputLoad
from octavo.measure.bench.throughput import ThroughputResult, run_throughput
from octavo.measure.records import Machine, Measurement

Result = LatencyResult | ThroughputResult
MakeCommand = Callable[[str, list[str], Mapping[str, Any]], str]


@dataclass(frozen=True)
class Combination:
    """A recipe under a workload; command: what repeats it, beside the first recipe."""

    row: EngineRow
    load: LatencyLoad | ThroughputLoad
    command: str

    @property
    def kind(self) -> str:
        """The benchmark: latency or throughput."""
        return "latency" if isinstance(self.load, LatencyLoad) else "throughput"

    @property
    def workload(self) -> str:
        """The workload in a few words."""
        if isinstance(self.load, LatencyLoad):
            lengths = ", ".join(f"{length:,}" for length in self.load.case.input_lens)
            return f"{lengths} in, {self.load.output_len} out, {self.load.batch_size} at once"
        work, limit = self.load.case.workload, self.load.max_concurrency
        return (
            f"{work.num_prompts} × {work.input_len:,} in, {work.output_len:,} out, "
            f"{'all' if limit is None else limit} at once"
        )

    def __str__(self) -> str:
        return f"{self.kind}, {self.row.name}, {self.workload}"


@dataclass(frozen=True)
class Outcome:
    """What became of a combination: its records are new, were there before, or it failed."""

    combination: Combination
    state: Literal["measured", "skipped", "failed"]
    records: tuple[Measurement, ...] = ()
    reason: str = ""


def combinations(
    sweep: SweepFile, make_command: MakeCommand, *, peers: bool = False
) -> list[Combination]:
    """All of a sweep: for each workload the recipes in their order."""
    words = [sweep.model] if sweep.model else []
    found = []
    for load in sweep.loads:
        for row in check_rows(sweep.recipes, sweep.skip_layers):
            names = list(dict.fromkeys([sweep.recipes[0], row.name]))
            flags = {**sweep.flags(), **load.flags(), "--kv-cache-dtype": names}
            if peers:
                flags["--peers"] = "FOLDER"  # whichever it was on this machine
            kind = "latency" if isinstance(load, LatencyLoad) else "throughput"
            found.append(Combination(row, load, make_command(kind, words, flags)))
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
    lengths = combination.load.case.input_lens
    return tuple(by_length[n] for n in lengths) if set(lengths) <= by_length.keys() else ()


def _is_same(machine: Machine, other: Machine) -> bool:
    versions = machine.versions.get("octavo"), other.versions.get("octavo")
    return (machine.gpu, machine.cpu, versions[0]) == (other.gpu, other.cpu, versions[1])


def this_machine(device: str) -> Machine:
    """What records of this device would say."""
    described = describe(device)
    return Machine.current(gpu=described.gpu, capability=described.capability)


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
    machine = this_machine(device)
    model = _Model(sweep, device)
    outcomes: list[Outcome] = []
    baselines: dict[int, Result] = {}  # by workload
    for combination in todo:
        on_start(combination)
        number = sweep.loads.index(combination.load)
        found = stored_records(combination, records, machine)
        result: Result | None
        if found:
            outcome = Outcome(combination, "skipped", found)
            result = _result(combination.row, combination, found)
        else:
            outcome, result = _run(model, combination, baselines.get(number), path, on_step)
        if result is not None and combination.row.name == sweep.recipes[0]:
            baselines[number] = result
        outcomes.append(outcome)
        on_end(outcome)
    return outcomes


class _Model:
    """The model and its rows, made when something first needs them."""

    def __init__(self, sweep: SweepFile, device: str) -> None:
        self.sweep, self.device = sweep, device
        self._made: tuple[Subject, dict[str, EngineRow]] | None = None

    def get(self) -> tuple[Subject, dict[str, EngineRow]]:
        if self._made is None:
            sweep = self.sweep
            subject = open_subject(
                sweep.model,
                sweep.config,
                dtype=sweep.dtype,
                device=self.device,
                layers=sweep.layers,
            )
            rows = make_rows(sweep.recipes, subject, skip_layers=sweep.skip_layers)
            self._made = subject, {row.name: row for row in rows}
        return self._made


def _run(
    model: _Model,
    combination: Combination,
    baseline: Result | None,
    path: Path,
    on_step: Callable[[str], None],
) -> tuple[Outcome, Result | None]:
    subject, rows = model.get()
    load, row = combination.load, rows[combination.row.name]
    settings = model.sweep.engine.settings(load.max_num_seqs)
    result: Result
    try:
        if isinstance(load, LatencyLoad):
            assert baseline is None or isinstance(baseline, LatencyResult)
            (result,) = run_latency(
                *(subject, [row], load.case, settings),
                command=combination.command,
                baseline=baseline,
                on_run=on_step,
            )
        else:
            assert baseline is None or isinstance(baseline, ThroughputResult)
            (result,) = run_throughput(
                *(subject, [row], load.case, settings),
                command=combination.command,
                baseline=baseline,
                on_token=on_step,
            )
    except Exception as error:  # whatever it is, hours of others must not be lost to it
        is_ours = isinstance(error, OctavoError)
        reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
        return Outcome(combination, "failed", reason=reason), None
    if result.failure is not None:
        return Outcome(combination, "failed", reason=result.failure), None
    store.append(path, result.records)
    return Outcome(combination, "measured", result.records), result


def _result(row: EngineRow, combination: Combination, records: Sequence[Measurement]) -> Result:
    """What a combination of before came to."""
    if combination.kind == "latency":
        return LatencyResult.of_records(row, records)
    return ThroughputResult(row, records[-1])
