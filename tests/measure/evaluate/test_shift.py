"""The test for a systematic shift: its false alarms, its stated power, and what it says."""

import math

import numpy as np
import pytest

from octavo.measure.records import Machine, Measurement
from octavo.measure.report.shift import advice, advised, shifts
from octavo.measure.report.tables import Table
from octavo.measure.statistics import (
    paired_recovery,
    paired_values,
    question_values,
    shift_values,
)

NUM_BUCKETS, NUM_QUESTIONS, REPETITIONS = 8, 232, 5


def run(seed, *, drop=0.0, dropped=range(NUM_BUCKETS)):
    """Two rows that answer the same questions, by length; the second is worse by `drop`."""
    rng = np.random.default_rng(seed)
    found = []
    for bucket in range(NUM_BUCKETS):
        chances = np.clip(rng.beta(4, 1 + bucket / 4, NUM_QUESTIONS), 0.05, 0.95)
        lower = chances - (drop if bucket in dropped else 0.0)
        first, own = (rng.binomial(REPETITIONS, p) / REPETITIONS for p in (chances, lower))
        found.append(paired_values(question_values(own), question_values(first)))
    return shift_values(found)


def test_a_planted_drop_is_found_at_the_stated_power():
    runs = [run(seed, drop=0.02) for seed in range(100)]
    stated = np.mean([values["shift_detectable_points"] for values in runs])
    assert stated == pytest.approx(2.0, abs=0.1)  # so that 80 of 100 are to be found
    assert 72 <= sum(values["is_shifted"] for values in runs) <= 90
    assert np.mean([values["shift_points"] for values in runs]) == pytest.approx(-2, abs=0.2)
    assert all(run(seed, drop=0.04)["is_shifted"] for seed in range(20))


def test_no_drop_is_found_where_there_is_none():
    assert sum(run(seed)["is_shifted"] for seed in range(100)) <= 5
    assert not any(run(seed, drop=-0.02)["is_shifted"] for seed in range(20))


@pytest.mark.slow
def test_the_rate_of_false_alarms_is_what_it_is_said_to_be():
    assert 2 <= sum(run(seed)["is_shifted"] for seed in range(1000, 2500)) <= 28  # 15 ± 3.9


def test_one_bad_bucket_is_no_systematic_shift():
    """Others are lower or higher by chance, so that more than half of them seldom are lower."""
    values = shift_values(
        [{"difference_percent": -30.0, "difference_noise_percent": 3.0}]
        + [{"difference_percent": 0.5, "difference_noise_percent": 1.0}] * 4
    )
    assert values["shift_p_value"] < 0.01 and values["is_shifted"] == 0


def test_the_arithmetic():
    own, first = question_values([1.0, 0.0, 0.5]), question_values([1.0, 1.0, 1.0])
    assert own == {"question_1_percent": 100, "question_2_percent": 0, "question_3_percent": 50}
    values = paired_values(own, first)
    assert values["difference_percent"] == -50
    # Random signs of differences 0, 100 and 50: the variance of their mean.
    assert values["difference_noise_percent"] == pytest.approx(math.hypot(100, 50) / 3)
    two = shift_values([values, {"difference_percent": -10.0, "difference_noise_percent": 5.0}])
    noise = math.hypot(values["difference_noise_percent"], 5) / 2
    assert two["shift_points"] == -30
    assert two["shift_p_value"] == pytest.approx(0.5 * math.erfc(30 / noise / math.sqrt(2)))
    assert two["shift_detectable_points"] == pytest.approx((2.3263 + 0.8416) * noise, rel=1e-4)


def test_rows_that_cannot_be_compared():
    values = question_values([1.0, 0.0])
    assert paired_values(values, question_values([1.0])) == {}
    assert paired_values({"score_percent": 50.0}, values) == {}
    assert shift_values([]) == shift_values([{"difference_percent": 1.0}]) == {}
    same = shift_values([paired_values(values, values)])
    assert same == {"shift_points": 0, "shift_p_value": 1, "is_shifted": 0}


def test_questions_without_lengths_are_one_bucket():
    first = [[True] * 5] * 60
    own = [[True] * 5] * 50 + [[False] * 5] * 10
    values = paired_recovery(own, first)
    assert values["is_shifted"] == 1
    assert values["shift_points"] == pytest.approx(values["difference_percent"])
    assert paired_recovery(first, own)["is_shifted"] == 0


def record(op, recipe, baseline="bf16", values=None, **case):
    return Measurement(
        op=op,
        impl="test",
        case={"model": "m", "recipe": recipe, **case},
        values=values or {},
        machine=Machine.current(),
        command="c",
        baseline=baseline,
    )


def cells(recipe, differences):
    return [
        record(
            "needle",
            recipe,
            values={"difference_percent": gap, "difference_noise_percent": 4.0},
            length=length,
            depth=depth,
        )
        for length, gap in enumerate(differences, 1)
        for depth in (0.0, 0.5, 1.0)
    ]


def test_the_advice_is_to_calibrate():
    records = [
        record("needle", "bf16", None, length=1, depth=0.0),
        *cells("fp8 unit", [-9.0, -8.0, -10.0, -9.0]),
        *cells("fp8 token", [1.0, -8.0, 2.0, 0.0]),
    ]
    assert {name: values["is_shifted"] for name, values in shifts(records).items()} == {
        "fp8 unit": 1,
        "fp8 token": 0,
    }
    (sentence,) = advice(records)
    assert sentence.startswith("fp8 unit is systematically lower than bf16: 9 points (p = ")
    assert "octavo calibrate m --kv --data FILE --scale-save-path scales.json" in sentence
    table = Table(caption="", header=("recipe", "all"), rows=(("bf16", 9), ("fp8 unit", 8)))
    shown = advised(table, records)
    assert shown.header == ("recipe", "all", "advice")
    assert shown.rows == (("bf16", 9, None), ("fp8 unit", 8, "calibrate"))
    assert advised(table, records[:1]) == table and advice(records[:1]) == []


def test_records_of_all_buckets_carry_the_result():
    values = {"is_shifted": 1.0, "shift_points": -2.04, "shift_p_value": 0.0012}
    records = [record("mrcr", "bf16", None), record("mrcr", "fp8", values=values, bucket="all")]
    (sentence,) = advice(records)
    assert "fp8 is systematically lower than bf16: 2 points (p = 0.001). Calibrate" in sentence
