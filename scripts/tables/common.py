"""What tables of several subjects need."""

from collections.abc import Callable, Hashable, Iterable

from octavo.measure.records import Measurement

Key = Callable[[Measurement], Hashable]


def fastest(records: list[Measurement]) -> Measurement:
    """The record with the smallest median."""
    return min(records, key=lambda record: record.values["median_ms"])


def grouped(records: Iterable[Measurement], key: Key) -> list[list[Measurement]]:
    """Records of the same key together, in the order in which the keys appear."""
    groups: dict[Hashable, list[Measurement]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.values())


def newest(records: Iterable[Measurement], key: Key) -> list[Measurement]:
    """Of each key the record with the latest date; of the same date, the one further down."""
    # max returns the first of equals.
    return [max(reversed(group), key=lambda r: r.date) for group in grouped(records, key)]
