"""The tables of a load in the engine, and the JSON documents of vLLM's own benchmarks."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from octavo.measure.bench.engine_load import BATCH_PERCENTILES, LoadResult
from octavo.measure.records import Measurement
from octavo.measure.report import latency
from octavo.measure.report.tables import Table, from_records


def told(records: Sequence[Measurement]) -> Iterator[str | Table]:
    """What was measured, in tables and sentences: of latency or of throughput."""
    first = records[0]
    yield f"{first.case['model']}, {first.case['dtype']}: {first.machine}"
    yield from _told_latency(records) if first.op == "latency" else _told_throughput(records)


def _told_latency(records: Sequence[Measurement]) -> Iterator[str | Table]:
    case = records[0].case
    sizes = f"{case['batch_size']} at once, {case['output_len']} tokens out"
    lengths = [record for record in records if record.op == "latency"]
    lengths.sort(key=lambda record: int(record.case["input_len"]))
    times = ["median_{}_ms", "mean_{}_ms", "p20_{}_ms", "p80_{}_ms"]
    for metric, what, columns in (
        ("ttft", "To the first token", [*times, "{}_speedup", "relative_rms"]),
        ("itl", "Between tokens", [*times, "p99_{}_ms", "{}_speedup"]),
    ):
        names = ("input_len", "row", *(column.format(metric) for column in columns))
        yield from_records(lengths, caption=f"{what}: {sizes}", columns=names)
    for section in latency.latency_sections(records):
        yield from section.tables
        yield from section.paragraphs[1:]
    ends = {
        latency.ITL: "",
        latency.TTFT: ", by the curves between the shortest and the longest input",
    }
    for row in latency.rows_of(lengths):
        for of, end in ends.items():
            if row.baseline is not None and (found := row.break_even(of)) is not None:
                yield f"{of.name.upper()}: {row.name} is {found} than {row.baseline.name}{end}"


def _told_throughput(records: Sequence[Measurement]) -> Iterator[str | Table]:
    case = records[0].case
    caption = (
        f"{case['num_prompts']} requests, {case.get('max_concurrency', 'all')} at once, "
        f"{case['input_len']} tokens in and {case['output_len']} out, "
        f"± {100 * float(case['range_ratio']):g} %"
    )
    columns: tuple[str, ...] = ("row", "duration", "request_throughput", "output_throughput")
    columns += ("output_throughput_gain", "total_token_throughput", "relative_rms")
    yield from_records(records, caption=caption, columns=columns)
    times = [
        name
        for metric in ("ttft", "itl")
        for name in (f"median_{metric}_ms", f"p99_{metric}_ms", f"median_{metric}_gain")
    ]
    yield from_records(records, caption="Latency", columns=("row", *times, "median_e2el_ms"))
    for record in records:
        values = record.values
        yield (
            f"{record.case['row']}: throughput {values['request_throughput']:.2f} requests/s, "
            f"{values['total_token_throughput']:.2f} total tokens/s, "
            f"{values['output_throughput']:.2f} output tokens/s"
        )


def vllm_documents(result: LoadResult) -> dict[tuple[str | int, ...], dict[str, Any]]:
    """The JSON documents of vLLM's `bench latency` or `bench throughput`.

    By row and input length, or by row alone.
    """
    documents: dict[tuple[str | int, ...], dict[str, Any]] = {}
    for record in result.records if not result.latencies_s else ():
        values = record.values
        num_tokens = values["total_input_tokens"] + values["total_output_tokens"]
        documents[(str(record.case["row"]),)] = {
            "model_id": str(record.case["model"]),
            "elapsed_time": values["duration"],
            "num_requests": int(values["completed"]),
            "total_num_tokens": int(num_tokens),
            "requests_per_second": values["request_throughput"],
            "tokens_per_second": values["total_token_throughput"],
        }
    for (row, length), seconds in result.latencies_s.items():
        if row not in result.failures:
            documents[row, length] = {
                "model_id": str(result.records[0].case["model"]),
                "avg_latency": float(np.mean(seconds)),
                "latencies": list(seconds),
                "percentiles": {
                    f"{p}": float(np.percentile(seconds, p)) for p in BATCH_PERCENTILES
                },
            }
    return documents
