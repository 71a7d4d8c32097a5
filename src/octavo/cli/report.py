"""octavo report: one page from records."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err, out
from octavo.cli.options import Written, check_file, takes_settings
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.measure.advise.gpus import Gpu
    from octavo.measure.records import Measurement

RESULTS, PAGE = Path("results"), Path("report.html")


@takes_settings
def report(
    *,
    results: Annotated[tuple[Path, ...], typer.Argument(metavar="RESULTS")] = (),
    output: Annotated[Path, typer.Option("--output", "-o", callback=check_file)] = PAGE,
    markdown: Annotated[Path | None, typer.Option("--md", callback=check_file)] = None,
    csv: Written = None,
    title: str = "octavo report",
    against: tuple[Path, ...] = (),
    advice: Annotated[bool, typer.Option("--advice/--no-advice")] = True,
) -> None:
    """Write one HTML page from records: plots, tables, machines, commands. No GPU is needed.

    octavo report results -o report.html --md report.md --csv records.csv

    octavo report after.jsonl --against before.jsonl

    The page opens with a verdict for each model and workload: whether to use FP8, by its speed,
    memory and quality. Below it is a section for each benchmark, evaluation and calibration that
    the records are of. The page loads nothing, and says which records it does not show. Advice is
    made again without each model's own records, and shown beside what was measured.

    Attributes:
        results: Files of records (JSON Lines), or folders of them; results/ if left out.
        output: The page to write.
        markdown: Also write texts and tables as Markdown.
        csv: Also write every record as a row of a CSV file.
        title: The title of the page.
        against: Files or folders of records from before a change, of the same commands: the page
            says what is better and what is worse. May be given more than once.
        advice: Compare advice with what was measured. It loads torch, transformers and diffusers,
            which takes longer than all the rest.
    """
    from octavo.atomic import write_atomically
    from octavo.measure import store
    from octavo.measure.advise.gpus import all_gpus
    from octavo.measure.report import html
    from octavo.measure.report.changes import changed_section
    from octavo.measure.report.evidence import make_verdicts
    from octavo.measure.report.pages import report_sections
    from octavo.measure.report.tables import to_csv

    written = [path for path in (output, markdown, csv) if path is not None]
    if len({path.resolve() for path in written}) < len(written):
        raise ConfigError(f"expected different files, got {', '.join(map(str, written))}")
    html.check_packages()
    places = results or (RESULTS,)
    by_file = {file: store.read(file) for file in _files(places)}
    records = [row for rows in by_file.values() for row in rows]
    names = {record.machine.gpu for record in records}
    gpus = [gpu for gpu in all_gpus().values() if gpu.name in names]
    compared, notes = _compared(records, gpus) if advice else ([], [])
    shown = [row for file, rows in by_file.items() for row in html.with_images(rows, file)]
    roofs = [gpu.ceilings for gpu in gpus]
    sections = report_sections(shown, roofs=roofs, compared=compared, notes=notes)
    summary = f"{len(records):,} records of {', '.join(map(str, places))}."
    verdicts = make_verdicts(records)
    if against:
        before = [row for file in _files(against) for row in store.read(file)]
        changed = changed_section(before, records)
        sections.insert(0, changed)
        out.print(f"against {', '.join(map(str, against))}: {changed.headline}", soft_wrap=True)
    html.write_report(sections, output, title=title, summary=summary, verdicts=verdicts)
    if markdown is not None:
        text = html.sections_markdown(sections, title=title, summary=summary, verdicts=verdicts)
        write_atomically(markdown, text.encode("utf-8", "backslashreplace"))
    if csv is not None:
        write_atomically(csv, to_csv(records).encode("utf-8", "backslashreplace"))
    for path in written:
        out.print(f"wrote {path}", soft_wrap=True, markup=False, highlight=False)


def _files(places: Iterable[Path]) -> list[Path]:
    """The files of records, each once; a folder without any stays, for the reader to refuse."""
    found: dict[Path, Path] = {}
    for place in places:
        for file in sorted(place.glob("*.jsonl")) or [place]:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _compared(
    records: "list[Measurement]", gpus: "list[Gpu]"
) -> "tuple[list[Measurement], list[str]]":
    """Advice beside what was measured on each GPU; and why there is none of a GPU."""
    from octavo.measure.report.speed import COMPARED_OPS

    found: list[Measurement] = []
    notes = []
    for gpu in gpus:
        own = [record for record in records if record.machine.gpu == gpu.name]
        if not any(record.op in COMPARED_OPS for record in own):
            continue
        try:
            with err.status(f"comparing advice for {gpu.name}"):
                from octavo.measure.advise.measured import compare_all

                found += compare_all(records, gpu)
        except (ImportError, KeyError, OctavoError) as error:
            # Of some files only, by hand, or without transformers here: the page shows what it can.
            reason = f"a record has no {error}" if isinstance(error, KeyError) else str(error)
            notes.append(f"Advice for {gpu.name} is not compared: {reason}.")
    return found, notes
