"""Scores of answers, case by case, and the bootstrap that compares two rows."""

import numpy as np
import pytest

from octavo.measure.evaluate.chartqa import (
    anywhere_accuracy,
    exact_match,
    final_answer,
    relaxed_accuracy,
)
from octavo.measure.statistics import paired_difference


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", "12"),
        ("  Apple \n", "Apple"),
        ("I look.\nFinal Answer: 12", "12"),
        ("Answer: 3\nNo, wait.\n**Final answer:** *12*\nDone.", "12"),
        ("Final Answer:\n\n 0.5 \nmore", "0.5"),
        ("Final Answer:", ""),
        ("It is 12.\nOr 13.", ""),
        ("", ""),
    ],
)
def test_final_answer(text, expected):
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "truth", "relaxed", "anywhere", "exact"),
    [
        ("12", "12", 1, 1, 1),
        ("12.", "12", 1, 1, 0),
        ("105", "100", 1, 1, 0),
        ("95", "100", 1, 1, 0),
        ("105.1", "100", 0, 0, 0),
        ("94.9", "100", 0, 0, 0),
        ("-100", "100", 0, 0, 0),
        ("-96", "-100", 1, 1, 0),
        ("0", "0", 1, 1, 1),
        ("0.001", "0", 0, 0, 0),
        ("1,000", "1000", 1, 1, 0),
        ("$1,000", "1000", 1, 1, 0),
        ("12%", "12", 1, 1, 0),
        ("12%", "0.12", 1, 1, 0),
        ("0.12", "12%", 1, 1, 0),
        ("0.12", "12", 0, 0, 0),
        ("apple", "Apple", 1, 1, 0),
        ('"Apple"', "Apple", 1, 1, 0),
        ("Apples", "Apple", 0, 0, 0),
        ("A) Apple", "A", 1, 1, 0),
        ("yes", "Yes", 1, 1, 0),
        ("nan", "nan", 1, 1, 1),
        ("inf", "1", 0, 0, 0),
        ("1e400", "1", 0, 0, 0),
        ("", "Apple", 0, 0, 0),
        ("1979", "1997", 1, 1, 0),
        ("It is Apple, I think.\nYes.", "Apple", 0, 1, 0),
        ("They sold 1,200 pears.\nMany.", "1200", 0, 1, 0),
        ("They sold 1,200 pears.\nMany.", "200", 0, 0, 0),
        ("It grew by 2.55.\nMuch.", "2.5", 0, 0, 0),
        ("I look.\nFinal Answer: Apple", "Apple", 1, 1, 1),
        ("It is Apple.\nFinal Answer: Pear", "Apple", 0, 0, 0),
    ],
)
def test_scores(text, truth, relaxed, anywhere, exact):
    found = tuple(
        score(text, [truth]) for score in (relaxed_accuracy, anywhere_accuracy, exact_match)
    )
    assert found == (relaxed, anywhere, exact)


def test_any_of_several_truths_counts_but_exactly_only_the_first():
    assert relaxed_accuracy("Pear", ["Apple", "Pear"]) == 1
    assert exact_match("Pear", ["Apple", "Pear"]) == 0
    assert exact_match("Apple", ["Apple", "Pear"]) == 1


def rows(num_questions, num_worse, num_better=0):
    baseline = np.array([1.0, 0.0] * (num_questions // 2))
    other = baseline.copy()
    other[np.flatnonzero(baseline == 1)[:num_worse]] = 0
    other[np.flatnonzero(baseline == 0)[:num_better]] = 1
    return other, baseline


def test_a_planted_difference_is_found():
    difference = paired_difference(*rows(500, 15))
    assert difference["difference_points"] == pytest.approx(-3)
    assert difference["difference_high_points"] < 0 and difference["is_different"]
    better = paired_difference(*rows(500, 0, 15))
    assert better["difference_low_points"] > 0 and better["is_different"]


def test_equal_rows_and_balanced_changes_do_not_differ():
    equal = paired_difference(*rows(500, 0))
    assert set(equal.values()) == {0}
    balanced = paired_difference(*rows(500, 10, 10))
    assert balanced["difference_low_points"] < 0 < balanced["difference_high_points"]
    assert not balanced["is_different"]


def test_pairing_sees_what_unpaired_intervals_would_not():
    other, baseline = rows(500, 10)
    spread = 1.96 * np.sqrt(baseline.var() / 500 + other.var() / 500)
    assert spread > 0.02  # unpaired, a difference of 0.02 would drown
    assert paired_difference(other, baseline)["is_different"]


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        gaps = rng.choice([-1.0, 0.0, 1.0], size=300, p=[0.1, 0.85, 0.05])
        found = paired_difference(gaps, np.zeros(300), seed=trial)
        covered += found["difference_low_points"] <= -5 <= found["difference_high_points"]
    assert 0.89 <= covered / 200 <= 0.99


def test_the_interval_is_that_of_resampled_questions():
    rng = np.random.default_rng(1)
    gaps = rng.choice([-1.0, 0.0, 1.0], size=100, p=[0.2, 0.7, 0.1])
    means = gaps[rng.integers(0, 100, (20_000, 100))].mean(1)
    found = paired_difference(gaps, np.zeros(100))
    bounds = [found["difference_low_points"], found["difference_high_points"]]
    np.testing.assert_allclose(bounds, 100 * np.quantile(means, [0.025, 0.975]), atol=1.1)


def test_one_question():
    assert paired_difference([1.0], [0.0])["difference_low_points"] == 100
