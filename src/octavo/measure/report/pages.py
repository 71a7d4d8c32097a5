"""One page from records alone: which part shows which records, and which records none shows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from octavo.errors import ConfigError
from octavo.measure.records import Machine, Measurement
from octavo.measure.report import images, layers, quality, speed
from octavo.measure.report.attention_grid import GRID
from octavo.measure.report.kernels import Roof, kernel_kinds
from octavo.measure.report.latency import LATENCY
from octavo.measure.report.sections import Kind, Section
from octavo.measure.report.tables import MISSING, Table

UNKNOWN = "no section for this op"
# Known, and left to another section.
REASONS = {
    op: "fits are made again from the records of lengths" for op in ("latency_fit", "ttft_fit")
}


def make_parts(roofs: Sequence[Roof] = ()) -> tuple[Kind, ...]:
    """All parts of a page in their order. roofs: of the GPUs whose ceilings are known."""
    steps = (speed.ENCODER, speed.DIFFUSION, speed.GENERATE, speed.GENERATE_CALLS, speed.HOST)
    answers = (
        quality.PERPLEXITY,
        images.CHARTQA,
        quality.NEEDLE,
        quality.MRCR,
        quality.PASS_AT_1,
        quality.TASKS,
    )
    scales = (layers.SENSITIVITY, layers.CALIBRATION, layers.PIPELINE, *layers.ERRORS)
    speeds = (LATENCY, speed.THROUGHPUT, speed.SERVE, *steps, *kernel_kinds(roofs), GRID)
    results = (*answers, quality.TEXTS, images.IMAGES)
    return (*speeds, *results, *scales, speed.ADVICE, speed.COMPARED_ADVICE)


def report_sections(
    records: Sequence[Measurement],
    *,
    roofs: Sequence[Roof] = (),
    compared: Sequence[Measurement] = (),
    notes: Sequence[str] = (),
) -> list[Section]:
    """The sections of a page: what was measured, where it comes from, what is not shown.

    What was measured on one machine stands together.

    compared: advice beside what was measured, made from the same records. notes: what could not be
    made of the records, and why. ConfigError if there are no records.
    """
    if not records:
        raise ConfigError("expected records to show, got none")
    parts = make_parts(roofs)
    by_op = {op: part for part in parts for op in part.ops}
    hidden: Counter[tuple[str, str, str]] = Counter()
    shown = []
    for record in (*records, *compared):
        part = by_op.get(record.op)
        missing = [] if part is None else part.missing_names(record)
        if part is None or missing:
            unknown = REASONS.get(record.op, UNKNOWN)
            why = f"without {', '.join(missing)}" if missing else unknown
            hidden[record.op, record.impl, why] += 1
        else:
            shown.append(record)
    made = [s for part in parts for s in part.make([r for r in shown if r.op in part.ops])]
    by_group: dict[str, list[Section]] = {}
    for section in made:
        by_group.setdefault(section.group, []).append(section)
    last = [_not_shown(hidden, notes)] if hidden or notes else []
    ordered = [section for own in by_group.values() for section in _numbered(own)]
    return [*ordered, _sources(records), *last]


def _numbered(sections: Sequence[Section]) -> list[Section]:
    """The sections with titles of their own: the second of a title is (2)."""
    counts: Counter[str] = Counter()
    found = []
    for section in sections:
        counts[section.title] += 1
        number = counts[section.title]
        title = section.title if number == 1 else f"{section.title} ({number})"
        found.append(replace(section, title=title))
    return found


def _sources(records: Sequence[Measurement]) -> Section:
    """Each machine with its versions, and each command with what it measured, where and when."""
    machines: list[Machine] = []
    groups: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if record.machine not in machines:
            machines.append(record.machine)
        machine = f"M{machines.index(record.machine) + 1}"
        groups.setdefault((record.op, machine, record.command), []).append(record.date)
    commands = Table(
        caption="Commands that repeat the measurements",
        header=("op", "machine", "records", "first", "last", "command"),
        rows=tuple(
            (op, machine, len(dates), first, last if last != first else MISSING, command)
            for (op, machine, command), dates in groups.items()
            for first, last in [(min(dates), max(dates))]
        ),
    )
    packages = list(dict.fromkeys(name for machine in machines for name in machine.versions))
    versions = Table(
        caption="Machines, with the versions of the software on them",
        header=("machine", "GPU", "CPU", "system", "Python", *packages),
        rows=tuple(
            (f"M{number}", m.gpu, m.cpu, m.platform, m.python, *map(m.versions.get, packages))
            for number, m in enumerate(machines, 1)
        ),
    )
    return Section(
        title="Machines, versions and commands",
        text="Every number of this page is in a record, and every record has the command that "
        "repeats it. FOLDER stands for a folder of packages of others, where a command has one.",
        tables=(versions, commands),
    )


def _not_shown(hidden: Counter[tuple[str, str, str]], notes: Sequence[str]) -> Section:
    """Records that no section shows, by op, impl and reason. notes: what else is missing."""
    reasons = list(dict.fromkeys(why for *_, why in hidden))
    counts = sorted(hidden.items(), key=lambda item: reasons.index(item[0][2]))
    table = Table(
        caption="Records that are not shown",
        header=("op", "impl", "records", "why"),
        rows=tuple((op, impl, number, why) for (op, impl, why), number in counts),
    )
    intro = "What was read and has no place above; octavo report --csv writes all of it."
    return Section(
        title="Not shown", text="\n\n".join([intro, *notes]), tables=(table,) if hidden else ()
    )
