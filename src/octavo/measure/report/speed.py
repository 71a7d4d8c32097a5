"""How fast whole models are: one step, many requests at once; and advice beside measurements."""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from html import escape

from octavo.measure.records import Measurement
from octavo.measure.report import plots
from octavo.measure.report.latency import ENGINE
from octavo.measure.report.sections import Kind, Rows
from octavo.measure.report.tables import Cell, Table, grouped, newest, tokens_text

# Whose records advice can be compared with.
COMPARED_OPS = ("latency", "throughput", "encoder", "diffusion_step")


def _step(
    op: str,
    *,
    title: str,
    what: str,
    size: Callable[[Measurement], str],
    needs: str = "",
    x_title: str,
    columns: str,
) -> Kind:
    """Whole models that run one step, at several sizes: speed-ups, and medians as a table."""

    def rows(records: Rows) -> Rows:
        sized = [replace(r, case={**r.case, "size": size(r)}) for r in newest(records)]
        return [
            min(of_recipe, key=lambda row: row.values["median_ms"])
            for of_size in grouped(sized, "size").values()
            for of_recipe in grouped(of_size, "recipe").values()
        ]

    def figures(rows: Rows) -> Iterable[plots.Figure]:
        compared = _compared(rows)
        if not compared:
            return
        baselines = sorted({str(row.baseline) for row in compared})
        caption = f"{what}: speed-up over {' or '.join(baselines)}; higher is better."
        if len({row.case["size"] for row in rows}) == 1:
            # No groups and no legend: many recipes have room below each other.
            speedups = {str(row.case["recipe"]): row.values["speedup"] for row in compared}
            yield plots.name_bars(
                speedups, caption=caption, value_title="speed-up (×)", reference=1.0
            )
        else:
            yield plots.bars(
                compared,
                caption=caption,
                x="size",
                y="speedup",
                series="recipe",
                x_title=x_title,
                y_title="speed-up (×)",
                reference=1.0,
            )

    return Kind(
        ops=(op,),
        needs=f"model recipe median_ms {needs}",
        rows=rows,
        title=f"{title}: {{model}}",
        text=f"{what}. A row is the fastest of the ways to run it that were measured (CUDA graphs "
        "or not, compiled or not).",
        figures=figures,
        caption=f"{what}: medians",
        columns=columns,
    )


def _compared(rows: Rows) -> Rows:
    return [row for row in rows if row.baseline is not None and "speedup" in row.values]


def diffusion_size(record: Measurement) -> str:
    """The inputs of a step, and how many of its blocks ran."""
    layers = record.case.get("layers", "all")
    kept = "" if layers == "all" else f", {layers} block{'s' if layers != 1 else ''} of each kind"
    return f"{record.case.get('inputs', 'inputs')}{kept}"


ENCODER = _step(
    "encoder",
    title="Vision encoder",
    what="The whole vision tower, by resolution and number of images",
    size=lambda r: f"{r.case['images']} × {r.case['resolution']}",
    needs="images resolution",
    x_title="images",
    columns="size recipe impl median_ms speedup tower_relative_rms",
)
DIFFUSION = _step(
    "diffusion_step",
    title="Diffusion step",
    what="One step of the transformer, by the size of its inputs",
    size=diffusion_size,
    x_title="inputs",
    columns="size recipe attention median_ms speedup relative_rms weight_bytes_ratio "
    "peak_bytes_ratio",
)
GENERATE = _step(
    "generate",
    title="One token in transformers",
    what="One decoding step with an octavo cache, by batch and context",
    size=lambda r: f"{r.case['batch']} × {tokens_text(int(r.case['context']))}",
    needs="batch context",
    x_title="batch × context (tokens)",
    columns="size recipe median_ms speedup cache_ratio relative_rms",
)
GENERATE_CALLS = _step(
    "generate_call",
    title="generate() as it is called",
    what="One more token of generate() in transformers, without graphs, by batch and prompt",
    size=lambda r: f"{r.case['batch']} × {tokens_text(int(r.case['prompt']))}",
    needs="batch prompt",
    x_title="batch × prompt (tokens)",
    columns="size recipe median_ms speedup relative_rms",
)


def _host_figures(rows: Rows) -> Iterable[plots.Figure]:
    units = {str(row.case["call"]): row.values["over_linear"] for row in rows}
    caption = f"What a call costs the host, in units of {rows[0].baseline}; lower is better."
    yield plots.name_bars(units, caption=caption, value_title="over F.linear (×)")


HOST = Kind(
    ops=("host",),
    needs="call median_us over_linear",
    by="device",
    rows="call",
    title="Calls on the host",
    text="One eager call of each op on tiny tensors, until everything is launched; on a CPU, "
    "until it is done.",
    figures=_host_figures,
    caption="Calls on the host: medians",
    columns="impl call median_us p20_us p80_us over_linear budget relative_rms",
)


def _throughput_text(rows: Rows) -> str:
    case = rows[0].case
    words = {"num_prompts": "requests"}
    words |= {"input_len": "tokens of a prompt", "output_len": "tokens of an answer"}
    load = [f"{case[n]:,} {word}" for n, word in words.items() if isinstance(case.get(n), int)]
    batch = case.get("max_concurrency") or case.get("max_num_seqs") or "all"
    return (
        f"{', '.join(load)}, {batch} at once. Lengths may vary around these by "
        f"{case.get('range_ratio', 0)} of them. A gain is over the first row of the same command."
    )


THROUGHPUT = Kind(
    ops=("throughput",),
    needs="model row output_throughput",
    by=f"{ENGINE} data num_prompts input_len output_len range_ratio max_concurrency max_num_seqs "
    "max_num_batched_tokens",
    rows="row",
    title="Throughput: {model}",
    text=_throughput_text,
    figures=lambda rows: [
        plots.name_bars(
            {str(row.case["row"]): row.values["output_throughput"] for row in rows},
            caption="Output tokens per second of all requests together, by row; higher is better.",
            value_title="output (tokens/s)",
        )
    ],
    caption="Throughput, by row",
    columns="row output_throughput total_token_throughput output_throughput_gain median_ttft_ms "
    "median_tpot_ms relative_rms",
)
SERVE = Kind(
    ops=("serve",),
    needs="model output_throughput",
    title="Serving: {model}",
    text="Requests over HTTP to a server, as its users send them: at a rate, or with a number of "
    "them at once.",
    caption="Served requests, by run",
    columns="server_options request_rate max_concurrency num_prompts request_throughput "
    "output_throughput request_goodput median_ttft_ms p99_ttft_ms median_tpot_ms "
    "median_itl_ms p99_itl_ms",
)


def _advice_headline(rows: Rows) -> str:
    errors = sorted(abs(r.values["error_percent"]) for r in rows if "error_percent" in r.values)
    if not errors:
        return ""
    return (
        f"{len(errors)} speed-ups of whole models predicted "
        f"without their own records, half of them within {errors[(len(errors) - 1) // 2]:.1f} %, "
        f"all within {errors[-1]:.1f} %."
    )


def _advice_figures(rows: Rows) -> Iterable[plots.Figure]:
    models: dict[str, list[Measurement]] = {}
    for row in rows:
        if "predicted_speedup" in row.values:
            models.setdefault(str(row.case["model"]), []).append(row)
    if not any("error_percent" in row.values for row in rows):
        return
    data = []
    for number, (model, own) in enumerate(models.items()):
        x, y = ([r.values[f"{how}_speedup"] for r in own] for how in ("measured", "predicted"))
        trace = plots.markers(plots.wrapped(model), number, x, y)
        trace["text"] = [escape(f"{row.case['what']}, {row.case['row']}") for row in own]
        hover = "%{text}<br>measured %{x:.2f}, predicted %{y:.2f}<extra></extra>"
        data.append(trace | {"hovertemplate": hover})
    ends = [end for trace in data for axis in "xy" for end in trace[axis]]
    equal = [min(ends), max(ends)]
    yield plots.Figure(
        caption="Predicted over measured speed-up of whole models; on the dotted line they are "
        "equal.",
        data=(*data, plots.guide_line("equal", equal, equal, width=1, dash="dot")),
        layout=plots.axes("measured speed-up (×)", "predicted speed-up (×)", 1 + len(data)),
        height_rem=26,
    )


# Records that compare advice with what was measured.
COMPARED_ADVICE = Kind(
    ops=("advise",),
    needs="model what row measured_speedup",
    by="",
    rows=lambda records: records,
    title="Advice: predicted against measured",
    text="What octavo advise says of a model before anything of it was measured here, beside what "
    "was measured. Rows without a prediction say why.",
    headline=_advice_headline,
    figures=_advice_figures,
    caption="Speed-ups over BF16, predicted without the model's own records, and measured",
    columns="model what row predicted_speedup measured_speedup error_percent note",
)


def _advised(rows: Rows) -> str:
    """What advice was asked for."""
    case = rows[0].case
    workload = f"{case.get('concurrency', 1)} × {int(case['context']):,} tokens"
    return f"{case['model']} on {case['gpu']}, {workload}"


def _advised_text(rows: Rows) -> str:
    case = rows[0].case
    parts = [
        "Nothing here was measured on this machine: octavo advise computes it from the sizes of "
        "the model and what is known of the GPU.",
        *_lines(case.get("reasons")),
        *(f"{row.case['what']}: {row.case['note']}." for row in rows if "note" in row.case),
    ]
    if case.get("warnings"):
        parts.append(f"Mind: {' '.join(_lines(case['warnings']))}")
    if "serve" in case:
        parts.append(f"To serve it: {case['serve']}")
    return "\n\n".join(parts)


def _advised_tables(rows: Rows) -> list[Table]:
    header: tuple[str, ...] = ("what", "BF16", "recipe", "speed-up (×)")
    expected = Table(
        caption="What to expect of the recipe", header=header, rows=tuple(map(_expected, rows))
    )
    text = str(rows[0].case["recipe"])
    try:
        settings = _flat(tomllib.loads(text)) or [("nothing is quantized", "")]
    except tomllib.TOMLDecodeError:  # of a record that somebody wrote by hand
        settings = [("recipe", text)]
    header = ("setting", "value")
    recipe = Table(caption="The recipe (recipe.toml)", header=header, rows=tuple(settings))
    return [expected, recipe]


ADVICE = Kind(
    ops=("advice",),
    needs="model gpu context what recipe reasons",
    by="model gpu context concurrency",
    rows="what",
    title=lambda rows: f"Advice: {_advised(rows)}",
    text=_advised_text,
    tables=_advised_tables,
)


def _expected(record: Measurement) -> tuple[Cell, ...]:
    values = record.values
    unit = next((unit for unit in _AMOUNTS if f"before_{unit}" in values), None)
    before, after = (
        unit and _AMOUNTS[unit](values[f"{which}_{unit}"]) for which in ("before", "after")
    )
    return str(record.case["what"]), before, after, unit and values.get("speedup")


_AMOUNTS: dict[str, Callable[[float], str]] = {
    "ms": lambda ms: f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.2f} ms",
    "bytes": lambda number: f"{number / 1e9:,.2f} GB",
    "count": lambda number: f"{number:,.0f}",
}


def _lines(text: object) -> list[str]:
    return [line for line in str(text or "").splitlines() if line]


def _flat(table: dict[str, object], start: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            found += _flat(value, f"{start}{name}.")
        else:
            found.append((f"{start}{name}", str(value)))
    return found
