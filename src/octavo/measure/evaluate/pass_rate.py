"""pass@1 of several repetitions: its standard errors, and what a row recovers of another."""

import math
import statistics
from collections.abc import Sequence

Scores = Sequence[Sequence[bool]]  # of each question its repetitions


def pass_values(scores: Scores) -> dict[str, float]:
    """The mean over questions of how often each is answered rightly, in percent.

    score_standard_error_percent: of other questions as well as other repetitions, by the spread of
    the questions' means. repetition_standard_error_percent: of other repetitions of the same
    questions, by the spread within each; where there are two or more of them.
    """
    means = [statistics.fmean(some) for some in scores]
    values = {
        "score_percent": 100 * statistics.fmean(means),
        "num_questions": float(len(scores)),
        "num_answers": float(sum(map(len, scores))),
    }
    if len(means) > 1:
        error = statistics.stdev(means) / math.sqrt(len(means))
        values["score_standard_error_percent"] = 100 * error
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
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    values = {"difference_percent": 100 * statistics.fmean(differences)}
    if len(ours) > 1:
        root = math.sqrt(len(ours))
        values["difference_standard_error_percent"] = 100 * statistics.stdev(differences) / root
    if whole == 0:
        return values
    share = statistics.fmean(ours) / whole
    values["recovery_percent"] = 100 * share
    if len(ours) > 1:
        rest = [a - share * b for a, b in zip(ours, theirs, strict=True)]
        values["recovery_standard_error_percent"] = 100 * statistics.stdev(rest) / root / whole
    return values
