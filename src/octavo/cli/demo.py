"""octavo demo: the whole story on this machine, from real models to a report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import out
from octavo.cli.tables import print_table

if TYPE_CHECKING:
    from octavo.measure.evaluate.demo import Stage
    from octavo.measure.records import Measurement
    from octavo.measure.report.html import Section


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report, records and scales.")
    ] = Path("octavo-demo"),
) -> None:
    """Show what FP8 does to real models' attention, on this machine.

    Two models take part. The small chart reader that comes with octavo: static scales are
    calibrated on charts of one look, then it answers questions about charts of another, in BF16,
    FP8 dynamic and FP8 static. And SmolLM2-135M-Instruct: queries, keys and values of some layers
    are quantized, and the error is measured by format, granularity and way to accumulate.

    Ends in OUTPUT/report.html; the numbers are in OUTPUT/records.jsonl, the scales in
    OUTPUT/scales.json.

    Takes about two minutes on a CPU and needs no GPU.
    """
    from octavo.integrations.transformers.chart_reader import load_chart_reader
    from octavo.measure.evaluate.chart_demo import ChartDemo, one_thread
    from octavo.measure.evaluate.chartqa import chartqa_table
    from octavo.measure.evaluate.demo import prepare, stages
    from octavo.measure.report.calibration import calibration_section
    from octavo.measure.report.chart_demo import reading_section
    from octavo.measure.report.demo import demo_sections

    output.mkdir(parents=True, exist_ok=True)
    command = "octavo demo"
    with one_thread():
        model, input_ids = prepare()
        charts = ChartDemo(load_chart_reader(), output / "scales.json", command)
        records = _run([*stages(model, input_ids, command), *charts.stages], output)
    answered = [record for record in records if record.op == "chartqa"]
    calibrated = [record for record in records if record.op == "calibrate"]
    table = chartqa_table(answered)
    _finish(
        [
            reading_section(answered, table, charts.pictures(), charts.num_changed()),
            calibration_section(calibrated),
            *demo_sections(records),
        ],
        records,
        output / "report.html",
        command,
    )


def _run(stages: "list[Stage]", output: Path) -> "list[Measurement]":
    """The records of all stages; each stage's are on disk before the next begins."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from octavo.measure import store

    records: list[Measurement] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out) as progress:
        for stage in stages:
            task = progress.add_task(stage.title, total=stage.num_steps)
            found = list(stage.run(lambda count, task=task: progress.advance(task, count)))  # type: ignore[misc]
            progress.update(task, completed=stage.num_steps)
            if found:
                store.append(output / "records.jsonl", found)
            records += found
    return records


def _finish(
    sections: "list[Section]", records: "list[Measurement]", path: Path, command: str
) -> None:
    """Print the tables and write the page."""
    from octavo.measure.report.html import write_report

    for section in sections:
        out.print()
        out.print(section.title, style="bold")
        for table in section.tables:
            print_table(table)
    write_report(
        sections,
        path,
        title="octavo demo",
        summary="What FP8 does to the attention of two real models, a chart reader and "
        "SmolLM2-135M-Instruct, measured on a CPU with octavo's reference implementation.",
        machines=[records[0].machine],
        commands=[command],
    )
    out.print(f"\nReport: {path}", soft_wrap=True)
