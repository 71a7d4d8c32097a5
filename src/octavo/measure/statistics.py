"""Statistics of scores: means with their standard errors, and what a row retains of the first.

The test for a systematic shift compares a row with the first one, question by question. If neither
is better, a question's difference is as likely positive as negative, of whatever size. With signs
drawn at random the mean over buckets of their mean differences has expectation 0, and the variance
follows from sums over each bucket: records have them, so that the test needs no answers.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

Scores = Sequence[Sequence[float]]  # of each question its repetitions, from 0 to 1
NUM_RESAMPLES = 10_000
# A shift is found in 1 of 100 runs without any, and one of `shift_detectable_points` in 80 of 100.
FALSE_ALARMS, POWER = 0.01, 0.8
_NORMAL = statistics.NormalDist()
_DETECTABLE = _NORMAL.inv_cdf(1 - FALSE_ALARMS) + _NORMAL.inv_cdf(POWER)  # standard errors
_QUESTION = "question_{}_percent"


def standard_error(numbers: Sequence[float]) -> float | None:
    """That of the mean of these numbers; None of a single one."""
    if len(numbers) < 2:
        return None
    return statistics.stdev(numbers) / math.sqrt(len(numbers))


def mean_values(scores: Sequence[float], name: str = "score") -> dict[str, float]:
    """`NAME_percent`, the mean of scores from 0 to 1, with its standard error if there is one."""
    values = {f"{name}_percent": 100 * statistics.fmean(scores)}
    if (error := standard_error(scores)) is not None:
        values[f"{name}_standard_error_percent"] = 100 * error
    return values


def recovery(
    own: Mapping[str, float], first: Mapping[str, float], name: str = "score"
) -> dict[str, float]:
    """`recovery_percent` with its standard error, from `NAME_percent`; nothing where that is 0.

    The standard error is that of a quotient of independent numbers. Rows are asked the same, so it
    is rather too large.
    """
    whole = first[f"{name}_percent"]
    if whole == 0:
        return {}
    share = own[f"{name}_percent"] / whole
    values = {"recovery_percent": 100 * share}
    error = f"{name}_standard_error_percent"
    if error in own and error in first:
        spread = math.hypot(own[error], share * first[error]) / whole
        values["recovery_standard_error_percent"] = 100 * spread
    return values


def pass_values(scores: Scores) -> dict[str, float]:
    """The mean over questions of how often each is answered rightly, in percent.

    score_standard_error_percent: of other questions as well as other repetitions, by the spread of
    the questions' means. repetition_standard_error_percent: of other repetitions of the same
    questions, by the spread within each; where there are two or more of them.
    """
    values = mean_values([statistics.fmean(some) for some in scores])
    values |= {"num_questions": float(len(scores)), "num_answers": float(sum(map(len, scores)))}
    if min(map(len, scores)) > 1:
        noise = sum(statistics.variance(map(float, some)) / len(some) for some in scores)
        values["repetition_standard_error_percent"] = 100 * math.sqrt(noise) / len(scores)
    return values


def paired_recovery(own: Scores, first: Scores) -> dict[str, float]:
    """What a row recovers of the first one's pass@1, question by question.

    recovery_percent with the standard error of a quotient of means over the same questions;
    nothing where the first row has no right answer. difference_percent, in points, with its own.
    """
    ours = [statistics.fmean(some) for some in own]
    theirs = [statistics.fmean(some) for some in first]
    whole = statistics.fmean(theirs)
    values = mean_values([a - b for a, b in zip(ours, theirs, strict=True)], "difference")
    if whole == 0:
        return values
    share = statistics.fmean(ours) / whole
    values["recovery_percent"] = 100 * share
    values |= shift_values([paired_values(question_values(ours), question_values(theirs))])
    rest = [a - share * b for a, b in zip(ours, theirs, strict=True)]
    if (error := standard_error(rest)) is not None:
        values["recovery_standard_error_percent"] = 100 * error / whole
    return values


def question_values(scores: Sequence[float]) -> dict[str, float]:
    """The score of each question of a bucket, for comparisons question by question."""
    return {_QUESTION.format(i): 100 * score for i, score in enumerate(scores, 1)}


def paired_values(own: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
    """How much a bucket's scores exceed those of the first row, in points, and the noise of that.

    difference_noise_percent: the standard deviation of the mean difference under random signs.
    Nothing where records do not have the scores of the same questions.
    """
    names = [_QUESTION.format(i) for i in range(1, len(own) + 1)]
    asked = [name for name in names if name in own]
    if not asked or asked != [name for name in names if name in first]:
        return {}
    gaps = [own[name] - first[name] for name in asked]
    return {
        "difference_percent": statistics.fmean(gaps),
        "difference_noise_percent": math.hypot(*gaps) / len(gaps),
    }


def shift_values(buckets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Whether a row is lower than the first one across buckets of lengths, each of equal weight.

    buckets: what `paired_values` gave of each; nothing comes of buckets without. shift_points: the
    mean of their differences. shift_p_value: how often random signs give one as low, by the normal
    distribution. `is_shifted` if that is below 1 %, and more than half of the buckets are lower.
    shift_detectable_points: the drop that such data show in 80 of 100 runs.
    """
    if not buckets or any("difference_noise_percent" not in bucket for bucket in buckets):
        return {}
    gaps = [bucket["difference_percent"] for bucket in buckets]
    shift = statistics.fmean(gaps)
    noise = math.hypot(*(bucket["difference_noise_percent"] for bucket in buckets)) / len(buckets)
    if noise == 0:  # no question differs
        return {"shift_points": 0.0, "shift_p_value": 1.0, "is_shifted": 0.0}
    p_value = _NORMAL.cdf(shift / noise)
    is_lower = 2 * sum(gap < 0 for gap in gaps) > len(gaps)
    return {
        "shift_points": shift,
        "shift_p_value": p_value,
        "shift_detectable_points": _DETECTABLE * noise,
        "is_shifted": float(p_value < FALSE_ALARMS and is_lower),
    }


def paired_difference(
    own: Sequence[float], first: Sequence[float], *, seed: int = 0
) -> dict[str, float]:
    """How much a row's scores exceed the first one's, in points, by a paired bootstrap.

    The bounds are those of the 95 % confidence interval; `is_different` if it leaves zero out.
    Questions are drawn with replacement 10,000 times, both rows together: what they have in
    common, such as hard questions, does not blur the difference.
    """
    gaps = 100 * (np.asarray(own, dtype=np.float64) - np.asarray(first, dtype=np.float64))
    # Few values occur: how often each is drawn is multinomial, which needs no index per question.
    values, counts = np.unique(gaps, return_counts=True)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(gaps), counts / len(gaps), size=NUM_RESAMPLES)
    low, high = np.quantile(drawn @ values / len(gaps), [0.025, 0.975])
    return {
        "difference_points": float(gaps.mean()),
        "difference_low_points": float(low),
        "difference_high_points": float(high),
        "is_different": float(low > 0 or high < 0),
    }
