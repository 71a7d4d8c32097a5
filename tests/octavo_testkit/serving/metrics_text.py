"""Prometheus' text format, read."""

from prometheus_client.parser import text_string_to_metric_families


def samples(text):
    """The value of each series by its name and its labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def series(text, name):
    """The values of all series of a name, by the values of their labels in the labels' order."""
    return {
        tuple(value for _, value in sorted(labels)): value
        for (found, labels), value in samples(text).items()
        if found == name
    }
