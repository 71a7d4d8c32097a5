"""The results of a page in a few sentences, each a link to where they come from."""

from collections.abc import Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.html import Link, Section
from octavo.measure.report.latency import latency_sections
from octavo.measure.report.latency_rows import SAME
from octavo.measure.report.select import grouped, newest

TITLE = "Summary"


def summary_section(sections: Sequence[Section]) -> Section | None:
    """The headlines of the sections; None if they have none."""
    links = tuple(Link(section.headline, section.title) for section in sections if section.headline)
    if not links:
        return None
    return Section(
        title=TITLE,
        text="The largest speed-ups, those of latency at the longest input of each row, and what "
        "is recovered of the quality; each line leads to its numbers.",
        links=links,
    )


def latency_with_headlines(records: Sequence[Measurement]) -> list[Section]:
    """The sections of latency, with titles that name the machine, and their best row."""
    sections: list[Section] = []
    for (machine, *_), own in grouped(records, *SAME).items():
        (section,) = latency_sections(own)
        case = own[0].case
        batch = "" if case["batch_size"] == 1 else f", {case['batch_size']} at once"
        title = f"{section.title}{batch}, {machine}"
        number = sum(one.title.startswith(title) for one in sections)
        sections.append(
            replace(
                section,
                title=f"{title} ({number + 1})" if number else title,
                headline=_latency_headline(f"{case['model']}{batch}", own),
            )
        )
    return sections


def _latency_headline(model: str, records: Sequence[Measurement]) -> str:
    """The best row at its longest input: times of short ones are the host's, and scatter."""
    said = []
    for value, words in (("itl_speedup", "ITL"), ("ttft_speedup", "TTFT")):
        rows = newest([row for row in records if value in row.values], "row", "input_len")
        longest: dict[object, Measurement] = {}
        for row in sorted(rows, key=lambda row: int(row.case["input_len"])):
            longest[row.case["row"]] = row
        if longest:
            best = max(longest.values(), key=lambda row: row.values[value])
            length = int(best.case["input_len"])
            said.append(
                f"{words} {best.values[value]:.2f} times as fast with {best.case['row']} at "
                f"{length:,} tokens, against {best.baseline}"
            )
    return f"{model}: {'; '.join(said)}." if said else ""
