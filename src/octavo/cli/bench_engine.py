"""octavo bench latency and octavo bench throughput: rows in the engine, in this process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import (
    TIMED_S,
    err,
    out,
    print_error,
    print_file,
    print_json,
    print_table,
    progress_bar,
    write_results,
)
from octavo.cli.model_options import EngineOptions, RowOptions, SubjectOptions
from octavo.cli.options import (
    AsJson,
    Flags,
    RecordsFile,
    Strict,
    check_folder,
    repeat_command,
    takes_settings,
)
from octavo.measure.bench.cases import LatencyCase, ThroughputCase, Workload

if TYPE_CHECKING:
    from octavo.measure.bench.engine import Subject
    from octavo.measure.bench.engine_run import RowResult
    from octavo.measure.records import Measurement
    from octavo.measure.rows import Row

TTFT_COLUMNS = (
    *("input_len", "row", "median_ttft_ms", "mean_ttft_ms", "p20_ttft_ms", "p80_ttft_ms"),
    *("ttft_speedup", "relative_rms"),
)
ITL_COLUMNS = (
    *("input_len", "row", "median_itl_ms", "mean_itl_ms", "p20_itl_ms", "p80_itl_ms"),
    *("p99_itl_ms", "itl_speedup"),
)
SPEED_COLUMNS = (
    *("row", "duration", "request_throughput", "output_throughput", "output_throughput_gain"),
    *("total_token_throughput", "relative_rms"),
)
LATENCY_COLUMNS = (
    *("row", "median_ttft_ms", "p99_ttft_ms", "median_ttft_gain"),
    *("median_itl_ms", "p99_itl_ms", "median_itl_gain", "median_e2el_ms"),
)


@takes_settings
def latency(
    context: typer.Context,
    subject: SubjectOptions,
    rows: RowOptions,
    case: Annotated[
        LatencyCase, Flags(names={"num_warmups": "--num-iters-warmup"}, without=("input_lens",))
    ],
    engine: Annotated[EngineOptions, Flags(without=("max_num_seqs",))],
    input_len: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a prompt, with commas between; left out, 256,4096,32k,125k on a GPU "
            "and 64,512 elsewhere, as far as the model's context goes.",
            show_default=False,
        ),
    ] = None,
    strict: Strict = False,
    output: RecordsFile = None,
    as_json: AsJson = False,
    output_json: Annotated[
        Path | None,
        typer.Option(
            help="Write vLLM's JSON file of a run; with several rows or lengths, one for each, "
            "with both in its name.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write an HTML page: both times over the input length, fits, break-even.",
            show_default=False,
        ),
    ] = None,
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
    """
    from octavo.amounts import parse_tokens
    from octavo.measure import store
    from octavo.measure.bench.latency import run_latency, vllm_result
    from octavo.measure.bench.peer_impls import registered_prefill
    from octavo.measure.report.html import check_packages

    subject = subject.chosen()
    lengths = input_len or ("256,4096,32k,125k" if _is_cuda(subject) else "64,512")
    case = replace(case, input_lens=tuple(map(parse_tokens, lengths.split(","))))
    settings = engine.settings(max_num_seqs=case.batch_size)
    if plot is not None:
        check_folder(plot)
        check_packages()
    model, found = _open(subject, rows, output, output_json)
    if input_len is None:
        case = case.within(model.max_context)
        lengths = ",".join(map(str, case.input_lens))
    taken = _taken(subject, rows) | {"input_len": lengths}
    bar = progress_bar("measuring", len(found) * case.num_runs, every_s=TIMED_S)
    with registered_prefill(rows.peers), bar as move:
        results = run_latency(
            model,
            found,
            case,
            settings,
            command=repeat_command(context, taken=taken),
            on_row=lambda result: store.append(output, result.records) if output else None,
            on_run=move,
        )
    records = _show(results, _print_latency, output, as_json)
    if output_json is not None:
        documents = {
            (result.row.name, length): vllm_result(result, length)
            for result in results
            for length in result.latencies_s
        }
        write_results(output_json, documents, is_several=len(documents) > 1)
    if plot is not None:
        _plot(records, plot)
    _end(results)


@takes_settings
def throughput(
    context: typer.Context,
    subject: SubjectOptions,
    rows: RowOptions,
    workload: Annotated[Workload, Flags(without=("input_len", "output_len"))],
    case: Annotated[ThroughputCase, Flags(without=("workload",))],
    engine: EngineOptions,
    input_len: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a prompt; left out, 1024 on a GPU and 64 elsewhere, or what the "
            "model's context has room for.",
            show_default=False,
        ),
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(
            help="Tokens of an answer; 128 on a GPU, 16 elsewhere.",
            show_default=False,
        ),
    ] = None,
    strict: Strict = False,
    output: RecordsFile = None,
    as_json: AsJson = False,
    output_json: Annotated[
        Path | None,
        typer.Option(
            help="Write vLLM's JSON file of a run; with several rows one for each, with its name.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve random prompts with the engine in this process: tokens per second, and latency.

    octavo bench throughput --config gpt-oss-like --num-prompts 48 --max-concurrency 8
    --input-len 20000 --output-len 2000 --range-ratio 0.15 --kv-cache-dtype auto
    --kv-cache-dtype fp8 --kv-cache-dtype fp8+skip=sliding_window -o results.jsonl

    The same load as that of octavo bench serve, with the same fields (vLLM's names), and no HTTP
    between. Rows run one after the other with the same weights and prompts; answers have the
    length that was asked for. Gains are against the first row, above 1 is better. As in octavo
    bench latency, a row that is wrong has no record, and the exit code is 1.
    """
    from octavo.amounts import parse_tokens
    from octavo.measure import store
    from octavo.measure.bench.peer_impls import registered_prefill
    from octavo.measure.bench.throughput import run_throughput, vllm_result

    subject = subject.chosen()
    workload = replace(
        workload,
        input_len=parse_tokens(input_len or ("1024" if _is_cuda(subject) else "64")),
        output_len=parse_tokens(output_len or ("128" if _is_cuda(subject) else "16")),
    )
    settings = engine.settings()
    model, found = _open(subject, rows, output, output_json)
    if input_len is None:
        workload = workload.within(model.max_context)
    taken = _taken(subject, rows) | {
        "input_len": workload.input_len,
        "output_len": workload.output_len,
    }
    num_tokens = sum(prompt.output_len for prompt in workload.draw(model.vocab_size))
    bar = progress_bar("tokens", len(found) * num_tokens, every_s=TIMED_S)
    with registered_prefill(rows.peers), bar as move:
        results = run_throughput(
            model,
            found,
            replace(case, workload=workload),
            settings,
            command=repeat_command(context, taken=taken),
            on_row=lambda result: store.append(output, result.records) if output else None,
            on_token=lambda what: move(f"{what}, tokens"),
        )
    _show(results, _print_throughput, output, as_json)
    if output_json is not None:
        documents = {(r.row.name,): vllm_result(record) for r in results for record in r.records}
        write_results(output_json, documents, is_several=len(results) > 1)
    _end(results)


def _is_cuda(subject: SubjectOptions) -> bool:
    return str(subject.device).startswith("cuda")


def _open(
    options: SubjectOptions, rows: RowOptions, *files: Path | None
) -> "tuple[Subject, list[Row]]":
    """The model and its rows; what cannot be is an error before the model is made."""
    from octavo.measure.bench.engine import check_rows, make_rows, open_subject

    check_rows(rows.names, rows.skip_layers)
    for file in files:
        check_folder(file)
    with err.status("making the model"):
        subject = open_subject(
            options.model,
            options.config,
            dtype=options.dtype,
            device=str(options.device),
            layers=options.layers,
        )
        return subject, make_rows(rows.names, subject, skip_layers=rows.skip_layers)


def _taken(subject: SubjectOptions, rows: RowOptions) -> dict[str, object]:
    """What was measured where nothing was said."""
    return {"config": subject.config, "kv_cache_dtype": rows.names}


def _print_latency(results: "Sequence[RowResult]", records: "Sequence[Measurement]") -> None:
    from octavo.measure.fit import break_even, curve_break_even
    from octavo.measure.report.latency import latency_sections
    from octavo.measure.report.tables import from_records

    case = records[0].case
    sizes = f"{case['batch_size']} at once, {case['output_len']} tokens out"
    lengths = [record for record in records if record.op == "latency"]
    lengths.sort(key=lambda record: int(record.case["input_len"]))
    caption = f"To the first token: {sizes}"
    print_table(from_records(lengths, caption=caption, columns=TTFT_COLUMNS))
    print_table(from_records(lengths, caption=f"Between tokens: {sizes}", columns=ITL_COLUMNS))
    for section in latency_sections(records):
        for table in section.tables:
            print_table(table)
        for note in section.paragraphs[1:]:
            out.print(note, soft_wrap=True)
    first, *others = results
    for result in others:
        name, base = result.row.name, first.row.name
        if result.line is not None and first.line is not None:
            found = break_even(result.line, first.line)
            out.print(f"ITL: {name} is {found} than {base}", soft_wrap=True)
        if result.curve is not None and first.curve is not None:
            found = curve_break_even(result.curve, first.curve)
            out.print(
                f"TTFT: {name} is {found} than {base}, by the curves between the shortest and the "
                "longest input",
                soft_wrap=True,
            )


def _print_throughput(results: "Sequence[RowResult]", records: "Sequence[Measurement]") -> None:
    from octavo.measure.report.tables import from_records

    case = records[0].case
    caption = (
        f"{case['num_prompts']} requests, {case.get('max_concurrency', 'all')} at once, "
        f"{case['input_len']} tokens in and {case['output_len']} out, "
        f"± {100 * float(case['range_ratio']):g} %"
    )
    print_table(from_records(records, caption=caption, columns=SPEED_COLUMNS))
    print_table(from_records(records, caption="Latency", columns=LATENCY_COLUMNS))
    for record in records:
        values = record.values
        out.print(
            f"{record.case['row']}: throughput {values['request_throughput']:.2f} requests/s, "
            f"{values['total_token_throughput']:.2f} total tokens/s, "
            f"{values['output_throughput']:.2f} output tokens/s",
            soft_wrap=True,
        )


def _plot(records: "Sequence[Measurement]", path: Path) -> None:
    from octavo.measure.report.html import write_report
    from octavo.measure.report.latency import latency_sections

    write_report(
        latency_sections(records),
        path,
        title="Latency over the input length",
        machines=[record.machine for record in records],
        commands=[record.command for record in records],
    )
    err.print(f"Plot: {path}", soft_wrap=True)


def _show(
    results: "Sequence[RowResult]",
    print_tables: "Callable[[Sequence[RowResult], Sequence[Measurement]], None]",
    output: Path | None,
    as_json: bool,
) -> "list[Measurement]":
    """Print the records of all rows, as JSON or tables, and return them."""
    records = [record for result in results for record in result.records]
    if as_json:
        print_json(records)
        return records
    case = records[0].case
    out.print(f"{case['model']}, {case['dtype']}: {records[0].machine}", soft_wrap=True)
    print_tables(results, records)
    print_file(output)
    return records


def _end(results: "Sequence[RowResult]") -> None:
    """Exit with 1 if a row does not count, after it was said why."""
    failures = [result.failure for result in results if result.failure is not None]
    for failure in failures:
        print_error(failure)
    if failures:
        raise typer.Exit(1)
