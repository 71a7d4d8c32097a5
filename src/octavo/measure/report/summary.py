"""The results of a page in a few sentences, each a link to where they come from."""

from collections.abc import Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.html import Link, Section
from octavo.measure.report.latency import latency_sections
from octavo.measure.report.select import grouped

TITLE = "Summary"


def summary_section(sections: Sequence[Section]) -> Section | None:
    """The headlines of the sections; None if they have none."""
    links = tuple(Link(section.headline, section.title) for section in sections if section.headline)
    if not links:
        return None
    return Section(
        title=TITLE,
        text="The largest speed-ups and what is recovered of the quality; each line leads to its "
        "numbers.",
        links=links,
    )


def latency_with_headlines(records: Sequence[Measurement]) -> list[Section]:
    """The sections of latency, with titles that name the machine, and their best row."""
    sections = []
    for machine_records in grouped(records).values():
        machine = machine_records[0].machine
        by_title: dict[str, int] = {}
        for section in latency_sections(machine_records):
            number = by_title[section.title] = by_title.get(section.title, 0) + 1
            model = section.title.rpartition(": ")[2]
            more = "" if number == 1 else f" ({number})"
            own = [r for r in machine_records if r.case["model"] == model] if number == 1 else []
            sections.append(
                replace(
                    section,
                    title=f"{section.title}, {machine.gpu or machine.cpu}{more}",
                    headline=_latency_headline(model, own),
                )
            )
    return sections


def _latency_headline(model: str, records: Sequence[Measurement]) -> str:
    said = []
    for value, words in (("itl_speedup", "ITL"), ("ttft_speedup", "TTFT")):
        rows = [row for row in records if value in row.values]
        if rows:
            best = max(rows, key=lambda row: row.values[value])
            length = int(best.case["input_len"])
            said.append(
                f"{words} {best.values[value]:.2f} times as fast with {best.case['row']} at "
                f"{length:,} tokens, against {best.baseline}"
            )
    return f"{model}: {'; '.join(said)}." if said else ""
