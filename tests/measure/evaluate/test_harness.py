"""What rows of lm-eval's tasks retain of the first: by task, and as the mean of tasks."""

import random

import pytest

pytest.importorskip("transformers")

from octavo.errors import OctavoError
from octavo.measure.evaluate.harness import _compared, _mean_of_tasks
from octavo.measure.statistics import mean_values


def task(scores):
    return {**mean_values(scores), "num_questions": float(len(scores))}, scores


def rows(drop, num_questions=(400, 200)):
    """(first, own) mean over tasks, where `drop` of the right answers are lost."""
    draw = random.Random(0)
    first, own = {}, {}
    for number, count in enumerate(num_questions):
        base = task([float(draw.random() < 0.6) for _ in range(count)])
        changed = task([score * (draw.random() >= drop) for score in base[1]])
        first[str(number)] = base[0]
        own[str(number)] = {**changed[0], **_compared(changed, base)}
    return _mean_of_tasks(first), _mean_of_tasks(own), own


def test_a_drop_is_found_over_tasks_of_equal_weight():
    first, own, tasks = rows(0.1)
    assert own["is_shifted"] == 1 and own["shift_points"] == own["difference_percent"]
    gaps = [values["difference_percent"] for values in tasks.values()]
    assert own["difference_percent"] == pytest.approx(sum(gaps) / 2)
    expected = 100 * own["score_percent"] / first["score_percent"]
    assert own["recovery_percent"] == pytest.approx(expected) and 80 < expected < 97
    assert 0 < own["recovery_standard_error_percent"] < 3
    assert own["num_questions"] == 600 and "recovery_percent" not in first


def test_without_a_drop_nothing_is_found():
    _, own, _ = rows(0.0)
    assert (own["is_shifted"], own["recovery_percent"]) == (0, 100)


def test_metrics_of_which_less_is_better_and_tasks_without_a_score():
    own, first = ({"lower_is_better": 12.5}, []), ({"lower_is_better": 10.0}, [])
    assert _compared(own, first) == {"recovery_percent": 80.0}
    assert _compared(({"bleu,none": 3.0}, []), ({"bleu,none": 4.0}, [])) == {}
    assert _mean_of_tasks({"a": own[0]}) == {}


def test_rows_with_other_questions_are_not_compared():
    with pytest.raises(OctavoError, match="expected 3 scored questions, as many .* got 2"):
        _compared(task([1.0, 0.0]), task([1.0, 0.0, 1.0]))
