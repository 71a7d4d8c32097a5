"""octavo bench serve: prompts over HTTP, to a server that runs or to one of its own."""

import json
import math
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import err, out, print_error
from octavo.cli.engine_flags import command_line
from octavo.cli.options import AsJson, RecordsFile, check_folder
from octavo.cli.serve_data_flags import (
    Backend,
    BucketConfig,
    CustomOutputLen,
    DatasetName,
    DatasetPath,
    Goodput,
    ItemsPerRequest,
    RampEnd,
    RampStart,
    RampStrategy,
    ShareGptOutputLen,
    Tokenizer,
    choose_data,
    make_ramp,
    parse_goodput,
)
from octavo.cli.tables import print_table
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.measure.bench.serving import Served, ServingCase

LINES = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput",
    "Output token throughput (tok/s)": "output_throughput",
    "Peak output token throughput (tok/s)": "max_output_tokens_per_s",
    "Peak concurrent requests": "max_concurrent_requests",
    "Total token throughput (tok/s)": "total_token_throughput",
}


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Start octavo serve with this model, and stop it at the end; options of octavo "
            "serve go after --. Left out: --base-url.",
            show_default=False,
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url", help="Of a server that runs: http://localhost:8000.", show_default=False
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="What requests call the model; left out, the first that the server names.",
            show_default=False,
        ),
    ] = None,
    backend: Backend = None,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests.")] = 48,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            min=1,
            help="Requests open at once; left out, all that have come.",
            show_default=False,
        ),
    ] = None,
    input_len: Annotated[
        int, typer.Option("--random-input-len", min=1, help="Tokens of a prompt.")
    ] = 1024,
    output_len: Annotated[
        int, typer.Option("--random-output-len", min=1, help="Tokens of an answer.")
    ] = 128,
    range_ratio: Annotated[
        float,
        typer.Option("--random-range-ratio", help="Lengths are drawn from LENGTH · (1 ± this)."),
    ] = 0.0,
    sharegpt_output_len: ShareGptOutputLen = None,
    custom_output_len: CustomOutputLen = None,
    tokenizer: Tokenizer = None,
    items_per_request: ItemsPerRequest = 1,
    bucket_config: BucketConfig = None,
    request_rate: Annotated[
        float, typer.Option("--request-rate", help="Requests per second; inf is all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option("--burstiness", help="1 is a Poisson process, less comes in bursts."),
    ] = 1.0,
    ramp_strategy: RampStrategy = None,
    ramp_start: RampStart = None,
    ramp_end: RampEnd = None,
    goodput: Goodput = None,
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", min=0, help="Requests before, one after the other.")
    ] = 1,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Whether answers have the length that was asked for; servers other than octavo's "
            "and vLLM's may refuse it.",
        ),
    ] = True,
    vocab_size: Annotated[
        int, typer.Option("--vocab-size", min=2, help="Random tokens are below this.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")] = 0,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help="That the server wants; OCTAVO_API_KEY does the same.",
            show_default=False,
        ),
    ] = None,
    percentiles: Annotated[
        str, typer.Option("--metric-percentiles", help="With commas between.")
    ] = "99",
    ready_s: Annotated[
        float,
        typer.Option("--ready-check-timeout-sec", help="For a server of our own to be ready."),
    ] = 600.0,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write vLLM's JSON file of the run.")
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="With the times of every request in it.")
    ] = False,
    result_dir: Annotated[
        Path | None, typer.Option("--result-dir", help="For that file.", show_default=False)
    ] = None,
    result_filename: Annotated[
        str | None,
        typer.Option(
            "--result-filename",
            help="Its name; left out, made of rate, concurrency, model and time.",
            show_default=False,
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata", help="KEY=VALUE for that file; more than once.", show_default=False
        ),
    ] = None,
    output: RecordsFile = None,
    as_json: AsJson = False,
) -> None:
    """Load a server with prompts over HTTP: throughput, TTFT, TPOT, ITL, whole latency.

    octavo bench serve --base-url http://localhost:8000 --num-prompts 48 --max-concurrency 8
    --random-input-len 20000 --random-output-len 2000 --random-range-ratio 0.15

    octavo bench serve path/to/model --max-concurrency 8 -o results.jsonl -- --kv-cache-dtype fp8

    Options, printed lines and the file of --save-result are those of vLLM's command of this name.
    TPOT is a request's time after its first token for each other token; ITL is the time between
    two parts of a stream, of all requests. Goodput counts requests that met every limit. Random
    prompts are tokens, which OpenAI's completions take; those of other data sets are texts.
    The exit code is 1 if a request failed. Without HTTP: octavo bench throughput.
    """
    from rich.progress import Progress

    from octavo import env
    from octavo.measure import store
    from octavo.measure.bench.own_server import own_server
    from octavo.measure.bench.request_times import Workload
    from octavo.measure.bench.serving import ServingCase, run_serving
    from octavo.measure.bench.serving_result import make_record

    options = list(ctx.args)
    if (model is None) == (base_url is None):
        raise ConfigError(f"expected a model or --base-url, got {model} and {base_url}")
    if base_url is not None and options:
        raise ConfigError(f"options after -- are for a server of our own, got {options}")
    notes = _metadata(metadata or [])
    check_folder(output)
    key = api_key or env.API_KEY.read() or None
    workload = choose_data(
        Workload(
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            range_ratio=range_ratio,
            seed=seed,
        ),
        dataset_name,
        dataset_path,
        sharegpt_output_len=sharegpt_output_len,
        custom_output_len=custom_output_len,
        tokenizer=tokenizer,
        items_per_request=items_per_request,
        bucket_config=bucket_config,
    )
    fields: dict[str, Any] = {
        "workload": workload,
        "backend": backend or ("openai-chat" if dataset_name == "random-mm" else "openai"),
        "ramp": make_ramp(ramp_strategy, ramp_start, ramp_end),
        "goodput_ms": parse_goodput(goodput or []),
        "model": model_name,
        "api_key": key,
        "request_rate": request_rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        "num_warmups": num_warmups,
        "ignore_eos": ignore_eos,
        "vocab_size": vocab_size,
        "percentiles": tuple(_numbers(percentiles)),
    }
    ServingCase(base_url=base_url or "http://localhost", **fields)  # before a server starts
    with ExitStack() as stack:
        if model is not None:
            with err.status("starting octavo serve"):
                base_url = stack.enter_context(own_server([model, *options], ready_s=ready_s))
        case = ServingCase(base_url=str(base_url), **fields)
        progress = stack.enter_context(Progress(console=err))
        task = progress.add_task("requests", total=num_prompts)
        served = run_serving(case, on_request=lambda: progress.advance(task))
    flags = {
        "--base-url": base_url if model is None else None,
        "--model": model_name,
        "--backend": backend,
        "--dataset-name": None if dataset_name == "random" else dataset_name,
        "--dataset-path": None if dataset_path is None else dataset_path.name,
        "--sharegpt-output-len": sharegpt_output_len,
        "--custom-output-len": custom_output_len,
        "--tokenizer": tokenizer,
        "--random-mm-base-items-per-request": (
            items_per_request if dataset_name == "random-mm" else None
        ),
        "--random-mm-bucket-config": bucket_config,
        "--num-prompts": num_prompts,
        "--max-concurrency": max_concurrency,
        "--random-input-len": input_len,
        "--random-output-len": output_len,
        "--random-range-ratio": range_ratio,
        "--request-rate": request_rate,
        "--burstiness": burstiness,
        "--ramp-up-strategy": ramp_strategy,
        "--ramp-up-start-rps": ramp_start,
        "--ramp-up-end-rps": ramp_end,
        "--goodput": goodput,
        "--num-warmups": num_warmups,
        "--no-ignore-eos": not ignore_eos,
        "--vocab-size": vocab_size,
        "--seed": seed,
    }
    command = command_line("serve", [model] if model else [], flags)
    command += f" -- {shlex.join(options)}" if options else ""
    record = make_record(
        case, served, command=command, has_own_server=model is not None, options=options
    )
    if output is not None:
        store.append(output, [record])
    if as_json:
        typer.echo(record.to_json())
    else:
        _print(case, served)
    if save_result or save_detailed or result_filename:
        path = _save(case, served, notes, result_dir, result_filename, is_detailed=save_detailed)
        err.print(f"Result: {path}", soft_wrap=True)
    failed = [one.error for one in served.times if one.error is not None]
    if failed:
        print_error(f"{len(failed)} of {num_prompts} requests failed; the first: {failed[0]}")
        raise typer.Exit(1)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"expected percentiles such as 50,99; got {text!r}") from None


def _metadata(pairs: list[str]) -> dict[str, str]:
    found = dict(pair.partition("=")[::2] for pair in pairs)
    if any("=" not in pair or pair.startswith("=") for pair in pairs):
        raise ConfigError(f"expected --metadata KEY=VALUE, got {', '.join(pairs)}")
    return found


def _save(
    case: "ServingCase",
    served: "Served",
    metadata: dict[str, str],
    folder: Path | None,
    name: str | None,
    *,
    is_detailed: bool,
) -> Path:
    """Write vLLM's file, by its name for it if none was given."""
    from octavo.atomic import write_atomically
    from octavo.measure.bench.serving_result import vllm_result

    result = vllm_result(case, served, metadata=metadata, is_detailed=is_detailed)
    if name is None:
        limit = "" if case.max_concurrency is None else f"-concurrency{case.max_concurrency}"
        model = served.model.split("/")[-1]
        name = f"{case.backend}-{case.request_rate}qps{limit}-{model}-{result['date']}.json"
    path = (folder or Path()) / name
    write_atomically(path, (json.dumps(result, indent=2, allow_nan=False) + "\n").encode())
    return path


def _print(case: "ServingCase", served: "Served") -> None:
    """vLLM's lines, then a table of the latencies."""
    from octavo.measure.bench.request_times import METRICS
    from octavo.measure.report.tables import Cell, Table, format_column

    limit = case.max_concurrency
    rows: list[tuple[str, Cell]] = [(line, served.metrics[key]) for line, key in LINES.items()]
    rows[2:2] = [
        ("Maximum request concurrency", "all" if limit is None else limit),
        ("Request rate configured (RPS)", str(case.request_rate)),
    ]
    if case.goodput_ms:
        place = next(n for n, (line, _) in enumerate(rows) if line.startswith("Request through"))
        rows.insert(place + 1, ("Request goodput (req/s)", served.metrics["request_goodput"]))
    caption = f"Serving Benchmark Result: {served.model}"
    # Each in its own digits.
    shown = [(line, format_column([value])[0]) for line, value in rows]
    print_table(Table(caption=caption, header=("", ""), rows=tuple(shown)))
    kinds = ("mean", "median", "std", *(f"p{p:g}" for p in case.percentiles))
    cells: tuple[tuple[Cell, ...], ...] = tuple(
        (metric.upper(), *(served.metrics[f"{kind}_{metric}_ms"] for kind in kinds))
        for metric in METRICS
    )
    header = ("ms", *(kind.capitalize() for kind in kinds))
    print_table(Table(caption="Latency", header=header, rows=cells))
    num_tokens, num_parts = (served.metrics[f"total_{of}"] for of in ("output_tokens", "parts"))
    if num_parts < num_tokens:
        out.print(
            f"{num_tokens:.0f} tokens came in {num_parts:.0f} parts: TTFT and ITL are those of "
            "parts, TPOT is that of tokens",
            soft_wrap=True,
        )
