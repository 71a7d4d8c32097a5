"""Measurement and Machine: validation, JSON round trip, strict reading."""

import json
import math
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import CheckpointError, ConfigError
from octavo.measure import records
from octavo.measure.records import Machine, Measurement, timing, utc_now
from octavo.version import __version__

LAPTOP = Machine(cpu="A CPU", python="3.12.1", platform="Linux", versions={"torch": "2.11.0"})
H200 = replace(LAPTOP, gpu="NVIDIA H200", capability=(9, 0))
ROW = Measurement(
    op="decode_attention",
    impl="triton",
    case={"head_dim": 128, "causal": True, "granularity": "head", "margin": 1.5},
    values={"median_ms": 0.5, "flops": 1e9, "bytes": 2e9, "sqnr_db": 31.5},
    machine=H200,
    command="octavo bench kernels",
    baseline="fa3",
    date="2026-01-31T12:00:00Z",
)

# Quotes, line ends, controls, a lone surrogate (what a shell can pass), and more than 16 bits.
names = st.text('a0"\\\n\r\0\x1b<é\u2028\ud800\U0001f600', min_size=1, max_size=8)
machines = st.builds(
    Machine,
    cpu=names,
    python=names,
    platform=names,
    gpu=st.none() | names,
    capability=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 9)),
    versions=st.dictionaries(names, names, max_size=3),
)
scalars = names | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
measurements = st.builds(
    Measurement,
    op=names,
    impl=names,
    case=st.dictionaries(names.map("c".__add__), scalars, max_size=3),
    values=st.dictionaries(names.map("v".__add__), st.floats(allow_nan=False), max_size=3),
    machine=machines,
    command=names,
    baseline=st.none() | names,
)


def changed(**changes: object) -> str:
    """ROW's JSON with some keys replaced; `...` removes one."""
    row = json.loads(ROW.to_json()) | changes
    return json.dumps({key: value for key, value in row.items() if value is not ...})


@given(measurements)
def test_json_round_trip(row):
    line = row.to_json()
    assert Measurement.from_json(line) == row
    assert line.isascii()
    assert line.splitlines() == [line]


def test_json_begins_with_the_schema_and_keeps_the_order_of_names():
    line = ROW.to_json()
    assert line.startswith('{"schema": 1, ')
    assert list(Measurement.from_json(line).case) == ["head_dim", "causal", "granularity", "margin"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_survive_as_strict_json(value):
    line = replace(ROW, values={"sqnr_db": value}).to_json()
    assert json.loads(line, parse_constant=pytest.fail)["values"] == {"sqnr_db": str(value)}
    read = Measurement.from_json(line).values["sqnr_db"]
    assert read == value or (math.isnan(read) and math.isnan(value))


def test_a_row_is_frozen_and_keeps_its_own_copy():
    case = {"head_dim": 128}
    row = replace(ROW, case=case)
    case["head_dim"] = 64
    assert row.case == {"head_dim": 128}
    with pytest.raises(FrozenInstanceError):
        row.op = "x"


def test_whole_numbers_become_floats_in_values():
    assert isinstance(replace(ROW, values={"flops": 10**12}).values["flops"], float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": ""}, "op must be a text"),
        ({"impl": None}, "impl must be a text"),
        ({"command": ""}, "command must be a text"),
        ({"baseline": ""}, "baseline must be a text"),
        ({"date": "yesterday"}, "date must look like"),
        ({"date": 1700000000}, "date must look like"),
        ({"schema": 2}, "schema 1, got 2"),
        ({"schema": True}, "schema 1, got True"),
        ({"case": {"x": [1]}}, r"case\['x'\] must be a text, a truth value or a finite number"),
        ({"case": {"x": math.nan}}, "finite number, got nan"),
        ({"case": {1: 1}}, "a name in case must be a text"),
        ({"case": "x"}, "case must be a mapping"),
        ({"values": {"x": "fast"}}, r"values\['x'\] must be a number, got 'fast'"),
        ({"values": {"x": True}}, "must be a number, got True"),
        ({"values": {"x": 10**400}}, "must be a number"),
        ({"values": {"head_dim": 1.0}}, "a case or a value, not both: head_dim"),
        ({"machine": "H200"}, "machine must be a Machine"),
    ],
    ids=str,
)
def test_wrong_fields_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(ROW, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cpu": ""}, "cpu must be a text"),
        ({"gpu": ""}, "gpu must be a text"),
        ({"capability": (9,)}, r"two integers such as \(9, 0\)"),
        ({"capability": "9.0"}, "two integers"),
        ({"versions": {"torch": 2.11}}, r"versions\['torch'\] must be a text"),
    ],
    ids=str,
)
def test_wrong_machines_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(LAPTOP, **changes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not a line of JSON"),
        ("{", "not a line of JSON"),
        ("[" * 100_000, "not a line of JSON"),
        ("[1]", "expected a JSON object, got list"),
        ("{}", "schema 1, got None"),
        (changed(schema=2), "schema 1, got 2; a newer octavo may read it"),
        (changed(colour="red"), "unknown key in record: colour"),
        (changed(op=...), "missing key in record: op"),
        (changed(op=3), "op must be a text"),
        (changed(machine={"gpu": None}), "missing key in machine: capability, cpu"),
        (changed(machine=["H200"]), "machine must be a mapping"),
        (changed(values=[1]), "values must be a mapping"),
        (changed(values={"x": None}), "must be a number, got None"),
        (changed(values={"x": "infinity"}), "must be a number, got 'infinity'"),
        (changed(values={"x": 1.5}).replace("1.5", "1e999"), "beyond the range"),
        (changed(values={"x": 1.5}).replace("1.5", "NaN"), "NaN is not JSON"),
        (changed(values={"x": 1.5}).replace('"x"', '"x": 1, "x"'), "appears twice"),
    ],
    ids=lambda text: text[:40],
)
def test_reading_is_strict(line, message):
    with pytest.raises(CheckpointError, match=message):
        Measurement.from_json(line)


def test_get_finds_fields_cases_and_values():
    assert [ROW.get(name) for name in ("op", "impl", "head_dim", "median_ms", "baseline")] == [
        "decode_attention",
        "triton",
        128,
        0.5,
        "fa3",
    ]
    assert ROW.get("machine") == "NVIDIA H200, torch 2.11.0"
    assert ROW.get("nothing") is None


def test_speeds_follow_from_work_and_time():
    assert ROW.tflops == pytest.approx(2.0)
    assert ROW.gb_per_s == pytest.approx(4000.0)


@pytest.mark.parametrize("values", [{}, {"flops": 1.0}, {"flops": 1.0, "median_ms": 0.0}], ids=str)
def test_no_speed_without_work_and_time(values):
    assert replace(ROW, values=values).tflops is None


@pytest.mark.parametrize(
    ("samples", "median", "p20", "p80"),
    [([3.0], 3.0, 3.0, 3.0), ([2.0, 1.0], 1.5, 1.2, 1.8), ([5, 1, 2, 3, 4, 6], 3.5, 2.0, 5.0)],
)
def test_timing_gives_median_and_quantiles(samples, median, p20, p80):
    values = timing(samples)
    assert list(values) == ["median_ms", "p20_ms", "p80_ms", "num_samples"]
    assert list(values.values()) == pytest.approx([median, p20, p80, len(samples)])


def test_timing_records_the_work():
    values = timing([1.0], flops=4e12, bytes=1e9)
    assert replace(ROW, values=values).tflops == pytest.approx(4000.0)


@pytest.mark.parametrize("samples", [[], [1.0, math.nan]], ids=str)
def test_timing_needs_finite_samples(samples):
    with pytest.raises(ConfigError, match="one or more finite samples"):
        timing(samples)


def test_current_machine_names_cpu_and_versions():
    machine = Machine.current(gpu="NVIDIA H200", capability=(9, 0))
    assert machine.cpu
    assert {"octavo", "torch", "numpy"} <= machine.versions.keys()
    assert (machine.gpu, machine.capability) == ("NVIDIA H200", (9, 0))
    assert Machine.current().gpu is None


def test_current_machine_without_cpuinfo(monkeypatch):
    def refuse(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(records.Path, "read_text", refuse)
    monkeypatch.setattr(records.platform, "processor", lambda: "")
    monkeypatch.setattr(records.platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(records, "_PACKAGES", ("no-such-package-anywhere",))
    machine = Machine.current()
    assert (machine.cpu, machine.versions) == ("riscv64", {"octavo": __version__})


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (LAPTOP, "A CPU, torch 2.11.0"),
        (H200, "NVIDIA H200, torch 2.11.0"),
        (replace(LAPTOP, versions={}), "A CPU"),
    ],
    ids=str,
)
def test_a_machine_in_words(machine, text):
    assert str(machine) == text


def test_now_is_a_valid_date():
    assert replace(ROW, date=utc_now()).date.endswith("Z")
