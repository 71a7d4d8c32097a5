"""octavo bench host on a CPU: what is called, what is checked, and what records say."""

import re
from dataclasses import replace

import pytest
import torch

from octavo.cli.main import COMMANDS, make_app, run
from octavo.errors import UnsupportedError
from octavo.measure import store
from octavo.measure.bench import host

CPU = torch.device("cpu")
BUDGETS = {"Fp8Linear": 3.5, "quantize_qkv": 7.0, "append_kv": 6.0, "plan_decode": 2.5}


@pytest.fixture(scope="module")
def calls():
    with torch.inference_mode():
        return host.host_calls(CPU)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setitem(host.NUM_LAUNCHED, "cpu", 1)
    monkeypatch.setitem(host.NUM_ROUNDS, "cpu", 2)


def test_every_call_is_right_and_named_once(calls):
    assert len({one.name for one in calls}) == len(calls) == 20
    with torch.inference_mode():
        assert all(one.error() <= one.max_error for one in calls)


def test_a_wrong_result_is_told(calls):
    for one in calls:
        wrong = replace(one, truth=one.truth.roll(1, -1))
        with (
            torch.inference_mode(),
            pytest.raises(UnsupportedError, match=re.escape(f"{one.name} by")),
        ):
            wrong.error()


def test_whole_calls_have_budgets(calls):
    found = {one.name: one.budget for one in calls if one.budget is not None}
    assert {name.split()[0].rstrip(","): limit for name, limit in found.items()} == BUDGETS
    assert len(found) == 6 + 2 + 1 + 1
    assert all(one.impl == "octavo" for one in calls if one.budget is not None)


def test_times_are_means_of_launches(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock))
    monkeypatch.setitem(host.NUM_LAUNCHED, "cpu", 4)
    seen = []
    calls = [lambda: seen.append("a"), lambda: seen.append("b")]
    assert host._sample_us(calls, CPU) == [[0.25e6, 0.25e6], [0.25e6, 0.25e6]]
    assert "".join(seen) == ("aaaa" + "bbbb") * 3  # once to warm up, then two rounds in turn


def test_records_in_units_of_linear(capsys, tmp_path):
    file = tmp_path / "host.jsonl"
    assert run(make_app(COMMANDS), ["bench", "host", "-o", str(file)]) == 0
    text = capsys.readouterr().out
    assert f"baseline: {host.UNIT}" in text and "over linear" in text
    records = store.read(file)
    times = {record.case["call"]: record.values["median_us"] for record in records}
    for record in records:
        assert record.op == "host" and record.command == "octavo bench host"
        expected = times[record.case["call"]] / times[host.UNIT]
        assert record.values["over_linear"] == pytest.approx(expected)
        assert "budget" not in record.values  # of launches, which a CPU has none of
