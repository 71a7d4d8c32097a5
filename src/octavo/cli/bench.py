"""octavo bench: how fast ops, models and servers run on this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.bench_engine import latency, sweep, throughput
from octavo.cli.bench_models import Folder, diffusion, encoder, generate, mm_processor
from octavo.cli.bench_serve import serve
from octavo.cli.console import err, out
from octavo.cli.options import PLACES, AsJson, RecordsFile, repeat_command, takes_settings
from octavo.cli.records import Collected, print_file, print_json
from octavo.cli.tables import print_table

if TYPE_CHECKING:
    from octavo.measure.bench.kernels import Task

app = typer.Typer(add_completion=False, help="Measure speed; every result is checked first.")
app.command("diffusion")(diffusion)
app.command("encoder")(encoder)
app.command("generate")(generate)
app.command("latency")(latency)
app.command("mm-processor")(mm_processor)
app.command("serve", context_settings={"allow_extra_args": True})(serve)
app.command("sweep")(sweep)
app.command("throughput")(throughput)

VALUES = (
    *("median_ms", "p20_ms", "p80_ms", "tflops", "gb_per_s", "of_ceiling_percent"),
    *("speedup", "relative_rms", "sm_mhz", "watts"),
)


@app.callback()
def bench() -> None:
    """Measure speed on this machine; every result is checked before its time counts."""


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """Which ops are timed, beside whom, and how.

    Attributes:
        op: Only this op; may be given more than once.
        peers: Folder with other libraries' kernels (FlashAttention-3's *.abi3.so, the cudnn
            package); those that are installed are found without it.
        jobs: Processes that compile kernels before they are timed.
        tune: Search for launch settings first, and keep the winners for this GPU. Compiles every
            candidate: allow minutes.
        load_s: Time each participant after it alone has loaded the GPU for so long, at the clock
            that the power limit leaves it; all in turn, at a clock they share, unless given.
    """

    op: tuple[str, ...] = ()
    peers: Annotated[Path | None, Folder] = None
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1)] = 1
    tune: Annotated[bool, typer.Option("--tune")] = False
    load_s: Annotated[float | None, typer.Option("--load", min=0.1, metavar="SECONDS")] = None


@app.command()
@takes_settings
def kernels(
    context: typer.Context,
    asked: KernelBench,
    output: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
    """Time each op with each implementation and each peer that is installed.

    Every result is compared with float64 first; a wrong one ends the run. On a GPU the calls are
    replayed in CUDA graphs over inputs that rotate through more than the L2 cache. The speed-up is
    that over the fastest BF16 participant of the same run; the ceiling is the larger share of this
    machine's own memory bandwidth or matrix products, measured at the start. Who could not take
    part is listed, with the reason.
    """
    from rich.progress import track

    from octavo.kernels.device import default_device
    from octavo.measure.bench.benchmark import measure_ceilings, run_benchmark
    from octavo.measure.bench.kernels import SUITES, benchmarks
    from octavo.measure.report.tables import Table, from_records

    collected = Collected(output)
    if asked.tune:
        _tune(asked, output)
    if asked.jobs > 1:
        from octavo.measure.bench.kernels import tasks_of_benchmarks

        names = asked.op or SUITES
        _precompile([t for n in names for t in tasks_of_benchmarks(n, asked.peers)], asked.jobs)
    device = default_device().torch_device
    command = repeat_command(context, without=(*PLACES, "peers", "jobs", "tune"))
    ceilings = measure_ceilings(device)
    chosen = benchmarks(device, list(asked.op), asked.peers)
    for benchmark in track(chosen, description="measuring", console=err):
        collected.keep(*run_benchmark(benchmark, device, command, ceilings, asked.load_s))
    if as_json:
        return print_json(collected.records)
    for name in dict.fromkeys(record.op for record in collected.records):
        of_op = [record for record in collected.records if record.op == name]
        cases = dict.fromkeys(case for record in of_op for case in record.case)
        print_table(from_records(of_op, caption=name, columns=("impl", *cases, *VALUES)))
    if rows := dict.fromkeys((o.op, o.name, o.operands, o.reason) for o in collected.objections):
        header = ("op", "impl", "operands", "why not")
        print_table(Table(caption="Not measured here", header=header, rows=tuple(rows)))
    print_file(output)


def _precompile(tasks: "list[Task]", jobs: int) -> None:
    from rich.progress import track

    from octavo.measure.bench.kernels import precompile

    done = precompile(tasks, jobs)
    for _ in track(done, total=len(tasks), description="compiling", console=err):
        pass


def _tune(asked: KernelBench, output: Path | None) -> None:
    """Search for the settings of some ops, or of all that have any."""
    from rich.progress import track

    from octavo.kernels import tuning
    from octavo.kernels.device import default_device
    from octavo.measure import store
    from octavo.measure.bench.kernels import SEARCHES, searches, tasks_of_searches, tune
    from octavo.measure.report.tables import from_records

    device = default_device()
    names = list(asked.op or SEARCHES)
    if asked.jobs > 1:
        _precompile([task for name in names for task in tasks_of_searches(name)], asked.jobs)
    chosen = [search for name in names for search in searches(name, device)]
    for search in track(chosen, description="tuning", console=err):
        records = tune(search, device, tuning.FOLDER, "octavo bench kernels --tune")
        records.sort(key=lambda record: record.values["median_ms"])
        if output is not None:
            store.append(output, records)
        columns = ("impl", "is_winner", "median_ms", "p20_ms", "p80_ms")
        caption = f"{search.op}: {search.problem}"
        print_table(from_records(records[:5], caption=caption, columns=columns))
    out.print(f"Winners: {tuning.FOLDER / tuning.file_name(device)}", soft_wrap=True)
