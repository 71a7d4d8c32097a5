"""Before and after: what is better, what is worse, and what is the same measurement."""

from dataclasses import replace
from functools import partial

import pytest

from octavo.errors import ConfigError
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.changes import changed_section

MACHINE = Machine(cpu="A CPU", python="3.12", platform="Linux", gpu="A GPU")
row = partial(Measurement, impl="octavo", machine=MACHINE, command="octavo bench")


def served(name, tokens_per_s, ttft=100.0, *, gain=None, **case):
    values = {"output_throughput": tokens_per_s, "median_ttft_ms": ttft}
    values |= {} if gain is None else {"output_throughput_gain": gain}
    return row(
        op="throughput",
        case={"model": "m", "row": name, **case},
        values=values,
        baseline="auto" if gain else None,
    )


def test_better_worse_and_the_same():
    before = [served("auto", 100.0, num_pages=10), served("fp8", 150.0, gain=1.5, num_pages=10)]
    after = [
        served("auto", 101.0, num_pages=20),
        served("fp8", 90.0, ttft=80.0, gain=0.9, num_pages=20),
    ]
    section = changed_section(before, after)
    assert section.headline == "1 better, 1 worse, 2 the same." and section.is_open
    answers, worse, better = section.tables
    assert answers.rows == (
        ("m", "yes, if quality holds (fp8)", "no, it is slower (fp8)", "requests", "A GPU"),
    )
    assert worse.caption == "Worse: 1"
    what = ("throughput", "output throughput", "−40.0 %", 150.0, 90.0)
    assert worse.rows == ((*what, "octavo", "A GPU", "model m, row fp8"),)
    assert better.rows[0][1:5] == ("median TTFT (ms)", "+20.0 %", 100.0, 80.0)  # less is better


def test_only_the_same_measurement_on_the_same_machine_is_compared():
    before = [served("fp8", 100.0), served("fp8+head", 100.0)]
    elsewhere = replace(before[0], machine=replace(MACHINE, gpu="Another GPU"))
    longer = served("fp8", 1.0, input_len=9)
    newer = replace(MACHINE, versions={"torch": "3"})  # what changed may be a version
    after = [elsewhere, longer, replace(served("fp8+head", 100.0), machine=newer)]
    section = changed_section(before, after)
    assert section.headline == "0 better, 0 worse, 2 the same." and section.tables == ()
    assert "Measured before alone: 1, after alone: 2." in section.text
    with pytest.raises(ConfigError, match="run the same commands before and after"):
        changed_section(before, [elsewhere, longer])


def test_the_newest_of_each_side_and_zero():
    old = replace(served("fp8", 50.0), date="2020-01-01T00:00:00Z")
    assert changed_section([old, served("fp8", 100.0)], [served("fp8", 100.0)]).tables == ()
    nothing = served("fp8", 0.0)
    (better,) = changed_section([nothing], [served("fp8", 5.0)]).tables
    assert better.rows[0][2] == "+100.0 %"
    assert changed_section([nothing], [nothing]).tables == ()
