"""octavo bench latency, throughput and sweep: rows in the engine, in this process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import (
    TIMED_S,
    err,
    out,
    print_error,
    print_file,
    print_json,
    print_parts,
    print_table,
    print_verdicts,
    progress_bar,
    write_plots,
    write_results,
)
from octavo.cli.model_options import EngineOptions, RowOptions, SubjectOptions
from octavo.cli.options import (
    AsJson,
    Flags,
    RecordsFile,
    Strict,
    Written,
    check_file,
    field_help,
    repeat_command,
    takes_settings,
)
from octavo.errors import ConfigError
from octavo.measure.bench.cases import LatencyCase, ThroughputCase
from octavo.measure.rows import ENGINE, describe_words

if TYPE_CHECKING:
    from octavo.measure.bench.engine import Subject
    from octavo.measure.bench.sweep import Combination
    from octavo.measure.bench.vllm_engine import Installation
    from octavo.measure.records import Measurement
    from octavo.serving.engine.settings import EngineSettings

    Load = tuple[LatencyCase | ThroughputCase, int, Mapping[str, Any]]

_ROW_HELP = field_help(RowOptions)["kv_cache_dtype"]
ROWS = Flags(help={"kv_cache_dtype": f"{_ROW_HELP} A row is {describe_words(ENGINE)}."})


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Where the results of a load in the engine go.

    Attributes:
        output_json: Write vLLM's JSON file of a run; with several rows or lengths, one for each,
            with both in its name.
    """

    strict: Strict = False
    output: RecordsFile = None
    as_json: AsJson = False
    output_json: Written = None


@takes_settings
def latency(
    *,
    context: typer.Context,
    subject: SubjectOptions,
    rows: Annotated[RowOptions, ROWS],
    case: Annotated[
        LatencyCase, Flags(names={"num_warmups": "--num-iters-warmup"}, without=("input_lens",))
    ],
    engine: Annotated[EngineOptions, Flags(without=("max_num_seqs",))],
    input_len: str | None = None,
    plot: Written = None,
    results: ResultOptions,
) -> None:
    """Time one batch in the engine: to its first token (TTFT), and between tokens (ITL).

    octavo bench latency --config llama-3.1-8b --input-len 256,4096,32k,125k
    --kv-cache-dtype auto --kv-cache-dtype fp8 -o results.jsonl

    Rows run one after the other with the same weights and prompts. Over the context, ITL is a
    straight line: its intercept is the weights, its slope the keys and values that are read. TTFT
    is a curve with a square term, attention. Both have intervals of 95 %, if there are lengths to
    spare: three for the line, four for the curve. The break-even is the context from which on a
    row is faster than the first one; negative: at any.

    Every engine also answers short prompts, which are compared with the stock model's: the same
    tokens in float32, log-probabilities within what rounding explains otherwise (relative_rms). A
    row that is wrong has no records, and the exit code is 1.

    Attributes:
        input_len: Tokens of a prompt, with commas between; left out, 256,4096,32k,125k on a GPU
            and 64,512 elsewhere, as far as the model's context goes.
        plot: Write an HTML page: both times over the input length, fits, break-even.
    """
    from octavo.amounts import parse_tokens
    from octavo.measure.report.html import check_packages
    from octavo.measure.report.latency import latency_sections

    subject = subject.chosen()
    lengths = input_len or ("256,4096,32k,125k" if subject.is_cuda else "64,512")
    case = replace(case, input_lens=tuple(map(parse_tokens, lengths.split(","))))
    if plot is not None:
        check_packages()

    def fitting(model: "Subject") -> "Load":
        own = case if input_len else case.within(model.max_context)
        return own, own.num_runs, {"input_len": input_len or ",".join(map(str, own.input_lens))}

    settings = engine.settings(max_num_seqs=case.batch_size)
    records, failures = _run(context, subject, rows, results, settings, fitting)
    if plot is not None:
        title = "Latency over the input length"
        write_plots(plot, latency_sections(records), records, title)
    _end(failures)


@takes_settings
def throughput(
    *,
    context: typer.Context,
    subject: SubjectOptions,
    rows: Annotated[RowOptions, ROWS],
    case: Annotated[ThroughputCase, Flags(without=("input_len", "output_len"))],
    engine: EngineOptions,
    input_len: str | None = None,
    output_len: str | None = None,
    results: ResultOptions,
) -> None:
    """Serve random prompts with the engine in this process: tokens per second, and latency.

    octavo bench throughput --config gpt-oss-like --num-prompts 48 --max-concurrency 8
    --input-len 20000 --output-len 2000 --range-ratio 0.15 --kv-cache-dtype auto
    --kv-cache-dtype fp8 --kv-cache-dtype fp8+skip=sliding_window -o results.jsonl

    The same load as that of octavo bench serve, with the same fields (vLLM's names), and no HTTP
    between. Rows run one after the other with the same weights and prompts; answers have the
    length that was asked for. Gains are against the first row, above 1 is better. As in octavo
    bench latency, a row that is wrong has no record, and the exit code is 1.

    Attributes:
        input_len: Tokens of a prompt; left out, 1024 on a GPU and 64 elsewhere, or what the
            model's context has room for.
        output_len: Tokens of an answer; 128 on a GPU, 16 elsewhere.
    """
    from octavo.amounts import parse_tokens

    subject = subject.chosen()
    sizes = ("1024", "128") if subject.is_cuda else ("64", "16")
    num_in, num_out = parse_tokens(input_len or sizes[0]), parse_tokens(output_len or sizes[1])
    case = replace(case, input_len=num_in, output_len=num_out)

    def fitting(model: "Subject") -> "Load":
        own = case if input_len else case.within(model.max_context)
        num_tokens = sum(prompt.output_len for prompt in own.draw(model.vocab_size))
        taken = {"input_len": own.input_len, "output_len": own.output_len}
        return own, num_tokens, taken

    _, failures = _run(context, subject, rows, results, engine.settings(), fitting)
    _end(failures)


def _run(
    context: typer.Context,
    options: SubjectOptions,
    rows: RowOptions,
    asked: ResultOptions,
    settings: "EngineSettings",
    fitting: "Callable[[Subject], Load]",
) -> "tuple[Sequence[Measurement], list[str]]":
    """Run a load with all rows, show and write its records; those, and why rows do not count.

    fitting: the load for a model, how many steps a row takes, and the flags that say so. What
    cannot be is an error before the model is made.
    """
    from octavo.measure.bench.engine import check_rows, make_rows, open_subject
    from octavo.measure.bench.engine_load import run_load
    from octavo.measure.bench.engine_tables import told, vllm_documents
    from octavo.measure.bench.peer_impls import registered_prefill
    from octavo.measure.bench.vllm_engine import twin_rows
    from octavo.measure.run import Records

    check_rows(rows.names, rows.skip_layers)
    vllm = _find_vllm(rows)
    with err.status("making the model"):
        subject = open_subject(
            options.model,
            options.config,
            dtype=options.dtype,
            device=str(options.device),
            layers=options.layers,
        )
        found = make_rows(rows.names, subject, skip_layers=rows.skip_layers)
    case, num_steps, taken = fitting(subject)
    taken = {"config": options.config, "kv_cache_dtype": rows.names, **taken}
    twins = [] if vllm is None else twin_rows(found, has_plug_in=vllm.has_plug_in)
    num_rows = len(found) + len(twins)
    bar = progress_bar("measuring", num_rows * num_steps, every_s=TIMED_S)
    with registered_prefill(rows.peers), bar as move:
        result = run_load(
            subject,
            found,
            case,
            settings,
            command=repeat_command(context, taken=taken),
            records=Records.of_file(asked.output),
            vllm=vllm,
            on_step=move,
        )
    if asked.as_json:
        print_json(result.records)
    else:
        print_parts(told(result.records))
        print_verdicts(result.records)
        print_file(asked.output)
    if asked.output_json is not None:
        documents = vllm_documents(result)
        is_several = len(documents) + len(result.failures) > 1
        write_results(asked.output_json, documents, is_several=is_several)
    return result.records, list(result.failures.values())


def _find_vllm(rows: RowOptions) -> "Installation | None":
    """vLLM in the folder of peers."""
    from octavo.measure.bench.vllm_engine import Installation

    found = None if rows.peers is None else Installation.find(rows.peers)
    if found is not None:
        return replace(found, has_plug_in=rows.plug_in)
    if rows.plug_in:
        raise ConfigError(
            f"--plug-in: expected vLLM in the folder of --peers, got {rows.peers or 'none'}"
        )
    if rows.peers is not None:
        err.print(f"no vLLM in {rows.peers}: its engine is not measured", soft_wrap=True)
    return None


def _end(failures: Sequence[str]) -> None:
    """Say what failed, and exit with 1 if something did."""
    for failure in failures:
        print_error(failure)
    if failures:
        raise typer.Exit(1)


@takes_settings
def sweep(
    *,
    rows: Annotated[RowOptions, Flags(without=("kv_cache_dtype", "skip_layers", "plug_in"))],
    file: Annotated[Path, typer.Argument()],
    output: Annotated[Path, typer.Option("--output", "-o", callback=check_file)],
    device: str | None = None,
    is_dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
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

    Attributes:
        file: A TOML file, as above.
        output: Append the records to this JSON Lines file; what it has is not run again.
        device: cuda, cuda:1, cpu; left out, a GPU if there is one.
        is_dry_run: Print the commands and what has run, run nothing.
    """
    from octavo.integrations.transformers.load import choose_device
    from octavo.measure.bench.peer_impls import registered_prefill
    from octavo.measure.bench.sweep import SweepFile, combinations, outcome_table, run_sweep

    asked = SweepFile.load(file)
    device = choose_device(device)
    todo = combinations(asked, peers=rows.peers is not None)
    if is_dry_run:
        _print_plan(todo, output, device)
        return
    outcomes = []
    bar = progress_bar("combinations", len(todo), every_s=0)
    with registered_prefill(rows.peers), bar as move:
        move(str(todo[0]), 0)
        for number, outcome in enumerate(run_sweep(asked, todo, output, device=device), 1):
            if outcome.state == "skipped":
                text = f"skipped, its records are in {output}: {outcome.combination}"
                err.print(text, soft_wrap=True)
            move(str(todo[min(number, len(todo) - 1)]), number)
            outcomes.append(outcome)
    print_table(outcome_table(outcomes))
    print_verdicts([record for outcome in outcomes for record in outcome.records])
    print_file(output)
    _end([f"{one.combination}: {one.reason}" for one in outcomes if one.state == "failed"])


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
