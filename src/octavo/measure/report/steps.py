"""Whole models that run one step: vision encoders, diffusion transformers, one token after all."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.measure.records import Measurement
from octavo.measure.report.filled import filled_table
from octavo.measure.report.html import Section
from octavo.measure.report.needle import tokens_text
from octavo.measure.report.plots import bars
from octavo.measure.report.points import name_bars, titled
from octavo.measure.report.select import grouped, newest

_WAYS = "fastest of the ways to run it that were measured (CUDA graphs or not, compiled or not)"


def encoder_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine and vision tower of `octavo bench encoder`."""
    return [
        _section(
            own,
            title=f"Vision encoder: {model}, {machine}",
            what="The whole vision tower, by resolution and number of images",
            size=lambda r: f"{r.case['images']} × {r.case['resolution']}",
            x_title="images",
            columns=("size", "recipe", "impl", "median_ms", "speedup", "tower_relative_rms"),
        )
        for (machine, model), own in grouped(records, "model").items()
    ]


def diffusion_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine and transformer of `octavo bench diffusion`."""
    return [
        _section(
            own,
            title=f"Diffusion step: {model}, {machine}",
            what="One step of the transformer, by the size of its inputs",
            size=_step_size,
            x_title="inputs",
            columns=(
                *("size", "recipe", "attention", "median_ms", "speedup", "relative_rms"),
                *("weight_bytes_ratio", "peak_bytes_ratio"),
            ),
        )
        for (machine, model), own in grouped(records, "model").items()
    ]


def generate_sections(records: Sequence[Measurement]) -> list[Section]:
    """A section for each machine and model of `octavo bench generate`."""
    return [
        _section(
            own,
            title=f"One token in transformers: {model}, {machine}",
            what="One decoding step with an octavo cache, by batch and context",
            size=lambda r: f"{r.case['batch']} × {tokens_text(int(r.case['context']))}",
            x_title="batch × context (tokens)",
            columns=("size", "recipe", "median_ms", "speedup", "cache_ratio", "relative_rms"),
        )
        for (machine, model), own in grouped(records, "model").items()
    ]


def _step_size(record: Measurement) -> str:
    layers = record.case.get("layers", "all")
    kept = "" if layers == "all" else f", {layers} block{'s' if layers != 1 else ''} of each kind"
    return f"{record.case.get('inputs', 'inputs')}{kept}"


def _section(
    records: Sequence[Measurement],
    *,
    title: str,
    what: str,
    size: Callable[[Measurement], str],
    x_title: str,
    columns: Sequence[str],
) -> Section:
    fastest: dict[tuple[str, str], Measurement] = {}
    for record in newest(records):
        key = size(record), str(record.case["recipe"])
        if key not in fastest or record.values["median_ms"] < fastest[key].values["median_ms"]:
            fastest[key] = record
    rows = [
        replace(record, case={**record.case, "size": name}) for (name, _), record in fastest.items()
    ]
    sizes = list(dict.fromkeys(row.case["size"] for row in rows))
    rows.sort(key=lambda row: sizes.index(row.case["size"]))
    compared = [row for row in rows if row.baseline is not None and "speedup" in row.values]
    figures = []
    if compared:
        baselines = sorted({str(row.baseline) for row in compared})
        caption = f"{what}: speed-up over {' or '.join(baselines)}; higher is better."
        if len(sizes) == 1:  # no groups and no legend: many recipes have room below each other
            speedups = {str(row.case["recipe"]): row.values["speedup"] for row in compared}
            figures.append(name_bars(speedups, caption=caption, value_title="speed-up (×)"))
        else:
            figure = bars(compared, caption=caption, x="size", y="speedup", series="recipe")
            figures.append(titled(figure, x_title, "speed-up (×)"))
    best = max(compared, key=lambda row: row.values["speedup"], default=None)
    return Section(
        title=title,
        text=f"{what}. A row is the {_WAYS}.",
        headline=""
        if best is None
        else f"{best.case['model']}: {best.values['speedup']:.2f} times as fast with "
        f"{best.case['recipe']} at {best.case['size']}, against {best.baseline}.",
        figures=tuple(figures),
        tables=(filled_table(rows, caption=f"{what}: medians", columns=columns),),
    )
