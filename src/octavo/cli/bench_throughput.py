"""octavo bench throughput: many requests in the engine, tokens per second."""

import json
from dataclasses import replace
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
    MaxNumSeqs,
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
from octavo.cli.records import print_file, print_json
from octavo.cli.still_progress import StillProgress
from octavo.cli.tables import print_table

if TYPE_CHECKING:
    from octavo.measure.bench.throughput import ThroughputResult

SPEED_COLUMNS = (
    *("row", "duration", "request_throughput", "output_throughput", "output_throughput_gain"),
    *("total_token_throughput", "relative_rms"),
)
LATENCY_COLUMNS = (
    *("row", "median_ttft_ms", "p99_ttft_ms", "median_ttft_gain"),
    *("median_itl_ms", "p99_itl_ms", "median_itl_gain", "median_e2el_ms"),
)


def throughput(
    model: Model = None,
    config: Config = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests.")] = 48,
    input_len: Annotated[
        str | None,
        typer.Option(
            "--input-len",
            help="Tokens of a prompt; left out, 1024 on a GPU and 64 elsewhere, or what the "
            "model's context has room for.",
            show_default=False,
        ),
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(
            "--output-len",
            help="Tokens of an answer; 128 on a GPU, 16 elsewhere.",
            show_default=False,
        ),
    ] = None,
    range_ratio: Annotated[
        float,
        typer.Option("--range-ratio", help="Lengths are drawn from LENGTH · (1 ± this): 0.15."),
    ] = 0.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            min=1,
            help="Requests open at once: the next comes when one has ended. Left out, all come at "
            "once.",
            show_default=False,
        ),
    ] = None,
    num_warmups: Annotated[
        int | None,
        typer.Option(
            "--num-warmups",
            min=0,
            help="Requests before, with short answers; left out, --max-concurrency, 8 at most.",
            show_default=False,
        ),
    ] = None,
    max_num_seqs: MaxNumSeqs = None,
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
    from octavo.measure import store
    from octavo.measure.advise.memory import parse_tokens
    from octavo.measure.bench.engine_rows import check_rows, make_rows, open_subject
    from octavo.measure.bench.peer_impls import registered_prefill
    from octavo.measure.bench.request_times import Workload
    from octavo.measure.bench.throughput import ThroughputCase, run_throughput

    names, skipped = list(kv_cache_dtype or DEFAULT_ROWS), skip_layers or []
    config, device = choose_subject(model, config, device)
    is_cuda = device.startswith("cuda")
    workload = Workload(
        num_prompts=num_prompts,
        input_len=parse_tokens(input_len or ("1024" if is_cuda else "64")),
        output_len=parse_tokens(output_len or ("128" if is_cuda else "16")),
        range_ratio=range_ratio,
        seed=seed,
    )
    case = ThroughputCase(
        workload=workload, max_concurrency=max_concurrency, num_warmups=num_warmups
    )
    settings = make_settings(
        enforce_eager=enforce_eager,
        compile=compile,
        **batch_limits(max_num_seqs, max_num_batched_tokens),
        memory_fraction=memory_fraction,
        num_pages=num_pages,
        page_size=page_size,
    )
    flags = {
        "--config": config,
        "--num-prompts": num_prompts,
        "--input-len": None,  # known when the model's context is
        "--output-len": workload.output_len,
        "--range-ratio": range_ratio,
        "--max-concurrency": max_concurrency,
        "--num-warmups": num_warmups,
        "--max-num-seqs": settings.max_num_seqs,
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
    check_folder(output)
    check_folder(output_json)
    with err.status("making the model"):
        subject = open_subject(model, config, dtype=dtype, device=device, layers=layers)
        rows = make_rows(names, subject, skip_layers=skipped)
    if input_len is None:
        workload = workload.within(subject.max_context)
        case = replace(case, workload=workload)
    flags["--input-len"] = workload.input_len
    num_tokens = sum(prompt.output_len for prompt in workload.draw(subject.vocab_size))
    with registered_prefill(peers), StillProgress() as progress:
        task = progress.add_task("tokens", total=len(rows) * num_tokens)
        results = run_throughput(
            subject,
            rows,
            case,
            settings,
            command=command_line("throughput", [model] if model else [], flags),
            on_row=lambda result: store.append(output, result.records) if output else None,
            on_token=lambda what: progress.step(task, f"{what}, tokens"),
        )
    _print(results, as_json=as_json)
    if not as_json:
        print_file(output)
    if output_json is not None:
        _write_json(results, output_json)
    failures = [result.failure for result in results if result.failure is not None]
    for failure in failures:
        print_error(failure)
    if failures:
        raise typer.Exit(1)


def _write_json(results: "list[ThroughputResult]", path: Path) -> None:
    """vLLM's file, or one for each row."""
    from octavo.atomic import write_atomically
    from octavo.measure.bench.throughput import vllm_result

    for result in results:
        for record in result.records:
            file = row_file(path, result.row.name) if len(results) > 1 else path
            text = json.dumps(vllm_result(record), indent=4, allow_nan=False)
            write_atomically(file, f"{text}\n".encode())
            err.print(f"Result: {file}", soft_wrap=True)


def _print(results: "list[ThroughputResult]", *, as_json: bool) -> None:
    from octavo.measure.report.tables import from_records

    records = [record for result in results for record in result.records]
    if as_json:
        print_json(records)
        return
    case = records[0].case
    out.print(f"{case['model']}, {case['dtype']}: {records[0].machine}", soft_wrap=True)
    at_once = case.get("max_concurrency", "all")
    caption = (
        f"{case['num_prompts']} requests, {at_once} at once, {case['input_len']} tokens in and "
        f"{case['output_len']} out, ± {100 * float(case['range_ratio']):g} %"
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
