"""Many requests at once as sections of a page: output tokens per second, and what rows gain."""

from collections.abc import Sequence

from octavo.measure.records import Measurement
from octavo.measure.report.filled import filled_table
from octavo.measure.report.html import Section
from octavo.measure.report.points import name_bars
from octavo.measure.report.select import grouped, newest

# Records of one section have these in common: the model, the engine and the workload.
_SAME = (
    *("model", "dtype", "layers", "compile", "cuda_graphs", "data", "num_prompts", "input_len"),
    *("output_len", "range_ratio", "max_concurrency", "max_num_seqs", "max_num_batched_tokens"),
)
_COLUMNS = (
    *("row", "output_throughput", "total_token_throughput", "output_throughput_gain"),
    *("median_ttft_ms", "median_tpot_ms", "relative_rms"),
)
_SERVE_COLUMNS = (
    *("server_options", "request_rate", "max_concurrency", "num_prompts", "request_throughput"),
    *("output_throughput", "request_goodput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms"),
    *("median_itl_ms", "p99_itl_ms"),
)


def throughput_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine, model and workload of `octavo bench throughput`."""
    return [_section(own) for own in grouped(records, *_SAME).values()]


def _section(records: Sequence[Measurement]) -> Section:
    rows = newest(records, "row")
    case, machine = rows[0].case, rows[0].machine
    batch = case.get("max_concurrency") or case.get("max_num_seqs")
    load = [
        f"{case[name]:,} {words}"
        for name, words in (
            ("num_prompts", "requests"),
            ("input_len", "tokens of a prompt"),
            ("output_len", "tokens of an answer"),
        )
        if isinstance(case.get(name), int)
    ]
    gains = [row for row in rows if "output_throughput_gain" in row.values]
    best = max(gains, key=lambda row: row.values["output_throughput_gain"], default=None)
    figure = name_bars(
        {str(row.case["row"]): row.values["output_throughput"] for row in rows},
        caption="Output tokens per second of all requests together, by row; higher is better.",
        value_title="output (tokens/s)",
    )
    return Section(
        title=f"Throughput: {case['model']}, {machine.gpu or machine.cpu}",
        text=f"{', '.join(load)}, {batch or 'all'} at once. Lengths may vary around these by "
        f"{case.get('range_ratio', 0)} of them. A gain is over the first row of the same command.",
        headline=""
        if best is None
        else f"{case['model']}: {best.values['output_throughput_gain']:.2f} times the output "
        f"tokens per second with {best.case['row']}, against {best.baseline}.",
        figures=(figure,),
        tables=(filled_table(rows, caption="Throughput, by row", columns=_COLUMNS),),
    )


def serve_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine and model of `octavo bench serve`, one row for each run."""
    return [
        Section(
            title=f"Serving: {model}, {machine}",
            text="Requests over HTTP to a server, as its users send them: at a rate, or with a "
            "number of them at once.",
            tables=(
                filled_table(
                    newest(own), caption="Served requests, by run", columns=_SERVE_COLUMNS
                ),
            ),
        )
        for (machine, model), own in grouped(records, "model").items()
    ]
