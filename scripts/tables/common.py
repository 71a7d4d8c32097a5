"""What tables of several subjects need."""

from octavo.measure.records import Measurement


def fastest(records: list[Measurement]) -> Measurement:
    """The record with the smallest median."""
    return min(records, key=lambda record: record.values["median_ms"])
