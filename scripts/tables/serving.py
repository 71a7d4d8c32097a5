"""Tables about the engine: latency of one batch by context, and throughput of many requests."""

import math
from pathlib import Path

from octavo.measure import store
from octavo.measure.fit import BreakEven
from octavo.measure.records import Measurement, Scalar
from octavo.measure.report.tables import Table, beside_ours, to_markdown
from tables.common import grouped, newest

# What reading memory reached on an H200: a step cannot read its weights faster.
READ_GB_PER_S = 4540
# What records of one table have in common: the model and the engine, and the load.
ENGINE = ("model", "dtype", "layers", "compile", "page_size", "max_num_batched_tokens")
BATCH = ("batch_size", "output_len")
LOAD = ("num_prompts", "input_len", "output_len", "range_ratio", "max_concurrency", "max_num_seqs")


def latency(results: Path) -> str:
    """Time to the first token and between tokens by context, and the line of each row in words."""
    return _latency_tables(results / "latency_h200.jsonl")


def linear(results: Path) -> str:
    """The same of rows with linear layers in FP8, for batches of one and more."""
    return _latency_tables(results / "linear_h200.jsonl")


def _latency_tables(path: Path) -> str:
    records = beside_ours(store.read(path))
    groups = grouped(records, lambda r: (_has_graphs(r), *_cases(r, *ENGINE, *BATCH)))
    return "\n\n".join(map(_latency_of, groups)) + "\n"


def throughput(results: Path) -> str:
    """Tokens per second, latency and duration of a load; nothing while there are no records."""
    path = results / "throughput_h200.jsonl"
    records = beside_ours(store.read(path)) if path.exists() else []
    groups = grouped(records, lambda r: (_has_graphs(r), *_cases(r, *ENGINE, *LOAD)))
    return "\n\n".join(map(_throughput_of, groups)) + "\n" if groups else ""


def _latency_of(records: list[Measurement]) -> str:
    """The table of one model and batch, then the lines of its rows."""
    latest = _first_rows_first(newest(records, lambda r: (r.op, *_cases(r, "row", "input_len"))))
    times = {_cases(r, "row", "input_len"): r for r in latest if r.op == "latency"}
    rows = list(dict.fromkeys(row for row, _ in times))
    columns = [(metric, row) for metric in ("ttft", "itl") for row in rows]
    table = Table(
        caption="",
        header=("input tokens", *(f"{metric.upper()}, `{row}`" for metric, row in columns)),
        rows=tuple(
            (f"{length:,}", *(_latency_cell(times.get((row, length)), m) for m, row in columns))
            for length in sorted({int(r.case["input_len"]) for r in times.values()})
        ),
    )
    case = records[0].case
    num = int(case["batch_size"])
    text = (
        f"{_about(latest)}: {num} {'sequence' if num == 1 else 'sequences'} at once, "
        f"{case['output_len']} tokens after each prompt. Milliseconds, medians"
        f"{_factors(latest, 'speed-up')}.\n\n{to_markdown(table)}"
    )
    # A line through two lengths explains everything, and so does a curve through three.
    lines = "\n".join(map(_line, _fits(latest, "latency_fit", 3)))
    curves = "\n".join(map(_curve, _fits(latest, "ttft_fit", 4)))
    if lines:
        text += f"\n\nITL over the context as a line:\n\n{lines}"
    if curves:
        text += f"\n\nTTFT over the input as a curve:\n\n{curves}"
    return text


def _first_rows_first(records: list[Measurement]) -> list[Measurement]:
    """Rows that others are compared with, those others, and rows of runs that all others left."""
    first = {r.baseline for r in records}
    compared = {r.case["row"] for r in records if r.baseline is not None}
    return sorted(
        records, key=lambda r: (r.case["row"] not in first, r.case["row"] not in compared)
    )


def _fits(records: list[Measurement], op: str, num_lengths: int) -> list[Measurement]:
    """The fits through so many lengths or more."""
    fits = [r for r in records if r.op == op]
    return [r for r in fits if str(r.case["input_lens"]).count(",") >= num_lengths - 1]


def _latency_cell(record: Measurement | None, metric: str) -> str:
    if record is None:
        return ""
    factor = record.values.get(f"{metric}_speedup")
    ms = _digits(record.values[f"median_{metric}_ms"])
    return ms if factor is None else f"{ms} ({factor:.2f}×)"


def _line(fit: Measurement) -> str:
    """What every token costs, and what context costs, beside the first row of the same run."""
    values = fit.values
    weights_ms = float(fit.case["weight_bytes"]) / READ_GB_PER_S / 1e6
    text = (
        f"- `{fit.case['row']}`: {values['itl_intercept_ms']:.2f} ms"
        f"{_range(fit, 'itl_intercept', '_ms', 2)} (reading the weights at "
        f"{READ_GB_PER_S} GB/s: {weights_ms:.2f} ms) and "
        f"{values['itl_slope_us_per_1k_tokens']:.1f} µs"
        f"{_range(fit, 'itl_slope', '_us_per_1k_tokens', 1)} for each 1000 tokens of context, "
        f"{values['itl_residual_ms']:.2f} ms unexplained"
    )
    if "break_even_tokens" not in values:
        return f"{text}."
    gap_ms, ratio = values["intercept_gap_ms"], values["slope_ratio"]
    spread = _range(fit, "slope_ratio", "", 2)
    slope = "" if math.isnan(ratio) else f"{ratio:.2f}{spread} of its slope, "
    found = BreakEven(values["break_even_tokens"], values.get("faster_up_to_tokens"))
    return (
        f"{text}; beside `{fit.baseline}` {abs(gap_ms):.2f} ms {'less' if gap_ms < 0 else 'more'} "
        f"for every token, {slope}{found}."
    )


def _curve(fit: Measurement) -> str:
    """What a prompt costs by itself, by its tokens, and by their pairs."""
    values = fit.values
    text = (
        f"- `{fit.case['row']}`: {values['ttft_constant_ms']:.1f} ms"
        f"{_range(fit, 'ttft_constant', '_ms', 1)}, {values['ttft_linear_ms_per_1k_tokens']:.1f} ms"
        f"{_range(fit, 'ttft_linear', '_ms_per_1k_tokens', 1)} for each 1000 tokens, and "
        f"{values['ttft_square_ms_per_1k_tokens_squared']:.3f} ms"
        f"{_range(fit, 'ttft_square', '_ms_per_1k_tokens_squared', 3)} for the square of that, "
        f"{values['ttft_residual_ms']:.1f} ms unexplained"
    )
    ratio = values.get("square_ratio", math.nan)
    if not math.isnan(ratio):
        spread = _range(fit, "square_ratio", "", 2)
        text += f"; {ratio:.2f}{spread} of the square term of `{fit.baseline}`"
    if "ttft_break_even_tokens" not in values:
        return f"{text}."
    found = BreakEven(values["ttft_break_even_tokens"], values.get("ttft_faster_up_to_tokens"))
    spread = _range(fit, "ttft_break_even", "_tokens", 0)
    return f"{text}; {found}{spread} than `{fit.baseline}`, between the lengths that were measured."


def _range(fit: Measurement, name: str, unit: str, digits: int) -> str:
    """The interval of a value after it; nothing where its record has none."""
    low, high = (fit.values.get(f"{name}_{end}{unit}") for end in ("low", "high"))
    if low is None or high is None:
        return ""
    if math.isinf(low) and math.isinf(high):
        return " (so few lengths leave it open)"
    return f" [{low:,.{digits}f}, {high:,.{digits}f}]"


def _throughput_of(records: list[Measurement]) -> str:
    """The table of one model and load."""
    latest = _first_rows_first(newest(records, lambda r: r.case["row"]))
    table = Table(
        caption="",
        header=("", "output tokens/s", "TTFT (ms)", "ITL (ms)", "duration (s)"),
        rows=tuple(
            (
                f"`{r.case['row']}`",
                _gained(r),
                *(_digits(r.values[f"median_{metric}_ms"]) for metric in ("ttft", "itl")),
                _digits(r.values["duration"]),
            )
            for r in latest
        ),
    )
    case = records[0].case
    spread = float(case["range_ratio"])
    limit = case.get("max_concurrency")
    return (
        f"{_about(latest)}: {case['num_prompts']} requests of {case['input_len']:,} tokens, "
        f"{case['output_len']:,} tokens after each"
        + (f", both ± {spread:.0%}" if spread else "")
        + (", all open at once" if limit is None else f", {limit} open at once")
        + f", up to {case['max_num_seqs']} in a step. TTFT and ITL are medians"
        f"{_factors(latest, 'gain')}.\n\n{to_markdown(table)}"
    )


def _gained(record: Measurement) -> str:
    gain = record.values.get("output_throughput_gain")
    rate = _digits(record.values["output_throughput"])
    return rate if gain is None else f"{rate} ({gain:.2f}×)"


def _about(records: list[Measurement]) -> str:
    """The model and the engine."""
    case = records[0].case
    kinds = []
    if "weights" in case:
        kinds.append(f"{case['weights']} weights")
    if "mlp" in case:
        kinds.append(f"MLP {case['mlp']}")
    if "layers" in case:
        kinds.append(f"{case['layers']} layers")
    kinds.append("BF16" if case["dtype"] == "bfloat16" else str(case["dtype"]))
    kinds += ["compiled"] if case["compile"] else []
    kinds += [] if _has_graphs(records[0]) else ["without CUDA graphs"]
    kinds.append(f"up to {case['max_num_batched_tokens']:,} tokens in a step")
    machine = records[0].machine
    return f"**{case['model']}** ({', '.join(kinds)}) on an {machine.gpu or machine.cpu}"


def _factors(records: list[Measurement], kind: str) -> str:
    """What the factors in the cells are, where there are some."""
    has_some = any(r.baseline is not None for r in records)
    return f"; × is the {kind} over the first row of the same run" if has_some else ""


def _has_graphs(record: Measurement) -> bool:
    """False where a record says so; those that do not say go with those that have some."""
    return record.case.get("cuda_graphs") is not False


def _cases(record: Measurement, *names: str) -> tuple[Scalar | None, ...]:
    return tuple(record.case.get(name) for name in names)


def _digits(number: float) -> str:
    """Three digits, or all that are before the point."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"
