"""Scores of MRCR: of an answer, of a bucket of lengths, and of all lengths (AUC)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from octavo.errors import ConfigError

# Tokens of prompt and answer together, up to and with the end; as openai/mrcr has them from 8k on.
BUCKETS: tuple[int, ...] = tuple(2**power for power in range(11, 21))


def grade(response: str, answer: str, prefix: str) -> float:
    """How like the answer a response is, 0 to 1; 0 if it does not start with the prefix."""
    if not response.startswith(prefix):
        return 0.0
    own, true = response.removeprefix(prefix), answer.removeprefix(prefix)
    return float(SequenceMatcher(None, own, true).ratio())


def bucket_of(num_tokens: int) -> int:
    """The end of the bucket with so many tokens; the first has all that are shorter."""
    if num_tokens > BUCKETS[-1]:
        raise ConfigError(
            f"expected questions of up to {BUCKETS[-1]} tokens, got {num_tokens}; --max-length "
            "leaves longer ones out"
        )
    return next(end for end in BUCKETS if num_tokens <= end)


def score_values(scores: Sequence[float]) -> dict[str, float]:
    """The mean score in percent, and its standard error where there are two or more."""
    values = {"score_percent": 100 * statistics.fmean(scores), "num_questions": float(len(scores))}
    if len(scores) > 1:
        error = statistics.stdev(scores) / math.sqrt(len(scores))
        values["score_standard_error_percent"] = 100 * error
    return values


def joined_values(buckets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The values of all questions, from those that `score_values` gave of each bucket."""
    counts = [values["num_questions"] for values in buckets]
    means = [values["score_percent"] / 100 for values in buckets]
    number = sum(counts)
    mean = sum(n * m for n, m in zip(counts, means, strict=True)) / number
    joined = {"score_percent": 100 * mean, "num_questions": number}
    if number > 1:
        squares = 0.0  # of what scores are away from the mean of all
        for values, n, m in zip(buckets, counts, means, strict=True):
            error = values.get("score_standard_error_percent", 0.0) / 100
            squares += (n - 1) * n * error**2 + n * (m - mean) ** 2
        joined["score_standard_error_percent"] = 100 * math.sqrt(squares / (number - 1) / number)
    return joined


def area_under_curve(scores: Mapping[int, float], length: int) -> float | None:
    """AUC@length: the mean height of the line through the scores of buckets that end by `length`.

    scores: end of a bucket -> its score. The line is straight between the ends of buckets, on an
    axis of tokens, so that long ones count most. One bucket is its own mean; None without any.
    """
    ends = sorted(end for end in scores if end <= length)
    if not ends:
        return None
    if len(ends) == 1:
        return scores[ends[0]]
    areas = [(b - a) * (scores[a] + scores[b]) / 2 for a, b in zip(ends, ends[1:], strict=False)]
    return sum(areas) / (ends[-1] - ends[0])
