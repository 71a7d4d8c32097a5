"""octavo demo: the whole story on this machine, from a real model to a report."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import out
from octavo.cli.tables import print_table


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report and its records.")
    ] = Path("octavo-demo"),
) -> None:
    """Show what FP8 does to a real model's attention, on this machine.

    Loads SmolLM2-135M-Instruct, runs a page of text through it, quantizes the queries, keys and
    values of some layers and measures the error by format, granularity and way to accumulate. Ends
    in OUTPUT/report.html; the numbers are in OUTPUT/records.jsonl.

    Takes about a minute on a CPU and needs no GPU.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from octavo.measure import store
    from octavo.measure.evaluate.demo import prepare, stages
    from octavo.measure.records import Measurement
    from octavo.measure.report.demo import demo_sections
    from octavo.measure.report.html import write_report

    output.mkdir(parents=True, exist_ok=True)
    records: list[Measurement] = []
    model, input_ids = prepare()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out) as progress:
        for stage in stages(model, input_ids, "octavo demo"):
            task = progress.add_task(stage.title, total=1)
            records.extend(stage.run())
            progress.update(task, completed=1)

    sections = demo_sections(records)
    for section in sections:
        out.print()
        out.print(section.title, style="bold")
        for table in section.tables:
            print_table(table)
    store.append(output / "records.jsonl", records)
    write_report(
        sections,
        output / "report.html",
        title="octavo demo",
        summary="What FP8 does to the attention of SmolLM2-135M-Instruct, measured on a CPU with "
        "octavo's reference implementation.",
        machines=[records[0].machine],
        commands=["octavo demo"],
    )
    out.print(f"\nReport: {output / 'report.html'}", soft_wrap=True)
