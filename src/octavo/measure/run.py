"""The one runner: participants × cells → records, with progress, resume and saving as it goes.

A participant is a row of the table, such as a model with a recipe or a server. A cell is what is
measured of each: a length and a depth, a bucket of questions, or all there is. A workload states
its cells, how one of them is measured, and how a participant compares with the first one.
Evaluations and the benchmarks of the engine run here.
"""

import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from octavo.errors import ConfigError, OctavoError
from octavo.measure import store
from octavo.measure.records import Machine, Measurement, Scalar

Work = TypeVar("Work")
Cell = TypeVar("Cell", bound=Hashable)
Values = Mapping[str, float]
Watch = Callable[[str, int, int], None]  # told what is done, how much of it so far, of how much
ALL = "all"  # the only cell of a workload that measures a participant as a whole


class Progress:
    """Tells a watcher how much of a total is done."""

    def __init__(self, watch: Watch, what: str, total: int) -> None:
        self.watch, self.what, self.total, self.done = watch, what, total, 0

    def add(self, count: int = 1) -> None:
        """Tell that so much more is done."""
        self.done = min(self.total, self.done + count)
        self.watch(self.what, self.done, self.total)


@dataclass(frozen=True, kw_only=True)
class Participant(Generic[Work]):
    """A row of the table: ready to work from when `open` is entered until it is left.

    about: what its records say of it besides its name; machine: where it runs. ran: values that its
    records have besides those measured, filled in while it is open.
    """

    name: str
    impl: str
    about: Mapping[str, Scalar]
    machine: Machine
    open: Callable[[], AbstractContextManager[Work]] = field(repr=False)
    ran: dict[str, float] = field(default_factory=dict, repr=False)


def ready(work: Work) -> Callable[[], AbstractContextManager[Work]]:
    """The `open` of a participant that nothing must be done for."""
    return lambda: nullcontext(work)


@dataclass(frozen=True)
class Outcome:
    """What measuring a cell gave.

    about, machine: what only the measurement itself can tell its record.
    """

    values: Values
    about: Mapping[str, Scalar] = field(default_factory=dict)
    machine: Machine | None = None


class Records:
    """Records of a run: those known from an earlier one, by `_identity`, and where new ones go."""

    def __init__(
        self,
        done: Iterable[Measurement] = (),
        on_record: Callable[[Measurement], None] = lambda record: None,
    ) -> None:
        self.known = {_identity(r.op, r.impl, r.machine, r.case, r.baseline): r for r in done}
        self.keep = on_record

    @staticmethod
    def of_file(path: Path | None, *, is_resumed: bool = False) -> "Records":
        """Append to a file; is_resumed: leave out what it has records of. None keeps nothing."""
        store.check_folder(path)
        if path is None:
            if is_resumed:
                raise ConfigError(
                    "--resume goes on with the records of --output, which is not given"
                )
            return Records()
        done = store.read(path) if is_resumed and path.exists() else []
        return Records(done, lambda record: store.append(path, [record]))


def _identity(
    op: str, impl: str, machine: Machine, case: Mapping[str, Scalar], baseline: str | None
) -> object:
    """What must be the same for a cell to be done already."""
    return op, impl, str(machine), frozenset(case.items()), baseline


@dataclass(frozen=True, kw_only=True)
class Workload(Generic[Work, Cell]):
    """What is measured of every participant.

    cells: what the records of each say. measure: given a participant at work and a cell. compare:
    values that a participant has besides its own, by those of the first one in the same cell.
    summary: a further cell whose values follow from those of all others. derive: further records
    that follow from a participant's own, given those and the first one's. row_key: what records
    call a participant's name.
    """

    op: str
    command: str
    cells: Mapping[Cell, Mapping[str, Scalar]]
    measure: Callable[[Work, Cell], Outcome]
    compare: Callable[[Values, Values], Values] = lambda own, first: {}
    summary: tuple[Cell, Callable[[Mapping[Cell, Values]], Values]] | None = None
    derive: Callable[[list[Measurement], list[Measurement]], Iterable[Measurement]] = (
        lambda own, first: ()
    )
    row_key: str = "recipe"


def run_workload(
    participants: Sequence[Participant[Work]],
    workload: Workload[Work, Cell],
    records: Records | None = None,
    *,
    on_skip: Callable[[Cell], None] = lambda cell: None,
    on_failure: Callable[[str, OctavoError], None] | None = None,
    baseline: Sequence[Measurement] = (),
) -> list[Measurement]:
    """One record for each participant and cell, in this order; the first is the baseline.

    A cell with a record of an earlier run is not measured again: on_skip is told of it. New records
    are kept as soon as their cell is done. on_failure: told of a participant that cannot run; it
    has no records, and the others go on. Without it, if the first participant fails, and for
    settings that make no sense, errors are raised. baseline: an earlier run's records of all
    cells, which every participant is compared with.
    """
    names = [participant.name for participant in participants]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"expected rows of different names, got {names}")
    records = Records() if records is None else records
    first = dict(zip(workload.cells, baseline, strict=False))
    found: list[Measurement] = []
    for participant in participants:
        held: list[Measurement] = []
        keep = records.keep if on_failure is None else held.append
        try:
            measured, derived = _run_one(participant, workload, records, first, on_skip, keep)
        except OctavoError as error:
            if on_failure is None or not first or isinstance(error, ConfigError):
                raise
            on_failure(participant.name, error)
            continue
        for record in held:
            records.keep(record)
        first = first or measured
        found += [*(measured[cell] for cell in workload.cells), *derived]
    return found


def run_whole(
    participants: Sequence[Participant[Work]],
    measure: Callable[[Work], Outcome],
    records: Records | None = None,
    *,
    op: str,
    command: str,
    about: Mapping[str, Scalar],
    row_key: str = "recipe",
) -> list[Measurement]:
    """One record for each participant, which is measured as a whole; about: what all records say.

    `measure` may keep what the first participant gave, and compare the others with it.
    """
    workload: Workload[Work, str] = Workload(
        op=op,
        command=command,
        cells={ALL: about},
        measure=lambda work, cell: measure(work),
        row_key=row_key,
    )
    return run_workload(participants, workload, records)


def _run_one(
    participant: Participant[Work],
    workload: Workload[Work, Cell],
    records: Records,
    first: Mapping[Cell, Measurement],
    on_skip: Callable[[Cell], None],
    save: Callable[[Measurement], None],
) -> tuple[dict[Cell, Measurement], list[Measurement]]:
    """The records of one participant by cell, and those derived from them.

    first: the records that they are compared with, none if there are none.
    """
    names = [str(record.case[workload.row_key]) for record in first.values()]
    baseline = names[0] if names else None
    own = {**participant.about, workload.row_key: participant.name}
    measured: dict[Cell, Measurement] = {}
    for cell, about in workload.cells.items():
        where = (workload.op, participant.impl, participant.machine)
        identity = _identity(*where, {**own, **about}, baseline)
        if identity in records.known:
            measured[cell] = records.known[identity]

    def keep(cell: Cell, outcome: Outcome) -> None:
        compared = workload.compare(outcome.values, first[cell].values) if first else {}
        measured[cell] = Measurement(
            op=workload.op,
            impl=participant.impl,
            case={**own, **workload.cells[cell], **outcome.about},
            values={**outcome.values, **compared, **participant.ran},
            machine=outcome.machine or participant.machine,
            command=workload.command,
            baseline=baseline,
        )
        save(measured[cell])

    whole, summarize = workload.summary or (None, None)
    cells = [cell for cell in workload.cells if cell != whole]
    left = [cell for cell in cells if cell not in measured]
    for cell in cells:
        if cell in measured:
            on_skip(cell)
    if left:
        with participant.open() as work:
            for cell in left:
                keep(cell, workload.measure(work, cell))
    if whole is not None and summarize is not None and (left or whole not in measured):
        keep(whole, Outcome(summarize({cell: measured[cell].values for cell in cells})))
    derived = list(workload.derive(list(measured.values()), list(first.values()))) if left else []
    for record in derived:
        save(record)
    return measured, derived


def command_line(*words: str | None, flags: Mapping[str, Any]) -> str:
    """A command line of words and flags; a sequence repeats its flag, True is the flag alone.

    None and False are left out.
    """
    parts = [word for word in words if word is not None]
    for flag, value in flags.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and one is not False:
                parts += [flag] if one is True else [flag, str(one)]
    return shlex.join(parts)
