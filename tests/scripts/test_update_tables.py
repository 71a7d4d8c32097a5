"""The tables of README and docs are what the records say."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.measure import store
from octavo.measure.records import Machine, Measurement

SCRIPT = Path(__file__).parents[2] / "scripts" / "update_tables.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_agree_with_the_records(script):
    assert script.main(["--check"]) == 0


@pytest.mark.parametrize("has_fused", [True, False])
def test_towers_of_old_and_new_records(script, has_fused, tmp_path):
    """Records without our own path in BF16 have a table as well, with an empty column."""
    machine = Machine.current(gpu="NVIDIA H200", capability=(9, 0))
    times = [("sdpa", "bf16", 60), ("vllm-fa3", "bf16", 48), ("octavo", "bf16", 90)]
    times += [("octavo with vllm-fa3", "fused-bf16", 40)] if has_fused else []
    times += [("octavo", "static", 32), ("octavo", "dynamic", 33)]
    records = []
    for impl, recipe, median in times:
        for is_graph in (False, True):
            ms = median - 2.0 * is_graph
            values = {"median_ms": ms, "speedup": 48 / ms}
            if has_fused:
                values["fused_speedup"] = (40 - 2.0 * is_graph) / ms
            case = {"model": "tower", "images": 3, "resolution": "hd"}
            case |= {"recipe": recipe, "graphs": is_graph}
            records.append(
                Measurement(
                    op="encoder", impl=impl, case=case, values=values, machine=machine, command="x"
                )
            )
    store.append(tmp_path / "encoder_h200.jsonl", records)
    table = script.TABLES["towers"](tmp_path)
    lines = [line for line in table.splitlines() if line.startswith("| tower")]
    assert len(lines) == 2
    over, name = (", 1.25×", " 40.0 (octavo with vllm-fa3) ") if has_fused else ("", "")
    plain = f"| tower, 3 × hd | 32.0 (1.50×{over}) |"
    assert lines[0].startswith(plain) and lines[0].endswith("| 48.0 (vllm-fa3) |")
    assert lines[1].startswith("| tower, 3 × hd, graphs | 30.0 (1.60×")
    assert lines[0].split("|")[4].strip() == name.strip()


@pytest.mark.parametrize(
    ("file", "figure"),
    [
        ("docs/explanation/numerics.md", "| 131,072 |"),
        ("README.md", "decode attention alone, 8 × 128k"),
        ("docs/explanation/measured.md", "| decode, 8 × 128k"),
        ("docs/explanation/kv-cache.md", "| BF16, chunks of 512 |"),
        ("docs/explanation/engine-speed.md", "| 128,000 |"),
    ],
)
def test_a_changed_figure_is_noticed(script, file, figure, tmp_path, monkeypatch, capsys):
    original, copy = SCRIPT.parents[1] / file, tmp_path / "copy.md"
    assert figure in original.read_text()
    copy.write_text(original.read_text().replace(figure, figure.replace("1", "7")))
    monkeypatch.setattr(script, "FILES", (copy,))
    assert script.main(["--check"]) == 1
    assert "do: python scripts/update_tables.py" in capsys.readouterr().out
    assert script.main([]) == 0
    assert copy.read_text() == original.read_text()


def test_the_grid_of_attention_is_one_table_for_each_kind_of_heads(script, tmp_path):
    machine = Machine.current(gpu="NVIDIA H200", capability=(9, 0))
    times = {("gluon", "FP8"): 2.0, ("fa3-fwd", "FP8"): 1.5, ("fa3-fwd", "BF16"): 2.6}
    records = []
    for num_kv_heads in (16, 2):
        case = {"shape": "64x512", "causal": False, "length": 512, "head_dim": 64}
        case |= {"num_heads": 16, "num_kv_heads": num_kv_heads}
        for (impl, operands), ms in times.items():
            own = {"operands": operands, "is_selected": impl == "gluon"}
            records.append(
                Measurement(
                    op="attention_grid",
                    impl=impl,
                    case=case | own,
                    values={"median_ms": ms},
                    machine=machine,
                    command="x",
                )
            )
    store.append(tmp_path / "attention_grid_h200.jsonl", records)
    text = script.TABLES["attention_grid"](tmp_path)
    assert "on an NVIDIA H200." in text
    assert text.count("| 64 | 1.30 / 0.75 |") == 2
    assert "\nheads 16/2: octavo's FP8 over" in text


def kernel_record(op, impl, ms, error=0.05, **case):
    return Measurement(
        op=op,
        impl=impl,
        case=case,
        values={"median_ms": ms, "relative_rms": error},
        machine=Machine.current(gpu="NVIDIA H200", capability=(9, 0)),
        command="x",
    )


def test_levels_are_compared_with_one(script, tmp_path):
    runs = [("none", "triton", 2.0, 0.3), (4, "triton", 2.2, 0.1), (1, "triton", 3.0, 0.06)]
    runs.append((1, "gluon", 1.0, 0.05))
    sizes = [("1x8192 heads 8/8 head_dim 128", False, 1.0, runs)]
    sizes.append(("1x32768 heads 8/8 head_dim 128", True, 0.0, runs[:3]))
    records = [
        kernel_record(
            "attention_levels",
            impl,
            ms,
            error,
            shape=shape,
            causal=is_causal,
            value_mean=mean,
            promote_every=every,
            is_selected=impl == "gluon" or every != 1,
        )
        for shape, is_causal, mean, ran in sizes
        for every, impl, ms, error in ran
    ]
    store.append(tmp_path / "attention_levels_h200.jsonl", records)
    lines = script.TABLES["attention_levels"](tmp_path).splitlines()
    names = "one level, triton | every 4 tiles, triton | every tile, triton | every tile, gluon"
    assert f"|  | mean of V | {names} |" in lines
    levels = "**2.00, 1.00×, 0.3** | **2.20, 1.10×, 0.1** | 3.00, 1.50×, 0.06"
    full, causal = lines[-2:]
    assert full == f"| 1x8192 heads 8/8 head_dim 128 | 1 | {levels} | **1.00, 0.50×, 0.05** |"
    assert causal == f"| 1x32768 heads 8/8 head_dim 128, causal | 0 | {levels} | – |"


def test_chunks_of_prompts_by_what_is_cached(script, tmp_path):
    layer = "heads 32/8 head_dim 128 page 64"
    ours = [("gluon", "FP8", 2.0), ("triton", "FP8", 3.0), ("triton", "BF16", 5.0)]
    others = [("vllm-fa3", "FP8", 2.5), ("vllm-fa3", "BF16", 4.0)]
    sizes = {f"512 after 8192 {layer}": ours + others, f"512 after 0 {layer}": ours}
    sizes[f"2048 after 0 {layer}"] = ours
    records = [
        kernel_record("prefill_attention", impl, ms, shape=shape, operands=operands)
        for shape, ran in sizes.items()
        for impl, operands, ms in ran
    ]
    store.append(tmp_path / "kernels_h200.jsonl", records)
    lines = script.TABLES["prefill"](tmp_path).splitlines()
    assert "|  | after 0 | after 8,192 |" in lines
    assert f"| 512 new, {layer} | 2 (2.50 / –) | 2 (2.00 / 1.25) |" in lines
    assert f"| 2,048 new, {layer} | 2 (2.50 / –) | – |" in lines


def test_decoding_that_a_peer_refuses(script, tmp_path):
    shape = "16x8192 heads 16/1 head_dim 128 page 64"
    record = kernel_record("decode_attention", "gluon", 0.05, shape=shape, operands="FP8")
    record = replace(record, values=record.values | {"bytes": 1e8})
    store.append(tmp_path / "kernels_h200.jsonl", [record])
    (line,) = [x for x in script.TABLES["decode"](tmp_path).splitlines() if shape in x]
    assert line == f"| {shape} | 50.0{' | –' * 5} | 2,000 |"
