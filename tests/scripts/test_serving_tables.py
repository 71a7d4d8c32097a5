"""Tables about the engine, from records made up and from records of the benchmarks themselves."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.bench.cases import LatencyCase, ThroughputCase
from octavo.measure.bench.engine import make_rows, open_subject
from octavo.measure.bench.engine_load import fit_values, run_load
from octavo.measure.fit import Line, Quadratic, fit_line, fit_quadratic
from octavo.measure.records import Machine, Measurement
from octavo.measure.report.latency import ITL, TTFT
from octavo.serving.engine.settings import EngineSettings

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"
MACHINE = Machine.current(gpu="NVIDIA H200", capability=(9, 0))
ENGINE = {
    "model": "llama",
    "dtype": "bfloat16",
    "weight_bytes": 9_080_000_000,
    "layers": 32,
    "compile": True,
    "page_size": 64,
    "max_num_batched_tokens": 8192,
    "num_pages": 100,
}
BATCH = {**ENGINE, "batch_size": 1, "output_len": 128, "seed": 0}
LOAD = {
    **ENGINE,
    "num_prompts": 48,
    "input_len": 20000,
    "output_len": 2000,
    "range_ratio": 0.15,
    "max_concurrency": 8,
    "max_num_seqs": 8,
}


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TABLES


def record(op, case, values, *, baseline=None, day=1):
    return Measurement(
        op=op,
        impl="octavo",
        case=case,
        values=values,
        machine=MACHINE,
        command="x",
        baseline=baseline,
        date=f"2026-11-{day:02d}T00:00:00Z",
    )


def times(row, input_len, ttft, itl, *, day=1, speedup=None, **case):
    values = {"median_ttft_ms": ttft, "median_itl_ms": itl}
    if speedup is not None:
        values |= {"ttft_speedup": speedup, "itl_speedup": 2 * speedup}
    case = {**BATCH, "row": row, "input_len": input_len, **case}
    return record("latency", case, values, baseline=speedup and "auto", day=day)


def line(row, own, first=None, *, day=1, input_lens="256,4096,32768"):
    case = {**BATCH, "row": row, "input_lens": input_lens}
    values = fit_values(ITL, own, first)
    return record("latency_fit", case, values, baseline=first and "auto", day=day)


def rows_of(text):
    """The cells of every line of tables, heads included."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def latency(tables, folder, records):
    store.append(folder / "latency_h200.jsonl", records)
    return tables["latency"](folder)


def test_what_others_are_compared_with_comes_first(tables, tmp_path):
    """A row of an earlier run, which nothing is compared with any more, comes last."""
    first = "auto+prefill=vllm-fa3"
    compared = replace(times("fp8", 256, 50.0, 2.0, day=2, speedup=1.5), baseline=first)
    older = [times("auto", 256, 80.0, 2.5), times("fp8", 256, 60.0, 2.0, speedup=1.33)]
    text = latency(tables, tmp_path, [*older, times(first, 256, 75.0, 3.0, day=2), compared])
    heads, cells = rows_of(text)
    assert heads[1:4] == [f"TTFT, `{row}`" for row in (first, "fp8", "auto")]
    assert cells[1:4] == ["75.0", "50.0 (1.50×)", "80.0"]


def test_latency_has_a_table_for_each_model(tables, tmp_path):
    text = latency(
        tables,
        tmp_path,
        [
            times("auto", 4096, 100.4, 5.875),
            times("auto", 256, 70.98, 5.545),
            times("fp8+skip=sliding_window", 4096, 50.0, 12.345, speedup=1.25),
            times("auto", 256, 1234.5, 2.5, model="gpt", mlp="dense 4 in place of experts"),
        ],
    )
    assert rows_of(text) == [
        [
            "input tokens",
            "TTFT, `auto`",
            "TTFT, `fp8+skip=sliding_window`",
            "ITL, `auto`",
            "ITL, `fp8+skip=sliding_window`",
        ],
        ["256", "71.0", "", "5.54", ""],
        ["4,096", "100", "50.0 (1.25×)", "5.88", "12.3 (2.50×)"],
        ["input tokens", "TTFT, `auto`", "ITL, `auto`"],
        ["256", "1,234", "2.50"],
    ]
    llama, gpt = text.split("**gpt**")
    assert llama.startswith("**llama** (32 layers, BF16, compiled, up to 8,192 tokens in a step)")
    assert "on an NVIDIA H200: 1 sequence at once, 128 tokens after each prompt" in llama
    assert "× is the speed-up over the first row of the same run" in llama
    assert "×" not in gpt and "MLP dense 4 in place of experts" in gpt
    assert "as a line" not in text


def test_latency_of_other_settings_is_another_table(tables, tmp_path):
    changes = [{}, {"batch_size": 8}, {"compile": False}, {"layers": 2}, {"cuda_graphs": False}]
    text = latency(tables, tmp_path, [times("auto", 256, 70, 5, **one) for one in changes])
    assert text.count("| input tokens |") == len(changes)
    assert text.count("8 sequences at once") == text.count("(2 layers") == 1
    assert text.count("without CUDA graphs") == 1 and text.count(" compiled") == len(changes) - 1


def test_the_newest_record_counts(tables, tmp_path):
    """Also beside one that is older than a field, or had another number of pages."""
    text = latency(
        tables,
        tmp_path,
        [
            times("auto", 256, 70, 1, day=1),
            times("auto", 256, 70, 3, day=3, cuda_graphs=True, num_pages=7),
            times("auto", 256, 70, 2, day=2),
            times("fp8", 256, 70, 4, day=1),
            times("fp8", 256, 70, 5, day=1),
            line("auto", Line(9.0, 1e-5, 0.0), day=2),
            line("auto", Line(8.0, 1e-5, 0.0), day=1),
        ],
    )
    assert rows_of(text)[1:] == [["256", "70.0", "70.0", "3.00", "5.00"]]
    assert text.count("- `auto`: ") == 1 and "- `auto`: 9.00 ms" in text


FIRST = Line(5.687, 2.97e-5, 0.081)


@pytest.mark.parametrize(
    ("own", "first", "words"),
    [
        (FIRST, None, "and 29.7 µs for each 1000 tokens of context, 0.08 ms unexplained."),
        (Line(5.6, 1.485e-5, 0), FIRST, "0.09 ms less for every token, 0.50 of its slope, always"),
        (Line(5.984, 1.485e-5, 0), FIRST, "0.30 ms more for every token, 0.50 of its slope, fast"),
        (Line(5.984, 1.485e-5, 0), FIRST, "faster from 20,000 tokens on."),
        (Line(5.984, 2.97e-5, 0), FIRST, "1.00 of its slope, never faster."),
        (Line(5.39, 5.94e-5, 0), FIRST, "2.00 of its slope, faster up to 10,000 tokens."),
        (Line(5.0, 0.0, 0), Line(6.0, 0.0, 0), "1.00 ms less for every token, always faster."),
    ],
)
def test_lines_in_words(tables, own, first, words, tmp_path):
    text = latency(tables, tmp_path, [times("fp8", 256, 70, 5), line("fp8", own, first)])
    (found,) = [one for one in text.splitlines() if one.startswith("- ")]
    intercept = f"{own.intercept:.2f}"
    assert found.startswith(
        f"- `fp8`: {intercept} ms (reading the weights at 4540 GB/s: 2.00 ms) and "
    )
    assert words in found
    assert ("beside `auto`" in found) == (first is not None)
    assert "nan" not in found


def test_intervals_and_curves_in_words(tables, tmp_path):
    """Brackets where records have intervals: five lengths of one row, three of the other's."""
    lengths = [256, 4096, 8192, 32768, 128000]
    off = [0.05, -0.02, 0.01, -0.05, 0.01]
    itls = [
        [a + b * x + o for x, o in zip(lengths, off, strict=True)]
        for a, b in ((5, 3e-5), (5, 15e-6))
    ]
    first, own = (fit_line(lengths, itl) for itl in itls)
    ttfts = [
        [50 + 0.02 * x + a * x**2 + 9 * o for x, o in zip(lengths, off, strict=True)]
        for a in (4e-7, 2e-7)
    ]
    bf16, fp8 = (fit_quadratic(lengths, ttft) for ttft in ttfts)
    case = {**BATCH, "row": "fp8", "input_lens": "256,4096,8192,32768"}
    curve = record("ttft_fit", case, fit_values(TTFT, fp8, bf16), baseline="auto")
    alone = record(
        "ttft_fit", {**case, "row": "auto"}, fit_values(TTFT, Quadratic(1, 2e-3, 3e-6, 0), None)
    )
    text = latency(
        tables, tmp_path, [times("fp8", 256, 70, 5), line("fp8", own, first), curve, alone]
    )
    words = [one for one in text.splitlines() if one.startswith("- ")]
    assert re.match(r"- `fp8`: 5.00 ms \[4.9\d, 5.0\d\] \(reading", words[0])
    assert re.search(r"15.0 µs \[13.\d, 16.\d\] for each .* 0.50 \[0.4\d, 0.5\d\] of its", words[0])
    assert re.search(r"and 0.200 ms \[0.200, 0.201\] for the square of that", words[2])
    assert " of the square term of `auto`; " in words[2] and "; 0.50 [0." in words[2]
    assert words[2].endswith("; always faster than `auto`, between the lengths that were measured.")
    old = {k: v for k, v in curve.values.items() if not k.startswith("ttft_break_even")}
    again = latency(tables, tmp_path, [replace(curve, values=old, date="2026-12-01T00:00:00Z")])
    assert " of the square term of `auto`.\n" in again
    assert words[1] == (
        "- `auto`: 1.0 ms, 2.0 ms for each 1000 tokens, and 3.000 ms for the square of that, "
        "0.0 ms unexplained."
    )


def load(row, rate, *, gain=None, day=1, **case):
    values = {"output_throughput": rate, "duration": 96000 / rate}
    values |= {"median_ttft_ms": 12345.6, "median_itl_ms": 20.04}
    if gain is not None:
        values["output_throughput_gain"] = gain
    case = {**LOAD, "row": row, **case}
    return record("throughput", case, values, baseline=gain and "auto", day=day)


def test_throughput(tables, tmp_path):
    records = [
        load("auto", 320.0),
        load("fp8", 1.0, gain=9.0, day=1),
        load("fp8", 480.0, gain=1.5, day=2),
        load("auto", 100.0, model="gpt", range_ratio=0.0),
    ]
    del records[-1].case["max_concurrency"]
    store.append(tmp_path / "throughput_h200.jsonl", records)
    text = tables["throughput"](tmp_path)
    head = ["", "output tokens/s", "TTFT (ms)", "ITL (ms)", "duration (s)"]
    assert rows_of(text) == [
        head,
        ["`auto`", "320", "12,346", "20.0", "300"],
        ["`fp8`", "480 (1.50×)", "12,346", "20.0", "200"],
        head,
        ["`auto`", "100", "12,346", "20.0", "960"],
    ]
    llama, gpt = text.split("**gpt**")
    assert "48 requests of 20,000 tokens, 2,000 tokens after each, both ± 15%, 8 open" in llama
    assert "× is the gain over the first row of the same run" in llama
    assert "after each, all open at once, up to 8 in a step" in gpt and "×" not in gpt


def test_throughput_begins_with_the_row_that_others_are_compared_with(tables, tmp_path):
    """A first row of an earlier run comes last: no gain is over it."""
    newer = replace(load("fp8", 480.0, gain=1.5, day=2), baseline="auto+prefill=vllm-fa3")
    records = [load("auto", 310.0), newer, load("auto+prefill=vllm-fa3", 320.0, day=2)]
    store.append(tmp_path / "throughput_h200.jsonl", records)
    _, *rows = rows_of(tables["throughput"](tmp_path))
    assert [row[0] for row in rows] == ["`auto+prefill=vllm-fa3`", "`fp8`", "`auto`"]


def test_two_lengths_have_no_line_in_words(tables, tmp_path):
    own = line("auto", Line(intercept=5.0, slope=1e-5, residual=0.0), input_lens="256,8192")
    text = latency(tables, tmp_path, [times("auto", 256, 70.0, 5.0), own])
    assert "as a line" not in text
    case = {**BATCH, "row": "auto", "input_lens": "256,8192,9000"}
    curve = record("ttft_fit", case, fit_values(TTFT, Quadratic(1, 2e-3, 3e-6, 0), None))
    assert "as a curve" not in latency(tables, tmp_path, [curve])


@pytest.mark.parametrize("has_file", [True, False])
def test_throughput_without_records_says_nothing(tables, has_file, tmp_path):
    if has_file:
        (tmp_path / "throughput_h200.jsonl").touch()
    assert tables["throughput"](tmp_path) == ""


@pytest.mark.slow
def test_records_of_the_benchmarks_have_what_the_tables_want(tables, tmp_path):
    subject = open_subject(None, "tiny", dtype="float32", device="cpu", layers=1)
    rows = make_rows(["auto", "fp8"], subject)
    settings = EngineSettings()
    case = LatencyCase(input_lens=(16, 32, 64), output_len=4, num_iters=1, num_warmups=0)
    found = run_load(subject, rows, case, settings, command="x")
    store.append(tmp_path / "latency_h200.jsonl", found.records)
    text = tables["latency"](tmp_path)
    header, *lengths = rows_of(text)
    assert header[1:] == ["TTFT, `auto`", "TTFT, `fp8`", "ITL, `auto`", "ITL, `fp8`"]
    assert [row[0] for row in lengths] == ["16", "32", "64"]
    assert all(row[2].endswith("×)") and row[4].endswith("×)") for row in lengths)
    assert "\n- `auto`: " in text and "\n- `fp8`: " in text and "beside `auto`" in text
    load = ThroughputCase(num_prompts=2, input_len=16, output_len=4, num_warmups=0)
    loads = run_load(subject, rows, load, settings, command="x")
    store.append(tmp_path / "throughput_h200.jsonl", loads.records)
    _, auto, fp8 = rows_of(tables["throughput"](tmp_path))
    assert auto[0] == "`auto`" and "×" not in auto[1]
    assert fp8[0] == "`fp8`" and fp8[1].endswith("×)")
