"""What is retained of a model's quality, as readings of a verdict: scores, needles, images."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from octavo.measure import rows as grammar
from octavo.measure.records import Measurement
from octavo.measure.report.recipes import dtype_of, recipe_key, row_name
from octavo.measure.report.sections import Rows
from octavo.measure.report.tables import grouped, machine_name, newest
from octavo.measure.report.verdict import (
    NORMAL_95,
    RATINGS,
    Reading,
    image_reading,
    quality_reading,
)

# Op -> the words of its recipes, and the command that measures the speed of such a model.
_TEXT = (grammar.LANGUAGE, "octavo bench latency")
QUALITIES: Mapping[str, tuple[grammar.Dialect, str]] = {
    "perplexity": _TEXT,
    "needle": _TEXT,
    "mrcr": _TEXT,
    "choice": _TEXT,
    "code": _TEXT,
    "math": _TEXT,
    "tasks": _TEXT,
    "chartqa": (grammar.VISION, "octavo bench encoder"),
    "images": (grammar.IMAGES, "octavo bench diffusion"),
}


@dataclass(frozen=True)
class Retained:
    """The quality that a recipe retains of a model, on one machine.

    record: of the task that decides. key: of the recipe.
    """

    record: Measurement
    key: str
    reading: Reading

    @property
    def subject(self) -> tuple[str, str]:
        """The machine and the model."""
        return machine_name(self.record), str(self.record.case["model"])

    @property
    def check(self) -> str:
        """The command that measures how fast such a model is."""
        return QUALITIES[self.record.op][1]


def retained(records: Rows) -> list[Retained]:
    """The quality of each machine, model, dtype and recipe: of several tasks the least."""
    tasks: dict[tuple[object, ...], list[Retained]] = {}
    for op, (dialect, _) in QUALITIES.items():
        own = [record for record in records if record.op == op]
        for record, reading in _needles(own) if op == "needle" else _scored(own):
            if (key := recipe_key(record, dialect)) is not None:
                one = Retained(record, key, reading)
                tasks.setdefault((one.subject, dtype_of(record), key), []).append(one)
    found = []
    for several in tasks.values():
        least = min(several, key=lambda x: (-RATINGS.index(x.reading.rating), x.reading.number))
        if len(several) > 1:
            about = f"{least.reading.about}; the least of {len(several)} tasks"
            least = replace(least, reading=replace(least.reading, about=about))
        found.append(least)
    return found


# What tells tasks and recipes apart; of records that are alike in it the newest counts.
_TASKS = (
    *("op", "model", "dtype", "data", "subset", "split", "context", "chunk", "num_windows"),
    *("num_questions", "num_needles", "bucket", "repetitions", "temperature"),
    *("prompts_sha256", "num_inference_steps", "recipe", "row"),
)


def _scored(records: Rows) -> Iterator[tuple[Measurement, Reading]]:
    """Records that say themselves what is retained of the quality."""
    for record in newest([r for r in records if r.baseline is not None], *_TASKS):
        values, case = record.values, record.case
        if "worst_psnr_db" in values:
            about = f"PSNR of the worst of {case.get('num_pictures', 'all')} images"
            yield record, image_reading(values["worst_psnr_db"], about)
        elif "recovery_percent" in values and case.get("bucket", "all") == "all":
            yield (
                record,
                quality_reading(
                    values["recovery_percent"],
                    _task(record),
                    error=values.get("recovery_standard_error_percent"),
                    interval=_chart_interval(record),
                ),
            )


def _task(record: Measurement) -> str:
    case = record.case
    if record.op == "perplexity":
        return f"perplexity of {case.get('data', 'a text')}, {case['context']:,} tokens"
    name = case["data"] if record.op == "tasks" else record.op
    number = record.get("num_questions")
    return f"{name}, {number:g} questions" if isinstance(number, int | float) else str(name)


def _chart_interval(record: Measurement) -> tuple[float, float] | None:
    """The interval of the difference in points, as one of the share that is retained."""
    names = ["relaxed_accuracy_percent", "difference_points"]
    names += ["difference_low_points", "difference_high_points"]
    if not set(names) <= record.values.keys():
        return None
    score, difference, low, high = (record.values[name] for name in names)
    base = score - difference
    return (100 * (base + low) / base, 100 * (base + high) / base) if base > 0 else None


_HAYSTACKS = ("model", "dtype", "haystack", "num_keys", "repetitions", "chunk")


def _needles(records: Rows) -> Iterator[tuple[Measurement, Reading]]:
    """Needles found at all lengths and depths, of those that the baseline finds there."""
    for own in grouped(records, *_HAYSTACKS).values():
        cells: dict[str, dict[object, Measurement]] = {}
        for record in newest(own, "recipe", "length", "depth"):
            place = record.case["length"], record.case["depth"]
            cells.setdefault(row_name(record), {})[place] = record
        for found in cells.values():
            first = next(iter(found.values()))
            base = cells.get(str(first.baseline), {})
            both = [place for place in found if place in base]
            num_own, num_base = (
                round(sum(some[place].values["num_found"] for place in both))
                for some in (found, base)
            )
            if num_base:
                share = min(num_own / num_base, 1.0)
                low, high = (100 * end for end in _wilson(share, num_base))
                about = f"{num_own} of {num_base} needles"
                yield first, quality_reading(100 * share, about, interval=(low, high))


def _wilson(share: float, number: int) -> tuple[float, float]:
    """Wilson's interval of 95 % of a share, which says something of all and of none as well."""
    z2 = NORMAL_95**2
    middle = (share + z2 / (2 * number)) / (1 + z2 / number)
    reach = NORMAL_95 * math.sqrt(share * (1 - share) / number + z2 / (4 * number**2))
    reach /= 1 + z2 / number
    return max(middle - reach, 0.0), min(middle + reach, 1.0)
