"""octavo report: one page from records."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err, out
from octavo.cli.options import check_folder
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.measure.advise.gpus import Gpu
    from octavo.measure.records import Measurement
    from octavo.measure.report.kernels import Roof

RESULTS = Path("results")


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RESULTS",
            help="Files of records (JSON Lines), or folders of them; results/ if left out.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
    markdown: Annotated[
        Path | None,
        typer.Option("--md", help="Also write texts and tables as Markdown.", show_default=False),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv", help="Also write every record as a row of a CSV file.", show_default=False
        ),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The title of the page.")] = "octavo report",
    advice: Annotated[
        bool,
        typer.Option(
            "--advice/--no-advice",
            help="Compare advice with what was measured. It loads torch, transformers and "
            "diffusers, which takes longer than all the rest.",
        ),
    ] = True,
) -> None:
    """Write one HTML page from records: plots, tables, machines, commands. No GPU is needed.

    octavo report results -o report.html --md report.md --csv records.csv

    The page has a section for each benchmark, evaluation and calibration that the records are of,
    loads nothing, and says which records it does not show. Advice is made again without each
    model's own records, and shown beside what was measured.
    """
    from octavo.atomic import write_atomically
    from octavo.measure import store
    from octavo.measure.report.html import check_packages, sections_markdown, write_report
    from octavo.measure.report.pages import report_sections
    from octavo.measure.report.pictures import with_pictures
    from octavo.measure.report.tables import write_csv

    _check_paths([path for path in (output, markdown, csv) if path is not None])
    check_packages()
    places = results or [RESULTS]
    by_file = {file: store.read(file) for file in _files(places)}
    records = [row for rows in by_file.values() for row in rows]
    gpus = _known_gpus(records)
    compared, notes = _compared(records, gpus) if advice else ([], [])
    shown = [row for file, rows in by_file.items() for row in with_pictures(rows, file)]
    sections = report_sections(shown, roofs=_roofs(gpus), compared=compared, notes=notes)
    summary = f"{len(records):,} records of {', '.join(map(str, places))}."
    machines = [record.machine for record in records]
    write_report(sections, output, title=title, summary=summary, machines=machines)
    if markdown is not None:
        text = sections_markdown(sections, title=title, summary=summary)
        write_atomically(markdown, text.encode("utf-8", "backslashreplace"))
    if csv is not None:
        write_csv(records, csv)
    for path in (output, markdown, csv):
        if path is not None:
            out.print(f"wrote {path}", soft_wrap=True, markup=False, highlight=False)


def _check_paths(paths: list[Path]) -> None:
    """Raise ConfigError if a file could not be written, or two would be the same."""
    for path in paths:
        check_folder(path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"expected different files, got {', '.join(map(str, paths))}")


def _files(places: list[Path]) -> list[Path]:
    """The files of records, each once; a folder without any stays, for the reader to refuse."""
    found: dict[Path, Path] = {}
    for place in places:
        for file in sorted(place.glob("*.jsonl")) or [place]:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _known_gpus(records: "list[Measurement]") -> "list[Gpu]":
    from octavo.measure.advise.gpus import all_gpus

    names = {record.machine.gpu for record in records}
    return [gpu for gpu in all_gpus().values() if gpu.name in names]


def _roofs(gpus: "list[Gpu]") -> "list[Roof]":
    from octavo.measure.report.kernels import Roof

    return [
        Roof(
            gpu=gpu.name,
            gb_per_s=gpu.ceilings.gb_per_s,
            bf16_tflops=gpu.ceilings.bf16_tflops,
            fp8_tflops=gpu.ceilings.fp8_tflops,
            source=gpu.ceilings.source,
        )
        for gpu in gpus
    ]


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
        machine = own[0].machine
        try:
            with err.status(f"comparing advice for {gpu.name}"):
                from octavo.measure.advise.measured import as_records, compare_all

                rows = compare_all(records, gpu)
        except (ImportError, KeyError, OctavoError) as error:
            # Of some files only, by hand, or without transformers here: the page shows what it can.
            reason = f"a record has no {error}" if isinstance(error, KeyError) else str(error)
            notes.append(f"Advice for {gpu.name} is not compared: {reason}.")
            continue
        found += as_records(rows, machine, "octavo report")
    return found, notes
