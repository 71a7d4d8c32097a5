"""The errors that the demonstration reports, on tensors whose truth is known."""

import pytest
import torch

from octavo.demo.attention_errors import (
    attention_errors,
    decode_errors,
    quantization_errors,
)
from octavo.integrations.transformers.calibrate import CapturedQkv


@pytest.fixture
def qkv():
    return CapturedQkv(
        torch.randn(1, 130, 6, 32), torch.randn(1, 130, 2, 32), torch.randn(1, 130, 2, 32)
    )


def by(records, name, value):
    return {record.case[name]: record.values[value] for record in records}


def test_every_choice_has_a_row(qkv):
    records = list(quantization_errors(7, qkv))
    assert len(records) == 3 * 2 * 3
    assert all(record.case["layer"] == 7 for record in records)
    assert all(20 < record.values["sqnr_db"] < 40 for record in records)


def test_one_bit_of_mantissa_is_six_decibels(qkv):
    records = [
        r
        for r in quantization_errors(0, qkv)
        if r.case["tensor"] == "q" and r.case["granularity"] == "tensor"
    ]
    errors = by(records, "format", "sqnr_db")
    assert errors["e4m3"] - errors["e5m2"] == pytest.approx(6, abs=0.7)


def test_per_head_scales_rescue_a_quiet_head(qkv):
    qkv.k[:, :, 1] *= 3e4  # the logits stay: this head's three queries shrink as its keys grow
    qkv.q[:, :, 3:] /= 3e4
    records = list(decode_errors(0, qkv))
    errors = by(records, "recipe", "relative_rms")
    assert errors["fp8 per head"] < 0.7 * errors["fp8 per tensor"]


def test_attention_in_bf16_is_better_than_in_fp8(qkv):
    errors = by(attention_errors(0, qkv), "recipe", "relative_rms")
    assert set(errors) == {"bf16", "fp8 per tensor", "fp8 per head"}
    assert errors["bf16"] < 0.01 < errors["fp8 per tensor"] < 0.1


def test_decode_counts_its_bytes(qkv):
    sizes = by(decode_errors(0, qkv), "recipe", "bytes_per_token")
    assert sizes["bf16"] == 2 * 2 * 32 * 2
    assert sizes["fp8 per tensor"] == sizes["fp8 per head"] == sizes["bf16"] / 2
    assert sizes["fp8 per token"] == sizes["bf16"] / 2 + 2 * 2 * 4
