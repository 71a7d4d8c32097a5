"""Where the numbers of a page come from, and which records it does not show."""

from collections.abc import Mapping, Sequence

from octavo.measure.records import Machine, Measurement
from octavo.measure.report.html import Section
from octavo.measure.report.labels import MISSING
from octavo.measure.report.tables import Table

SOURCES_TITLE = "Machines, versions and commands"
NOT_SHOWN_TITLE = "Not shown"


def sources_section(records: Sequence[Measurement]) -> Section:
    """Each machine with its versions, and each command with what it measured, where and when."""
    machines = _machines(records)
    return Section(
        title=SOURCES_TITLE,
        text="Every number of this page is in a record, and every record has the command that "
        "repeats it. FOLDER stands for a folder of packages of others, where a command has one.",
        tables=(_machine_table(machines), _command_table(records, machines)),
    )


def not_shown_section(
    records: Mapping[str, Sequence[Measurement]], notes: Sequence[str]
) -> Section:
    """Records that no section shows: reason -> records. notes: what else is missing, and why."""
    counts: dict[tuple[str, str, str], int] = {}
    for reason, some in records.items():
        for record in some:
            key = record.op, record.impl, reason
            counts[key] = counts.get(key, 0) + 1
    tables = []
    if counts:
        tables.append(
            Table(
                caption="Records that are not shown",
                header=("op", "impl", "records", "why"),
                rows=tuple((op, impl, num, why) for (op, impl, why), num in counts.items()),
            )
        )
    return Section(
        title=NOT_SHOWN_TITLE,
        text="\n\n".join(
            ["What was read and has no place above; octavo report --csv writes all of it.", *notes]
        ),
        tables=tuple(tables),
    )


def _machines(records: Sequence[Measurement]) -> list[Machine]:
    found: list[Machine] = []
    for record in records:
        if record.machine not in found:
            found.append(record.machine)
    return found


def _machine_table(machines: Sequence[Machine]) -> Table:
    packages = list(dict.fromkeys(name for machine in machines for name in machine.versions))
    return Table(
        caption="Machines, with the versions of the software on them",
        header=("machine", "GPU", "CPU", "system", "Python", *packages),
        rows=tuple(
            (
                *(f"M{number}", machine.gpu, machine.cpu, machine.platform, machine.python),
                *(machine.versions.get(name) for name in packages),
            )
            for number, machine in enumerate(machines, 1)
        ),
    )


def _command_table(records: Sequence[Measurement], machines: Sequence[Machine]) -> Table:
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for record in records:
        machine = f"M{machines.index(record.machine) + 1}"
        groups.setdefault((record.op, machine, record.command), []).append(record)
    rows = []
    for (op, machine, command), some in groups.items():
        dates = sorted(record.date for record in some)
        until = dates[-1] if dates[-1] != dates[0] else MISSING
        rows.append((op, machine, len(some), dates[0], until, command))
    return Table(
        caption="Commands that repeat the measurements",
        header=("op", "machine", "records", "first", "last", "command"),
        rows=tuple(rows),
    )
