"""Speeds of ops: planted ones are found again."""

from dataclasses import replace

import pytest

from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.speeds import STATED, Speeds
from octavo.measure.records import Machine, Measurement

H200 = find_gpu("h200")
MACHINE = Machine.current(gpu=H200.name, capability=(9, 0))


def row(op, impl, case, ms, **work):
    values = {"median_ms": ms, **work}
    return Measurement(
        op=op, impl=impl, case=case, values=values, machine=MACHINE, command="planted"
    )


def products(fixed_us, share):
    """BF16 products of many rows that cost so much for each call, and reach so much."""
    found = []
    for size in (1024, 2048, 4096, 8192):
        flops = 2.0 * size**3
        ms = fixed_us / 1e3 + 1e3 * flops / (share * 694e12)
        case = {"shape": f"{size}x{size}x{size}", "operands": "BF16", "scales": "none"}
        found.append(row("scaled_mm", "torch", case, ms, flops=flops, bytes=6.0 * size**2))
    return found


def test_planted_costs_are_found():
    speeds = Speeds(products(fixed_us=7.0, share=0.8), H200)
    assert speeds.product_ms("BF16", 4096, 4096, 4096) == pytest.approx(
        0.007 + 1e3 * 2 * 4096**3 / (0.8 * 694e12)
    )


def test_few_rows_read_the_weight():
    speeds = Speeds([], H200)
    fixed_us, share = STATED["product BF16 bytes"]
    num_bytes = 2 * 4096**2 + 2 * (4096 + 4096)
    expected = fixed_us / 1e3 + 1e3 * num_bytes / (share * 4540e9)
    assert speeds.product_ms("BF16", 1, 4096, 4096) == pytest.approx(expected)
    assert not speeds.has_records


def test_shares_hold_for_another_gpu():
    """Twice the bandwidth is half of the time, but for what each call costs."""
    rows = [
        row(
            "decode_attention",
            "gluon",
            {"shape": f"1x{n} heads 8/8 head_dim 128 page 64", "operands": "BF16"},
            0.005 + n * 2**10 / (0.9 * 4540e6),
            bytes=float(n * 2**10),
        )
        for n in (2**10, 2**14, 2**17)
    ]
    rows += products(0.0, 0.9)
    h200, h100 = (Speeds(rows, gpu) for gpu in (H200, find_gpu("h100")))
    assert h100.is_borrowed and not h200.is_borrowed
    of_h200, of_h100 = (speeds.decode_ms("BF16", 1e9) - 0.005 for speeds in (h200, h100))
    assert of_h200 == pytest.approx(1e3 * 1e9 / (0.9 * 4540e9))
    assert of_h100 / of_h200 == pytest.approx(4800 / 3350)


def test_attention_is_that_of_the_nearest_head_dim():
    rows = [
        row(
            "attention",
            impl,
            {"shape": f"1x8192 heads 16/16 head_dim {size}", "operands": "BF16"},
            ms,
            flops=1e12,
        )
        for impl, size, ms in (("a", 64, 4.0), ("a", 256, 2.0), ("b", 64, 3.0), ("b", 256, 5.0))
    ]
    speeds = Speeds(rows, H200)
    assert speeds.attention_ms("BF16", 1e12, 72, "a") == pytest.approx(4.0)
    assert speeds.attention_ms("BF16", 2e12, 192, "a") == pytest.approx(4.0)
    assert speeds.attention_ms("BF16", 1e12, 72, "fastest") == pytest.approx(3.0)


def planted(flops_by_head_dim, share_by_head_dim, fixed_us=50.0):
    """Attention that costs so much for each call, and has a share for each head_dim."""
    return [
        row(
            "attention",
            "a",
            {"shape": f"1x8192 heads 16/16 head_dim {size}", "operands": "BF16"},
            fixed_us / 1e3 + 1e3 * flops / (share_by_head_dim[size] * 694e12),
            flops=flops,
        )
        for size, works in flops_by_head_dim.items()
        for flops in works
    ]


def test_what_a_call_costs_is_known_from_other_sizes_of_heads():
    """One length cannot tell the cost of a call from the rate: long prompts would seem slow."""
    rows = planted({64: [3e11], 128: [5e11, 2e12, 9e12]}, {64: 0.7, 128: 0.9})
    expected = 0.05 + 1e3 * 1e14 / (0.7 * 694e12)
    assert Speeds(rows, H200).attention_ms("BF16", 1e14, 64, "a") == pytest.approx(expected)
    alone = Speeds(rows[:1], H200).attention_ms("BF16", 1e14, 64, "a")
    assert alone == pytest.approx(rows[0].values["median_ms"] * 1e14 / 3e11) and alone > expected


def test_no_attention_is_beyond_the_ceiling_for_long():
    """A kernel by itself is, for the moment that a record takes."""
    rows = planted({64: [3e11], 128: [5e11, 2e12, 9e12]}, {64: 0.7, 128: 1.1})
    speeds = Speeds(rows, H200)
    assert speeds.attention_ms("BF16", 1e14, 128, "a") == pytest.approx(0.05 + 1e17 / 694e12)
    assert speeds.attention_ms("BF16", 1e14, 64, "a") == pytest.approx(0.05 + 1e17 / (0.7 * 694e12))


def test_sinks_leave_fewer_to_be_the_fastest():
    rows = planted({64: [1e12]}, {64: 0.5})
    rows += [replace(one, impl="vllm-fa3", values={**one.values, "median_ms": 4.0}) for one in rows]
    speeds = Speeds(rows, H200)
    assert speeds.attention_impl("BF16", 1e12, 64, "fastest") == "a"
    assert speeds.attention_impl("BF16", 1e12, 64, "fastest", has_sinks=True) == "vllm-fa3"
    assert speeds.attention_impl("BF16", 1e12, 64, "another", has_sinks=True) == "another"


def test_the_only_token_is_read_past_at_the_memorys_speed():
    speeds = Speeds([], H200)
    few, one = speeds.product_ms("BF16", 2, 4096, 4096), speeds.matvec_ms(4096, 4096)
    assert H200.ceilings.gb_per_s * one * 1e6 > 2 * 4096**2 and one < few
