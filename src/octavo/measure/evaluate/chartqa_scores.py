"""How answers about charts are scored, and whether two rows of scores differ.

The three scores are those of ChartQA and of lm-eval's task of that name. A model that was asked to
end with "Final Answer: …" is judged by what follows; an answer without those words is taken whole
by `relaxed_accuracy` and `exact_match` if it is one line, as the chart reader's are.
"""

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.errors import ConfigError

TOLERANCE = 0.05
NUM_RESAMPLES = 10_000


def final_answer(text: str) -> str:
    """What a model's text says after the last "answer:", or a text of one line as it is."""
    marked = _marked_answer(text)
    if marked:
        return marked
    lines = text.strip().splitlines()
    return lines[0].strip() if marked is None and len(lines) == 1 else ""


def _marked_answer(text: str) -> str | None:
    """The first line after the last "answer:"; None where the text has none."""
    plain = re.sub(r"(answer)\**:\**", r"\1:", text, flags=re.IGNORECASE)
    _, mark, after = plain.lower().rpartition("answer:")
    if not mark:
        return None
    lines = plain[len(plain) - len(after) :].splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    return re.sub(r"[*_\[\]()]", "", first).strip()


def relaxed_accuracy(text: str, truths: Sequence[str]) -> float:
    """1.0 if the final answer is one of the truths: numbers within 5 %, texts but for case."""
    answer = final_answer(text)
    return float(bool(answer) and any(_is_close(answer, truth) for truth in truths))


def anywhere_accuracy(text: str, truths: Sequence[str]) -> float:
    """As `relaxed_accuracy`; without "answer:" a truth may stand anywhere, as a whole word.

    Generous: it shows how much of the difference between models is in following the format.
    """
    if relaxed_accuracy(text, truths) or _marked_answer(text):
        return relaxed_accuracy(text, truths)
    return float(any(_is_inside(text, truth) for truth in truths))


def exact_match(text: str, truths: Sequence[str]) -> float:
    """1.0 if the final answer is the first truth, letter by letter."""
    return float(bool(truths) and final_answer(text) == truths[0].strip())


SCORES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "relaxed_accuracy": relaxed_accuracy,
    "anywhere_accuracy": anywhere_accuracy,
    "exact_match": exact_match,
}


def _is_close(answer: str, truth: str) -> bool:
    answer, truth = _normal(answer), _normal(truth)
    given, wanted = _number(answer), _number(truth)
    if given is None or wanted is None:
        if len(truth) == 1 and truth.isalpha() and answer:  # an option: A, B, C …
            return answer[0].lower() == truth.lower()
        return answer.lower() == truth.lower()
    if _is_within(given[0], wanted[0]):
        return True
    # 12% and 0.12 are the same number, whichever side wrote the sign.
    return (given[1] and _is_within(given[0] / 100, wanted[0])) or (
        wanted[1] and _is_within(given[0], wanted[0] / 100)
    )


def _is_within(given: float, wanted: float) -> bool:
    return abs(given - wanted) <= TOLERANCE * max(abs(wanted), 1e-10)


def _normal(text: str) -> str:
    """A text without quotation marks; a number without $, thousands separators and a full stop."""
    text = text.strip()
    if not any(char.isdigit() for char in text):
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return (text[1:-1] if is_quoted else text).removesuffix(".")
    marks = string.punctuation.replace("%", "") + string.whitespace
    return text.rstrip(marks).replace(",", "").replace("$", "")


def _number(text: str) -> tuple[float, bool] | None:
    """The number in a text and whether it is in percent; None if the text is no number."""
    digits = text.removesuffix("%").strip()
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", digits):
        return None
    value = float(digits)
    return (value, text.endswith("%")) if np.isfinite(value) else None


def _is_inside(text: str, truth: str) -> bool:
    normal = _normal(truth)
    if not normal:
        return False
    where, before = text, r"(?<!\w)"
    if _number(normal):  # neither the end of a longer number nor the opposite of a negative one
        where, before = text.replace(",", ""), r"(?<![\w.-])"
    pattern = rf"{before}{re.escape(normal)}(?!\w|\.\d)"
    return re.search(pattern, where, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Difference:
    """The mean difference of two rows of scores and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves zero out: the rows differ."""
        return self.low > 0 or self.high < 0


def paired_difference(
    scores: Sequence[float], baseline: Sequence[float], *, seed: int = 0
) -> Difference:
    """How much `scores` exceed `baseline` on the same questions, by a paired bootstrap.

    Questions are drawn with replacement 10,000 times, both rows together: what they have in
    common, such as hard questions, does not blur the difference.
    """
    if len(scores) != len(baseline) or not len(scores):
        raise ConfigError(
            f"expected scores of the same questions, got {len(scores)} and {len(baseline)}"
        )
    gaps = np.asarray(scores, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    if not np.isfinite(gaps).all():
        raise ConfigError("expected finite scores, got NaN or infinity among them")
    # Few values occur: how often each is drawn is multinomial, which needs no index per question.
    values, counts = np.unique(gaps, return_counts=True)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(gaps), counts / len(gaps), size=NUM_RESAMPLES)
    low, high = np.quantile(drawn @ values / len(gaps), [0.025, 0.975])
    return Difference(float(gaps.mean()), float(low), float(high))
