"""A verdict on FP8 for one model and workload: an answer, three readings and the thresholds.

A verdict is made of records of one machine, one model and one recipe (`evidence.py` reads them).
What was not measured is a reading of None, and the answer says what it still depends on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

# Speed is a ratio to the baseline of the same run. A gain counts from here on; a time this much
# longer counts as a loss, and less is within what repetitions of one command differ by.
FASTER, SLOWER = 1.05, 0.97
# Memory is a ratio too: below SMALLER it is a saving, above LARGER a cost.
SMALLER, LARGER = 0.95, 1.02
# Quality retained, in percent of the baseline's. Below LEAST_PERCENT octavo advise warns as well.
GOOD_PERCENT, LEAST_PERCENT = 99.0, 95.0
# PSNR of the worst image beside the baseline's: differences hard to see, and another image.
GOOD_DB, LEAST_DB = 30.0, 20.0
# What the colours of a page mean.
THRESHOLDS = (
    f"Speed is green from {FASTER:g}× of the baseline on, as long as nothing is below {SLOWER:g}×; "
    f"memory below {SMALLER:g}×; quality from {GOOD_PERCENT:g} % on, if its interval of 95 % ends "
    f"above {LEAST_PERCENT:g} %, and red below that; images from {GOOD_DB:g} dB on, and red below "
    f"{LEAST_DB:g} dB. A verdict is green if speed and quality are, and red if FP8 is slower or no "
    "faster and saves no memory, or if quality is lost; amber is all between, and all that was "
    "measured in part. Lines are at the baseline, of images at what is green. Numbers of one "
    "verdict are of one machine, model and recipe."
)
NORMAL_95 = 1.96  # standard errors to either end of an interval of 95 %

Rating = Literal["good", "fair", "poor"]
RATINGS: tuple[Rating, ...] = ("good", "fair", "poor")  # green, amber, red
RATING_WORDS: dict[Rating, str] = {"good": "green", "fair": "amber", "poor": "red"}
RATING_STYLES: dict[Rating, str] = {"good": "bold green", "fair": "bold yellow", "poor": "bold red"}
MISSING_WORDS = {"speed": "not measured", "memory": "not recorded", "quality": "not measured"}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One number of a verdict, how good it is, and what its small plot shows.

    Attributes:
        text: The number with its unit, such as "1.66×".
        about: What it is a number of, such as "output tokens/s".
        points: Where it was measured, and the value there; the last one is the number.
        reference: The value of the baseline, or of what is good enough.
        low, high: An interval of 95 % around the number, if there is one.
    """

    text: str
    about: str
    rating: Rating
    points: tuple[tuple[str, float], ...]
    reference: float
    low: float | None = None
    high: float | None = None

    @property
    def number(self) -> float:
        """The number itself."""
        return self.points[-1][1]

    @property
    def places(self) -> str:
        """The number at each place, where there are several."""
        several = self.points if len(self.points) > 1 else ()
        return " · ".join(f"{value:.2f}× {place}" for place, value in several)


def speed_reading(
    points: Sequence[tuple[str, float]], about: str, parts: Sequence[tuple[str, str, float]] = ()
) -> tuple[Reading, tuple[str, ...]]:
    """Speed-ups at sizes, the largest size last, and what is slower there, in words.

    parts: speed-ups of parts that must not be losses either: what, where and how much.
    """
    losses = [
        f"{what}{ratio:.2f}×{f' at {at}' if at else ''}"
        for what, at, ratio in [*(("", *point) for point in points), *parts]
        if ratio < SLOWER
    ]
    ratios = [ratio for _, ratio in points]
    rating: Rating = "good" if max(ratios) >= FASTER else "fair"
    if losses:
        rating = "poor" if max(ratios) < FASTER and min(ratios) < SLOWER else "fair"
    last, ratio = points[-1]
    return Reading(
        text=f"{ratio:.2f}×",
        about=f"{about} at {last}" if last and len(points) > 1 else about,
        rating=rating,
        points=tuple(points),
        reference=1.0,
    ), tuple(losses)


def memory_reading(ratio: float, about: str) -> Reading:
    """Bytes with the recipe over those of the baseline."""
    rating: Rating = "good" if ratio < SMALLER else "fair" if ratio <= LARGER else "poor"
    return Reading(
        text=f"{ratio:.2f}×", about=about, rating=rating, points=(("", ratio),), reference=1.0
    )


def quality_reading(
    percent: float,
    about: str,
    *,
    error: float | None = None,
    interval: tuple[float, float] | None = None,
) -> Reading:
    """Quality retained in percent. error: one standard error; interval: of 95 %, in its place.

    Good needs an interval that ends above the least: one sample is never proof.
    """
    text = f"{percent:.1f} %"
    if error is not None:
        text += f" ± {error:.1f}"
        interval = percent - NORMAL_95 * error, percent + NORMAL_95 * error
    low, high = interval or (None, None)
    rating: Rating = "good" if percent >= GOOD_PERCENT else "fair"
    if low is None or low < LEAST_PERCENT:
        rating = "fair"
    if not percent >= LEAST_PERCENT:  # NaN is a broken result
        # Noise may have done it where the interval reaches what would be good.
        rating = "fair" if high is not None and high >= GOOD_PERCENT else "poor"
    return Reading(
        text=text,
        about=about,
        rating=rating,
        points=(("", percent),),
        reference=100.0,
        low=low,
        high=high,
    )


def image_reading(worst_db: float, about: str) -> Reading:
    """PSNR of the worst image, beside that of the baseline."""
    rating: Rating = "fair" if worst_db >= LEAST_DB else "poor"
    return Reading(
        text=f"{worst_db:.1f} dB",
        about=about,
        rating="good" if worst_db >= GOOD_DB else rating,
        points=(("", worst_db),),
        reference=GOOD_DB,
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether to use FP8 for a model and a workload on a machine, and why.

    Attributes:
        baseline: What speed and memory are relative to.
        losses: Where the recipe is slower, in words.
        choice: Why this recipe, where there are several.
        checks: Commands that measure what is missing.
        is_predicted: Whether speed and memory are octavo advise's, not measured.
    """

    machine: str
    model: str
    workload: str
    recipe: str
    baseline: str
    speed: Reading | None = None
    memory: Reading | None = None
    quality: Reading | None = None
    losses: tuple[str, ...] = ()
    choice: str = ""
    checks: tuple[str, ...] = ()
    is_predicted: bool = False

    @property
    def readings(self) -> dict[str, Reading | None]:
        """The three numbers by name; None was not measured."""
        return {"speed": self.speed, "memory": self.memory, "quality": self.quality}

    @property
    def answer(self) -> str:
        """What follows "Use FP8:"."""
        return self._decision[0]

    @property
    def rating(self) -> Rating:
        """Green, amber or red."""
        return self._decision[1]

    @property
    def _decision(self) -> tuple[str, Rating]:
        speed, memory, quality = self.speed, self.memory, self.quality
        saves = memory is not None and memory.rating == "good"
        if quality is not None and quality.rating == "poor":
            return "no, quality is lost", "poor"
        if speed is not None and speed.rating != "good":
            how = "slower" if speed.rating == "poor" else "no faster"
            if max(value for _, value in speed.points) >= FASTER:
                return f"it depends: {self.losses[0]}", "fair"
            return (
                (f"it depends: {how}, less memory", "fair")
                if saves
                else (f"no, it is {how}", "poor")
            )
        if speed is not None and memory is not None and memory.rating == "poor":
            return "it depends: faster, more memory", "fair"
        if quality is not None and quality.rating == "fair":
            return "it depends: check the quality", "fair"
        if speed is None:
            return "yes, if it is faster here", "fair"
        return ("yes", "good") if quality is not None else ("yes, if quality holds", "fair")

    @property
    def facts(self) -> str:
        """The three numbers in one line; what is missing is said to be."""
        said = []
        for name, reading in self.readings.items():
            if reading is None:
                said.append(f"{name} {MISSING_WORDS[name]}")
            elif name == "speed":
                said.append(f"{reading.text} {reading.about}")
            else:
                said.append(f"{name} {reading.text} ({reading.about})")
        return f"{', '.join(said)}{', predicted' if self.is_predicted else ''}."

    @property
    def notes(self) -> list[str]:
        """Why this recipe, where it loses, and what is left to measure."""
        notes = [self.choice] if self.choice else []
        if self.losses:
            notes.append(f"Slower than {self.baseline}: {', '.join(self.losses)}.")
        return [*notes, *([f"To find out: {'; '.join(self.checks)}"] if self.checks else [])]


def in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """By how much was measured: all three readings first, predictions last; machines together."""

    def rank(verdict: Verdict) -> tuple[bool, int]:
        missing = sum(reading is None for reading in (verdict.speed, verdict.quality))
        return verdict.is_predicted or verdict.speed is None, missing

    by_machine: dict[str, list[Verdict]] = {}
    for verdict in sorted(verdicts, key=rank):
        by_machine.setdefault(verdict.machine, []).append(verdict)
    return [verdict for own in by_machine.values() for verdict in own]


def counted(verdicts: Sequence[Verdict]) -> str:
    """How many verdicts are green, amber and red; "" of one, which speaks for itself."""
    if len(verdicts) < 2:
        return ""
    ratings = [verdict.rating for verdict in verdicts]
    counts = (f"{ratings.count(one)} {RATING_WORDS[one]}" for one in RATINGS if one in ratings)
    return f"{len(verdicts)} verdicts: {', '.join(counts)}."


def verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[tuple[Rating | None, str]]:
    """The verdicts as lines for a terminal, each with its rating if it answers."""
    for verdict in verdicts:
        about = f"{verdict.model}, {verdict.workload}, recipe {verdict.recipe}"
        yield None, f"{about} on {verdict.machine}"
        yield verdict.rating, f"Use FP8: {verdict.answer}. {verdict.facts}"
        yield from ((None, note) for note in verdict.notes)
