"""octavo bench: how fast the ops run on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import err, out
from octavo.cli.tables import print_table

app = typer.Typer(add_completion=False, help="Measure speed; every result is checked first.")


@app.callback()
def bench() -> None:
    """Measure speed on this machine; every result is checked before its time counts."""


@app.command()
def kernels(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Append the records to this JSON Lines file."),
    ] = None,
) -> None:
    """Time each op with each of its implementations, after comparing it with float64."""
    from rich.progress import track

    from octavo.kernels.device import default_device
    from octavo.measure import store
    from octavo.measure.bench.kernels import benchmarks, run_benchmarks
    from octavo.measure.records import Measurement
    from octavo.measure.report.tables import from_records

    device = default_device().torch_device
    records: list[Measurement] = []
    for benchmark in track(benchmarks(device), description="measuring", console=err):
        records += run_benchmarks([benchmark], device, "octavo bench kernels")
    names = ("op", "operands", "shape", "impl", "median_ms", "p20_ms", "p80_ms", "relative_rms")
    print_table(from_records(records, caption="Median and 20/80 % quantiles", columns=names))
    if output is not None:
        store.append(output, records)
        out.print(f"Records: {output}", soft_wrap=True)
