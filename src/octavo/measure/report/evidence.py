"""Verdicts from records: what FP8 gains by machine, model, workload and recipe.

`SPEEDS` is the table of the ops that have a speed. The readings of one verdict are of one machine,
one model and one recipe; speed and memory are relative to the baseline of the same run.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from octavo.measure import rows as grammar
from octavo.measure.records import Measurement
from octavo.measure.report.latency import LATENCY
from octavo.measure.report.pages import make_parts
from octavo.measure.report.recipes import dtype_of, recipe_key, row_name
from octavo.measure.report.retained import Retained, retained
from octavo.measure.report.sections import Rows
from octavo.measure.report.speed import ADVICE, THROUGHPUT, diffusion_size
from octavo.measure.report.tables import beside_ours, grouped, machine_name, newest, tokens_text
from octavo.measure.report.verdict import (
    RATINGS,
    Reading,
    Verdict,
    in_order,
    memory_reading,
    speed_reading,
)

Where = Callable[[Measurement], str]
# Memory of whole steps comes first: it has everything in it.
_MEMORY_RATIOS = {
    "peak_bytes_ratio": "peak memory",
    "cache_ratio": "KV cache",
    "weight_bytes_ratio": "weights",
}


@dataclass(frozen=True, kw_only=True)
class SpeedOf:
    """How the records of an op say what FP8 gains.

    Attributes:
        by: What records of one workload have in common.
        about: What is faster.
        value: The gain of a record over its own baseline.
        place: The size within the workload.
        workload: The workload in words.
        parts: Further gains that must not be losses, by the name of the value.
        check: The command that measures quality.
    """

    by: str
    about: str
    dialect: grammar.Dialect
    workload: Where
    value: Callable[[Measurement], float | None] = lambda r: r.values.get("speedup")
    place: Where = lambda r: ""
    parts: Mapping[str, str] = field(default_factory=dict)
    check: str = "octavo eval perplexity"


def request_speedup(record: Measurement) -> float | None:
    """The gain of a whole answer, from those of its first token and of those between tokens."""
    values = record.values
    if not {"ttft_speedup", "itl_speedup"} <= values.keys():
        return None
    num_gaps = int(record.case["output_len"]) - 1
    first, gaps = values["median_ttft_ms"], num_gaps * values["median_itl_ms"]
    if first + gaps <= 0:
        return None
    return (first * values["ttft_speedup"] + gaps * values["itl_speedup"]) / (first + gaps)


def _load(record: Measurement) -> str:
    case = record.case
    batch = case.get("max_concurrency") or case.get("max_num_seqs") or "all"
    lengths = [f"{int(case[n]):,}" for n in ("input_len", "output_len") if n in case]
    requests = f"{case['num_prompts']} × " if "num_prompts" in case else ""
    return f"{requests}({' + '.join(lengths)}) tokens, {batch} at once" if lengths else "requests"


SPEEDS: Mapping[str, SpeedOf] = {
    "throughput": SpeedOf(
        by=THROUGHPUT.by,
        about="output tokens/s",
        dialect=grammar.ENGINE,
        workload=_load,
        value=lambda r: r.values.get("output_throughput_gain"),
        parts={"median_ttft_gain": "first token", "median_itl_gain": "between tokens"},
    ),
    "latency": SpeedOf(
        by=LATENCY.by,
        about="a whole answer",
        dialect=grammar.ENGINE,
        workload=lambda r: f"{r.case['batch_size']} at once, {r.case['output_len']} tokens out",
        value=request_speedup,
        place=lambda r: f"{tokens_text(int(r.case['input_len']))} tokens",
        parts={"ttft_speedup": "first token", "itl_speedup": "between tokens"},
    ),
    "encoder": SpeedOf(
        by="model weights layers images",
        about="vision tower",
        dialect=grammar.VISION,
        workload=lambda r: f"{r.case['images']} images at once",
        place=lambda r: str(r.case["resolution"]),
        check="octavo eval chartqa",
    ),
    "diffusion_step": SpeedOf(
        by="model weights layers inputs",
        about="one step",
        dialect=grammar.DIFFUSION,
        workload=lambda r: f"a step of {diffusion_size(r)}",
        check="octavo eval images",
    ),
    "generate": SpeedOf(
        by="model layers",
        about="one token",
        dialect=grammar.GENERATE,
        workload=lambda r: "decoding in transformers",
        place=lambda r: f"{r.case['batch']} × {tokens_text(int(r.case['context']))}",
    ),
    "generate_call": SpeedOf(
        by="model layers",
        about="one token",
        dialect=grammar.GENERATE,
        workload=lambda r: "generate() as it is called",
        place=lambda r: f"{r.case['batch']} × {tokens_text(int(r.case['prompt']))}",
    ),
}


@dataclass(frozen=True)
class _Found:
    """A verdict on one recipe, and what tells whether another is on the same.

    gains: by place.
    """

    verdict: Verdict
    key: str
    dtype: str | None
    gains: Mapping[str, float] = field(default_factory=dict)

    @property
    def subject(self) -> tuple[str, str]:
        """The machine and the model."""
        return self.verdict.machine, self.verdict.model


def make_verdicts(records: Rows) -> list[Verdict]:
    """A verdict for each machine, model and workload that FP8 was measured at, or advised for.

    A model whose speed was measured with none of the recipes that its quality was has another one.
    """
    parts = {op: part for part in make_parts() for op in part.ops}
    shown = [r for r in records if r.op in parts and not parts[r.op].missing_names(r)]
    ours = [record for record in beside_ours(shown) if record.impl != "vllm"]
    qualities = retained(ours)
    speeds = [
        [_with_quality(one, qualities) for one in _candidates(own, speed)]
        for op, speed in SPEEDS.items()
        for own in _groups(ours, op, speed.by)
    ]
    joined = {one.subject for own in speeds for one in own if one.verdict.quality is not None}
    alone: dict[object, list[_Found]] = {}
    for one in qualities:
        if one.subject not in joined:
            alone.setdefault((one.subject, dtype_of(one.record)), []).append(_alone(one))
    advised = [_advised(own) for own in _groups(ours, "advice", ADVICE.by)]
    chosen = [_chosen(found) for found in (*speeds, *alone.values()) if found]
    return in_order([*chosen, *advised])


def _groups(records: Rows, op: str, names: str) -> list[list[Measurement]]:
    return list(grouped([r for r in records if r.op == op], *names.split()).values())


def _candidates(records: Rows, speed: SpeedOf) -> list[_Found]:
    """Every FP8 recipe of one workload."""
    by_key: dict[str, list[Measurement]] = {}
    for record in records:
        gain = speed.value(record)
        is_compared = record.baseline is not None and gain is not None and 0 < gain < math.inf
        if is_compared and (key := recipe_key(record, speed.dialect)) is not None:
            by_key.setdefault(key, []).append(record)
    return [_candidate(key, own, records, speed) for key, own in by_key.items()]


def _candidate(key: str, own: Rows, records: Rows, speed: SpeedOf) -> _Found:
    fastest = sorted(_one_run(own, speed), key=lambda r: speed.value(r) or 0.0)
    places = {speed.place(r): r for r in fastest}  # the fastest way to run counts
    sized = sorted(places.items(), key=lambda item: _size(item[1]))
    gains = {place: gain for place, r in sized if (gain := speed.value(r)) is not None}
    parts = [
        (f"{words} ", place, r.values[name])
        for place, r in sized
        for name, words in speed.parts.items()
        if name in r.values
    ]
    last = sized[-1][1]
    reading, losses = speed_reading(list(gains.items()), speed.about, parts)
    is_random = last.case.get("weights") == "random"
    verdict = Verdict(
        machine=machine_name(last),
        model=str(last.case["model"]),
        workload=speed.workload(last),
        recipe=row_name(last),
        baseline=str(last.baseline),
        speed=reading,
        losses=losses,
        memory=_memory(last, records),
        checks=(f"{speed.check}{', with real weights' if is_random else ''}",),
    )
    return _Found(verdict, key, dtype_of(last), gains)


def _one_run(own: Rows, speed: SpeedOf) -> Rows:
    """The newest records; of lengths those of one command, which has the most."""
    if not speed.parts:
        return newest(own)
    runs = [newest(run, "input_len") for run in grouped(own, "command").values()]
    return max(runs, key=lambda run: (len(run), max(record.date for record in run)))


def _size(record: Measurement) -> tuple[float, float]:
    """What orders the sizes of a workload, the largest last."""
    sizes = (record.case.get(name) for name in ("batch", "context", "prompt", "input_len"))
    known = [float(size) for size in sizes if isinstance(size, int | float)]
    return math.prod(known), record.values.get("tokens", 0.0)


def _memory(record: Measurement, records: Rows) -> Reading | None:
    """Bytes of the same recipe in the same run, over those of its baseline; None if unknown."""
    about = record.command, machine_name(record)
    run = [r for r in records if (r.command, machine_name(r)) == about]
    for name, words in _MEMORY_RATIOS.items():
        for own in (record, *run):
            if row_name(own) == row_name(record) and name in own.values:
                return memory_reading(own.values[name], words)
    first = next((r for r in run if row_name(r) == record.baseline), None)
    known = first.case.keys() & record.case.keys() if first else set()
    names = [name for name in ("weight_bytes", "cache_bytes") if name in known]
    if first and first.case.get("num_pages") != record.case.get("num_pages"):
        names = names[:1]  # as many bytes may be for more tokens
    if first is None or not names:
        return None
    before, after = (sum(float(r.case[name]) for name in names) for r in (first, record))
    words = _MEMORY_RATIOS[f"{names[0]}_ratio"] if len(names) == 1 else "weights and KV cache"
    if words == "weights" and record.case.get("kv_cache_dtype", "auto") != "auto":
        words = "weights; the KV cache is not recorded"
    return memory_reading(after / before, words) if before else None


def _advised(records: Rows) -> Verdict:
    """What octavo advise expects of its recipe."""
    case = records[0].case
    points = [(str(r.case["what"]), r.values["speedup"]) for r in records if "speedup" in r.values]
    speed, losses = speed_reading(points, "") if points else (None, ())
    sizes = [r for r in records if {"before_bytes", "after_bytes"} <= r.values.keys()]
    before, after = (sum(r.values[f"{n}_bytes"] for r in sizes) for n in ("before", "after"))
    lines = str(case["recipe"]).splitlines()
    quantized = [line.strip("[]") for line in lines if line.startswith("[")]
    return Verdict(
        machine=str(case["gpu"]),
        model=str(case["model"]),
        workload=f"{case.get('concurrency', 1)} × {int(case['context']):,} tokens",
        recipe=" + ".join(quantized) or "nothing in FP8",
        baseline="BF16",
        speed=speed and replace(speed, about=speed.points[-1][0]),
        losses=losses,
        memory=memory_reading(after / before, " and ".join(str(r.case["what"]) for r in sizes))
        if before
        else None,
        checks=("octavo bench", "octavo eval"),
        is_predicted=True,
    )


def _with_quality(found: _Found, qualities: Sequence[Retained]) -> _Found:
    """With the quality of the same recipe, model and machine, if it was measured."""
    for one in qualities:
        is_same = (one.subject, one.key) == (found.subject, found.key)
        if is_same and dtype_of(one.record) in (None, found.dtype):
            verdict = replace(found.verdict, quality=one.reading, checks=())
            return replace(found, verdict=verdict)
    return found


def _alone(one: Retained) -> _Found:
    """The quality of a model whose speed with this recipe nobody measured."""
    machine, model = one.subject
    dtype = dtype_of(one.record)
    verdict = Verdict(
        machine=machine,
        model=model,
        workload=f"quality alone{f', beside {dtype}' if dtype else ''}",
        recipe=row_name(one.record),
        baseline=str(one.record.baseline),
        quality=one.reading,
        checks=(one.check,),
    )
    return _Found(verdict, one.key, dtype)


def _chosen(found: Sequence[_Found]) -> Verdict:
    """The verdict on the recipe with the best answer, and among equals the fastest.

    Without speeds: the one that leaves least unquantized, then the closest to the baseline.
    """
    shared = [place for place in found[0].gains if all(place in one.gains for one in found)]

    def gain(one: _Found) -> float:
        gains = [one.gains[place] for place in shared] or list(one.gains.values())
        return statistics.geometric_mean(gains) if gains else 1.0

    def rank(one: _Found) -> tuple[float, ...]:
        own, quality = one.verdict, one.verdict.quality
        num_kept = len(re.findall(r"\b(?:ignore|skip)=", own.recipe)) if not one.gains else 0
        percent = 0.0 if quality is None else quality.number
        return -RATINGS.index(own.rating), quality is not None, gain(one), -num_kept, percent

    best, *others = sorted(found, key=rank, reverse=True)
    if not others:
        return best.verdict
    at = f" at {shared[-1]}" if shared and shared[-1] else ""

    def said(one: _Found) -> str:
        reading = one.verdict.speed or one.verdict.quality
        number = f"{one.gains[shared[-1]]:.2f}×" if shared else reading.text if reading else ""
        return f"{one.verdict.recipe} {number}"

    if not best.gains:
        is_best = rank(best)[-1] >= max(rank(one)[-1] for one in others)
        how = "Retains most" if is_best else "Leaves the fewest layers unquantized"
    elif gain(best) >= max(map(gain, others)):
        how = "The fastest"
    else:
        how = "The best of speed and quality"
    more = "" if len(others) < 4 else f" and {len(others) - 3} more"
    those = ", ".join(map(said, (best, *others[:3])))
    choice = f"{how}{at}: {those}{more}."
    return replace(best.verdict, choice=choice)
