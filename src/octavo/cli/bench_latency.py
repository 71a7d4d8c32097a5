"""octavo bench latency: one batch, time to the first token and between tokens, by context."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import err, out, print_error
from octavo.cli.engine_flags import (
    DEFAULT_ROWS,
    BatchedTokens,
    Compile,
    Config,
    DeviceName,
    Dtype,
    EnforceEager,
    Layers,
    MemoryFraction,
    Model,
    NumPages,
    PageSize,
    Peers,
    Rows,
    Seed,
    SkipLayers,
    batch_limits,
    choose_subject,
    command_line,
    make_settings,
)
from octavo.cli.options import AsJson, RecordsFile, Strict, check_folder, row_file
from octavo.cli.still_progress import StillProgress
from octavo.cli.tables import print_table

if TYPE_CHECKING:
    from octavo.measure.bench.latency import LatencyResult

TTFT_COLUMNS = (
    *("input_len", "row", "median_ttft_ms", "mean_ttft_ms", "p20_ttft_ms", "p80_ttft_ms"),
    *("ttft_speedup", "relative_rms"),
)
ITL_COLUMNS = (
    *("input_len", "row", "median_itl_ms", "mean_itl_ms", "p20_itl_ms", "p80_itl_ms"),
    *("p99_itl_ms", "itl_speedup"),
)


def latency(
    model: Model = None,
    config: Config = None,
    input_len: Annotated[
        str | None,
        typer.Option(
            "--input-len",
            help="Tokens of a prompt, with commas between; left out, 256,4096,32k,125k on a GPU "
            "and 64,512 elsewhere, as far as the model's context goes.",
            show_default=False,
        ),
    ] = None,
    output_len: Annotated[
        int, typer.Option("--output-len", min=2, help="Tokens of an answer.")
    ] = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences at once.")] = 1,
    num_iters: Annotated[
        int, typer.Option("--num-iters", min=1, help="Batches of each length.")
    ] = 3,
    num_warmups: Annotated[
        int,
        typer.Option("--num-iters-warmup", min=0, help="Batches before, with short answers."),
    ] = 1,
    kv_cache_dtype: Rows = None,
    skip_layers: SkipLayers = None,
    peers: Peers = None,
    layers: Layers = None,
    dtype: Dtype = "auto",
    device: DeviceName = None,
    max_num_batched_tokens: BatchedTokens = None,
    memory_fraction: MemoryFraction = 0.9,
    num_pages: NumPages = None,
    page_size: PageSize = 64,
    enforce_eager: EnforceEager = False,
    compile: Compile = False,
    seed: Seed = 0,
    strict: Strict = False,
    output: RecordsFile = None,
    as_json: AsJson = False,
    output_json: Annotated[
        Path | None,
        typer.Option(
            "--output-json",
            help="Write vLLM's JSON file of a run; with several rows or lengths, one for each, "
            "with both in its name.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
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
    from octavo.measure import store
    from octavo.measure.advise.memory import parse_tokens
    from octavo.measure.bench.engine_rows import check_rows, make_rows, open_subject
    from octavo.measure.bench.latency import LatencyCase, run_latency
    from octavo.measure.bench.peer_impls import registered_prefill
    from octavo.measure.report.html import check_packages

    names, skipped = list(kv_cache_dtype or DEFAULT_ROWS), skip_layers or []
    config, device = choose_subject(model, config, device)
    is_cuda = device.startswith("cuda")
    asked = input_len or ("256,4096,32k,125k" if is_cuda else "64,512")
    case = LatencyCase(
        input_lens=tuple(map(parse_tokens, asked.split(","))),
        output_len=output_len,
        batch_size=batch_size,
        num_iters=num_iters,
        num_warmups=num_warmups,
        seed=seed,
    )
    settings = make_settings(
        enforce_eager=enforce_eager,
        compile=compile,
        **batch_limits(batch_size, max_num_batched_tokens),
        memory_fraction=memory_fraction,
        num_pages=num_pages,
        page_size=page_size,
    )
    flags = {
        "--config": config,
        "--input-len": asked,
        "--output-len": output_len,
        "--batch-size": batch_size,
        "--num-iters": num_iters,
        "--num-iters-warmup": num_warmups,
        "--kv-cache-dtype": names,
        "--kv-cache-dtype-skip-layers": skipped,
        "--peers": None if peers is None else "FOLDER",  # whichever it was on this machine
        "--layers": layers,
        "--dtype": dtype,
        "--max-num-batched-tokens": settings.max_num_batched_tokens,
        "--gpu-memory-utilization": memory_fraction,
        "--num-pages": num_pages,
        "--page-size": page_size,
        "--enforce-eager": enforce_eager,
        "--compile": compile,
        "--seed": seed,
    }
    check_rows(names, skipped)
    for file in (output, output_json, plot):
        check_folder(file)
    if plot is not None:
        check_packages()
    with err.status("making the model"):
        subject = open_subject(model, config, dtype=dtype, device=device, layers=layers)
        rows = make_rows(names, subject, skip_layers=skipped)
    if input_len is None:
        case = case.within(subject.max_context)
        flags["--input-len"] = ",".join(map(str, case.input_lens))
    with registered_prefill(peers), StillProgress() as progress:
        task = progress.add_task("measuring", total=len(rows) * case.num_runs)
        results = run_latency(
            subject,
            rows,
            case,
            settings,
            command=command_line("latency", [model] if model else [], flags),
            on_row=lambda result: store.append(output, result.records) if output else None,
            on_run=lambda what: progress.step(task, what),
        )
    _print(results, as_json=as_json)
    if output is not None and not as_json:
        out.print(f"Records: {output}", soft_wrap=True)
    if output_json is not None:
        _write_json(results, output_json)
    if plot is not None:
        _plot(results, plot)
    failures = [result.failure for result in results if result.failure is not None]
    for failure in failures:
        print_error(failure)
    if failures:
        raise typer.Exit(1)


def _print(results: "list[LatencyResult]", *, as_json: bool) -> None:
    from octavo.measure.fit import break_even, curve_break_even
    from octavo.measure.report.latency import latency_sections
    from octavo.measure.report.tables import from_records

    records = [record for result in results for record in result.records]
    if as_json:
        for record in records:
            typer.echo(record.to_json())
        return
    first, case = results[0], records[0].case
    out.print(f"{case['model']}, {case['dtype']}: {records[0].machine}", soft_wrap=True)
    sizes = f"{case['batch_size']} at once, {case['output_len']} tokens out"
    of_lengths = [record for record in records if record.op == "latency"]
    of_lengths.sort(key=lambda record: int(record.case["input_len"]))
    print_table(
        from_records(of_lengths, caption=f"To the first token: {sizes}", columns=TTFT_COLUMNS)
    )
    print_table(from_records(of_lengths, caption=f"Between tokens: {sizes}", columns=ITL_COLUMNS))
    for section in latency_sections(records):
        for table in section.tables:
            print_table(table)
        for note in section.paragraphs[1:]:
            out.print(note, soft_wrap=True)
    for result in results[1:]:
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


def _write_json(results: "list[LatencyResult]", path: Path) -> None:
    """vLLM's file, or one for each row and length."""
    from octavo.atomic import write_atomically
    from octavo.measure.bench.latency import vllm_result

    places = [(result, length) for result in results for length in result.latencies_s]
    for result, length in places:
        file = row_file(path, result.row.name, length) if len(places) > 1 else path
        text = json.dumps(vllm_result(result, length), indent=4, allow_nan=False)
        write_atomically(file, f"{text}\n".encode())
        err.print(f"Result: {file}", soft_wrap=True)


def _plot(results: "list[LatencyResult]", path: Path) -> None:
    from octavo.measure.report.html import write_report
    from octavo.measure.report.latency import latency_sections

    records = [record for result in results for record in result.records]
    write_report(
        latency_sections(records),
        path,
        title="Latency over the input length",
        machines=[record.machine for record in records],
        commands=[record.command for record in records],
    )
    err.print(f"Plot: {path}", soft_wrap=True)
