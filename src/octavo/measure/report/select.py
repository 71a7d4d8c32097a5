"""Records in groups, and which of those that measured the same thing counts: the newest."""

from collections.abc import Sequence

from octavo.measure.records import Measurement, Scalar

Key = tuple[Scalar | None, ...]


def machine_name(record: Measurement) -> str:
    """The GPU that a record was measured on, or the CPU where there was none."""
    return record.machine.gpu or record.machine.cpu


def grouped(records: Sequence[Measurement], *names: str) -> dict[Key, list[Measurement]]:
    """The records by machine and by what they have under these names, in order of appearance."""
    found: dict[Key, list[Measurement]] = {}
    for record in records:
        key = machine_name(record), *map(record.get, names)
        found.setdefault(key, []).append(record)
    return found


def newest(records: Sequence[Measurement], *names: str) -> list[Measurement]:
    """The newest record of each machine and value of `names` (of op, impl and case, if none)."""
    found: dict[object, Measurement] = {}
    for record in records:
        about: object = tuple(map(record.get, names))
        if not names:
            about = record.op, record.impl, tuple(sorted(record.case.items()))
        key = machine_name(record), about
        if key not in found or record.date >= found[key].date:
            found[key] = record
    return list(found.values())
