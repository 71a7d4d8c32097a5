"""Latency over the input length as sections of a page: points, fits, and where rows break even.

All of it comes from the records of lengths: fits are made here again, so that records from before
fits had intervals are shown like new ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.measure import fit as fits
from octavo.measure.records import Measurement
from octavo.measure.report import plots, tables
from octavo.measure.report.sections import Kind, Rows, Section

# Records of one section have these in common: the model, the engine and the batch.
ENGINE = "model dtype layers compile cuda_graphs"
_MARK_WIDTH = 26  # characters of a line of its words: half of a narrow page
_NUM_DRAWN = 60  # points of a fitted curve
_FAR = 1.5  # a break-even beyond so many of the longest input is told in words only


@dataclass(frozen=True)
class Metric:
    """A time that grows with the input: what is fitted to it, and how that is written.

    scales: 1e6 for a term in units of a millionth. is_log: whether its axes are logarithmic.
    """

    name: str
    words: str
    shape: str
    fit: Callable[[Rows], Any]
    scales: tuple[float, ...]
    break_even: Callable[[Any, Any], fits.BreakEven]
    header: tuple[str, ...]
    caption: str
    is_log: bool


def fit_itl(records: Rows) -> fits.Line:
    """The line of ITL in ms over the context, of a row's records of two or more lengths."""
    # The context grows while the tokens come: on average by half of them.
    contexts = [_number(r, "input_len") + _number(r, "output_len") / 2 for r in records]
    return fits.fit_line(contexts, [r.values["median_itl_ms"] for r in records])


def fit_ttft(records: Rows) -> fits.Quadratic:
    """The curve of TTFT in ms over the input, of a row's records of three or more lengths."""
    lengths = [_number(r, "input_len") for r in records]
    return fits.fit_quadratic(lengths, [r.values["median_ttft_ms"] for r in records])


def _number(record: Measurement, name: str) -> float:
    value = record.case.get(name)
    if not isinstance(value, int | float):
        raise ConfigError(f"expected records with a number {name}, got {value!r}")
    return float(value)


ITL = Metric(
    name="itl",
    words="Time between tokens",
    shape="line",
    fit=fit_itl,
    scales=(1, 1e6),
    break_even=fits.break_even,
    header=("intercept (ms)", "slope (µs per 1k tokens)", "slope ratio"),
    caption="ITL over the context: intercept + slope · tokens; in brackets intervals of 95 %",
    is_log=False,
)
TTFT = Metric(
    name="ttft",
    words="Time to the first token",
    shape="curve",
    fit=fit_ttft,
    scales=(1, 1e3, 1e6),
    break_even=fits.curve_break_even,
    header=("c (ms)", "b (ms per 1k tokens)", "a (ms per 1k tokens, squared)", "ratio of a"),
    caption="TTFT over the input: a · tokens² + b · tokens + c; in brackets intervals of 95 %. The "
    "break-even is of the curves, between the lengths that were measured",
    is_log=True,
)


@dataclass(frozen=True)
class Row:
    """The records of a row by length, and the row that it is compared with."""

    name: str
    records: tuple[Measurement, ...]
    baseline: "Row | None" = None

    @property
    def lengths(self) -> list[int]:
        """The inputs' tokens, shortest first."""
        return list(map(_length, self.records))

    def values(self, name: str) -> list[float]:
        """One value of each length."""
        return [record.values[name] for record in self.records]

    def fit(self, metric: Metric) -> Any:
        """What is fitted to a metric; None with fewer lengths than that has terms."""
        return metric.fit(self.records) if len(self.records) >= len(metric.scales) else None

    def break_even(self, metric: Metric) -> fits.BreakEven | None:
        """Where the fits of this row and its baseline cross; None unless both have one."""
        own, other = self.fit(metric), self.baseline and self.baseline.fit(metric)
        return None if own is None or other is None else metric.break_even(own, other)


def rows_of(records: Rows) -> list[Row]:
    """The rows of a model, an engine and a batch.

    A row is that of one command, the one with the most lengths and of those the newest; of records
    of the same length the newest counts. It is compared with the other row of the same command, if
    there is one.
    """
    runs = tables.grouped(tables.newest(records, "row", "command", "input_len"), "row", "command")
    by_length = {
        (str(name), str(command)): tuple(sorted(own, key=_length))
        for (_, name, command), own in runs.items()
    }
    # Another command may have measured at another time, with other settings: no row mixes two.
    chosen: dict[str, tuple[Measurement, ...]] = {}
    for (name, _), own in by_length.items():
        if name not in chosen or _rank(own) >= _rank(chosen[name]):
            chosen[name] = own
    found = []
    for name, own in chosen.items():
        first = own[0].baseline or ""
        others = by_length.get((first, own[0].command)) or chosen.get(first)
        found.append(Row(name, own, Row(first, others) if others else None))
    return found


def _rank(records: Rows) -> tuple[int, str]:
    return len(records), max(record.date for record in records)


def _length(record: Measurement) -> int:
    return int(record.case["input_len"])


def latency_sections(records: Rows) -> list[Section]:
    """A section for each model, engine and batch among the records of `octavo bench latency`.

    Its rows are those of `rows_of`. ConfigError if there are no records of lengths.
    """
    found = [record for record in records if record.op == "latency"]
    if not found:
        ops = ", ".join(sorted({record.op for record in records})) or "none"
        raise ConfigError(f"expected records of octavo bench latency, got {ops}")
    return LATENCY.make(found)


def _model(records: Rows) -> str:
    """The model, and how many requests at once if there are several."""
    case = records[0].case
    batch = "" if case["batch_size"] == 1 else f", {case['batch_size']} at once"
    return f"{case['model']}{batch}"


LATENCY = Kind(
    ops=("latency",),
    needs="model row input_len output_len batch_size median_itl_ms p10_itl_ms p90_itl_ms "
    "median_ttft_ms p10_ttft_ms p90_ttft_ms",
    by=f"{ENGINE} page_size max_num_batched_tokens batch_size output_len",
    rows=lambda records: records,
    title=lambda rows: f"Latency over the input length: {_model(rows)}",
    text=lambda rows: "\n\n".join(_text(rows)),
    figures=lambda rows: [_figure(rows_of(rows), metric) for metric in (ITL, TTFT)],
    tables=lambda rows: [
        table for metric in (ITL, TTFT) if (table := _table(rows_of(rows), metric)).rows
    ],
)


def _text(records: Rows) -> Iterator[str]:
    """What is measured and fitted, and in words what the fits cannot say."""
    case, rows = records[0].case, rows_of(records)
    yield (
        f"{case['batch_size']} at once, {case['output_len']} tokens after each prompt. ITL, "
        "the time between tokens, is a line over the "
        "context; TTFT, the time to the first token, has a square term as well, which is "
        "attention. Intervals are of 95 % (Student's; of ratios and crossings Fieller's) and are "
        "there where more lengths were measured than a fit has terms."
    )
    num_lengths = min(len(row.records) for row in rows)
    if num_lengths < 4:
        fewest = [row.name for row in rows if len(row.records) == num_lengths]
        which = "" if len(fewest) == len(rows) else f"{', '.join(fewest)}: "
        word = "length" if num_lengths == 1 else "lengths"
        yield (
            f"{which}{num_lengths} {word}: a line needs two and a curve three, and one more each "
            "for an interval."
        )
    for row in rows:
        if (curve := row.fit(TTFT)) is not None and curve.held:
            terms = " and ".join(curve.held)
            more = " It is below zero by more than its interval: TTFT is no such curve here."
            yield (
                f"{row.name}: the {terms} term of TTFT would be negative and is held at zero."
                f"{more if curve.contradicted else ''}"
            )


def _table(rows: Sequence[Row], metric: Metric) -> tables.Table:
    """The fit of each row: its terms with intervals, ratios, and where it breaks even."""
    cells: list[tuple[tables.Cell, ...]] = []
    for row in rows:
        if (own := row.fit(metric)) is None:
            continue
        terms = [
            with_interval(value * scale, own.interval(term), scale)
            for term, value, scale in zip(own.TERMS, own.terms, metric.scales, strict=True)
        ]
        ratio = even = None
        if (found := row.break_even(metric)) is not None and row.baseline is not None:
            share = fits.last_term_ratio(own, row.baseline.fit(metric))
            ratio = with_interval(share.value, share.interval)
            even = f"{found}{_range_text(found.interval)}"
        cells.append((row.name, *terms, ratio, own.residual, even))
    header = ("row", *metric.header, "left (ms)", "break-even")
    return tables.Table(caption=metric.caption, header=header, rows=tuple(cells))


def with_interval(value: float, interval: fits.Interval | None, factor: float = 1.0) -> str:
    """A number and its interval in brackets, which is in units of 1 / factor."""
    text = tables.format_column([value])[0]
    if interval is None:
        return text
    low, high = (tables.format_column([end * factor])[0] for end in (interval.low, interval.high))
    return f"{text} [{low}, {high}]"


def _range_text(interval: fits.Interval | None) -> str:
    """Where lines cross, in words after a sentence; nothing where nothing is known."""
    if interval is None:
        return ""
    said = f"{interval.low:,.0f} to {interval.high:,.0f}"
    if math.isinf(interval.low):
        said = "the lines may be parallel"
    elif interval.high <= 0:
        said = "the lines cross at no length"
    elif interval.low <= 0:
        said = f"the lines cross at {interval.high:,.0f} tokens at the latest"
    return f" (95 %: {said})"


def _figure(rows: Sequence[Row], metric: Metric) -> plots.Figure:
    """Medians with percentiles, the fits, and a mark where a row crosses its baseline."""
    lengths = sorted({length for row in rows for length in row.lengths})
    shortest, longest = lengths[0], lengths[-1]
    # Lines are over the context, which grows by half of the tokens that come.
    shift = 0.0 if metric.is_log else float(rows[0].records[0].case["output_len"]) / 2
    data: list[plots.Trace] = []
    for series, row in enumerate(rows):
        data += _traces(row, series, metric, longest, shift)
    layout = plots.axes("input length (tokens)", f"{metric.name.upper()} (ms)", len(rows))
    layout |= {"shapes": [], "annotations": []}
    for axis in ("xaxis", "yaxis"):
        layout[axis]["type"] = "log" if metric.is_log else "linear"
    middle = longest / 2
    if metric.is_log:
        middle = math.sqrt(shortest * longest)
        ticks = _ticks(lengths)
        layout["xaxis"] |= {"tickvals": ticks, "ticktext": list(map(tables.tokens_text, ticks))}
        medians = [value for row in rows for value in row.values(f"median_{metric.name}_ms")]
        layout["yaxis"] |= plots.log_ticks(medians)
    for row in rows:
        even = row.break_even(metric)
        at = None if even is None else even.crossing
        if at is not None and (metric.is_log or 0 < at < _FAR * longest):
            _mark(layout, at - shift, row.name, at, is_right=at > middle)
    return plots.Figure(caption=_caption(rows, metric), data=tuple(data), layout=layout)


def _traces(
    row: Row, series: int, metric: Metric, longest: int, shift: float
) -> Iterator[plots.Trace]:
    """The points of a row with their percentiles, and its fit; shift: of the lengths in fits."""
    low, middle, high = (
        row.values(f"{which}_{metric.name}_ms") for which in ("p10", "median", "p90")
    )
    group = {"legendgroup": escape(row.name)}
    error_y = plots.error_bars(
        np.subtract(high, middle).tolist(), np.subtract(middle, low).tolist()
    )
    points = plots.markers(escape(row.name), series, row.lengths, middle)
    yield points | {"error_y": error_y} | group
    if (fitted := row.fit(metric)) is None:
        return
    x = [0.0, float(longest)]
    if metric.is_log:
        x = np.geomspace(row.lengths[0], row.lengths[-1], _NUM_DRAWN).tolist()
    y = [fitted.at(one + shift) for one in x]
    curve = {"type": "scatter", "mode": "lines", "name": f"{escape(row.name)}, fitted"} | group
    style = {"hoverinfo": "skip", "showlegend": False, "meta": {"series": series}}
    yield {**curve, **style, "x": x, "y": y}


def _ticks(lengths: Sequence[int]) -> list[int]:
    """The lengths that have room for a mark on a narrow page, the longest among them."""
    kept: list[int] = []
    for length in reversed(lengths):
        if not kept or kept[-1] >= 2.5 * length:
            kept.append(length)
    return kept[::-1]


def _caption(rows: Sequence[Row], metric: Metric) -> str:
    """What is drawn, and a sentence for each row that is compared."""
    has_fit = any(row.fit(metric) is not None for row in rows)
    fitted = f", with the {metric.shape} fitted to each row" if has_fit else ""
    caption = (
        f"{metric.words} over the input length; lower is better. Medians{fitted}; bars reach from "
        "the 10th to the 90th percentile."
    )
    said = [
        f"{row.name} is {found} than {row.baseline.name}{_range_text(found.interval)}."
        for row in rows
        if row.baseline is not None and (found := row.break_even(metric)) is not None
    ]
    if said and metric.is_log:
        said.insert(0, "By the curves, between the lengths that were measured:")
    return " ".join([caption, *said])


def _mark(layout: dict[str, Any], x: float, name: str, tokens: float, *, is_right: bool) -> None:
    """A line down at a break-even, with words that do not cover those of another."""
    layout["shapes"].append(plots.mark("x", x))
    before = sum(text["text"].count("<br>") + 1 for text in layout["annotations"])
    # Of texts, unlike lines, plotly takes the logarithm on an axis that has one.
    at = math.log10(x) if layout["xaxis"]["type"] == "log" else x
    layout["annotations"].append(
        {"x": at, "y": 1 - 0.1 * before, "yref": "paper", "yanchor": "top", "showarrow": False}
        | {"text": plots.wrapped(f"break-even, {name}: {tokens:,.0f}", _MARK_WIDTH)}
        | {"align": "right" if is_right else "left", "xanchor": "right" if is_right else "left"}
    )
