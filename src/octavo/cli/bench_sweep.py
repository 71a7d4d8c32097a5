"""octavo bench sweep: recipes × workloads of a file, resumable."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err, out, print_error, print_table, progress_bar
from octavo.cli.model_options import DeviceName, RowOptions
from octavo.cli.options import Flags, check_folder, takes_settings

if TYPE_CHECKING:
    from octavo.measure.bench.sweep import Combination, Outcome


@takes_settings
def sweep(
    rows: Annotated[RowOptions, Flags(without=("kv_cache_dtype", "skip_layers"))],
    file: Annotated[Path, typer.Argument(help="A TOML file, as above.", show_default=False)],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Append the records to this JSON Lines file; what it has is not run again.",
            show_default=False,
        ),
    ],
    device: DeviceName = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands and what has run, run nothing.")
    ] = False,
) -> None:
    """Run every recipe of a file under every workload of it.

    octavo bench sweep sweep.toml -o results/sweep.jsonl

    The file names a model (or the config of one with random weights), recipes as --kv-cache-dtype
    has them, the first of which the others are compared with, and workloads. Keys are the flags of
    octavo bench latency and octavo bench throughput, with underscores; unknown ones are errors:

    \b
    config = "llama-3.1-8b"            # or: model = "path/to/model"
    recipes = ["auto", "fp8", "fp8+head", "my-recipe.toml"]

    \b
    [engine]                           # may be left out
    max_num_batched_tokens = 8192
    compile = true

    \b
    [[latency]]                        # one batch, over the input length
    input_len = [256, "4k", "32k", "125k"]
    output_len = 128

    \b
    [[throughput]]                     # many requests
    num_prompts = 48
    input_len = 20000
    output_len = 2000
    max_concurrency = 8

    Records are appended as each combination ends. Stopped in the middle, the same command goes on:
    a combination whose records are in the file, from the same command, recipe's file, octavo and
    machine, is skipped, and said so. One that fails is reported, the others go on, and the exit
    code is 1.
    """
    from octavo.integrations.transformers.load import choose_device
    from octavo.measure.bench.peer_impls import registered_prefill
    from octavo.measure.bench.sweep import SweepFile, combinations, run_sweep

    asked = SweepFile.load(file)
    check_folder(output)
    device = choose_device(device)
    todo = combinations(asked, peers=rows.peers is not None)
    if dry_run:
        _print_plan(todo, output, device)
        return
    bar = progress_bar("combinations", len(todo), every_s=0)
    with registered_prefill(rows.peers), bar as move:

        def ended(outcome: "Outcome") -> None:
            if outcome.state == "skipped":
                text = f"skipped, its records are in {output}: {outcome.combination}"
                err.print(text, soft_wrap=True)
            move(done=todo.index(outcome.combination) + 1)

        outcomes = run_sweep(
            asked,
            todo,
            output,
            device=device,
            on_start=lambda one: move(str(one), todo.index(one)),
            on_end=ended,
        )
    _print(outcomes)
    out.print(f"Records: {output}", soft_wrap=True)
    failures = [outcome for outcome in outcomes if outcome.state == "failed"]
    for failure in failures:
        print_error(f"{failure.combination}: {failure.reason}")
    if failures:
        raise typer.Exit(1)


def _print_plan(todo: "list[Combination]", output: Path, device: str) -> None:
    """What would run, as commands, and what has run."""
    from octavo.measure import store
    from octavo.measure.bench.sweep import stored_records
    from octavo.measure.bench.timing import machine_of

    records = store.read(output) if output.exists() else []
    machine = machine_of(device)
    for one in todo:
        state = "has run" if stored_records(one, records, machine) else "would run"
        out.print(f"{state}: {one.command}", soft_wrap=True)


def _print(outcomes: "list[Outcome]") -> None:
    """One line for each combination, with its median times where it has some."""
    from octavo.measure.report.tables import Cell, Table, format_column

    rows: list[tuple[Cell, ...]] = []
    for outcome in outcomes:
        one, values = outcome.combination, [record.values for record in outcome.records]
        medians = [
            ", ".join(format_column([v[name] for v in values if name in v])) or None
            for name in ("median_ttft_ms", "median_itl_ms", "output_throughput")
        ]
        rows.append((one.kind, str(one.load), one.row.name, outcome.state, *medians))
    header = ("benchmark", "workload", "recipe", "", "TTFT (ms)", "ITL (ms)", "output tokens/s")
    print_table(Table(caption="Sweep: medians", header=header, rows=tuple(rows)))
