"""Hopper's attention kernel against float64 and against a model that rounds where it does."""

from dataclasses import replace

import torch

from octavo.kernels.attention.config import default_gluon, takes_codes
from octavo.numerics.accumulator import HOPPER_FP8
from octavo.reference import attention as reference
from octavo.reference.qkv import transpose_values
from octavo.reference.softmax import Rounding, kernel_rounding
from octavo.testing.asserts import assert_within_budget

E4M3 = torch.float8_e4m3fn


def run(attention, inputs, config=None):
    """`attention` of inputs as octavo.testing.inputs makes them."""
    packing = inputs.get("packing")
    return attention(
        inputs["q"],
        inputs["k"],
        transpose_values(inputs["v"], None if packing is None else packing.cu_seqlens_k),
        inputs["spec"],
        inputs["scales"],
        packing=packing,
        sinks=inputs["sinks"],
        key_mask=None,
        out_dtype=torch.float32,
        value_layout="transposed",
        config=config,
    )


def rounding_of(spec, config, head_dim, accumulator=HOPPER_FP8):
    """Where the kernel rounds, with Hopper's accumulator: what sums of rows are made of."""
    has_codes = takes_codes(head_dim, spec)
    return Rounding(E4M3, accumulator, config.has_ones or has_codes, has_codes)


def check(attention, inputs, config=None, rounding=None, accumulator=HOPPER_FP8):
    """Compare with float64; rounding: of the model of the result, which has exact sums if None."""
    call = reference.attention if "packing" not in inputs else reference.varlen_attention
    truth, truth_lse = call(**inputs, compute=torch.float64)
    spec = inputs["spec"]
    head_dim = inputs["q"].shape[-1]
    config = config or default_gluon(head_dim, spec)
    if rounding is None:
        is_by_codes = takes_codes(head_dim, spec)
        rounding = kernel_rounding(
            E4M3, replace(spec, exponentials="codes" if is_by_codes else "exact")
        )
        if accumulator is None:
            rounding = Rounding(E4M3, None, rounding.has_rounded_sums, rounding.has_codes)
    model, _ = call(**inputs, rounding=rounding)
    _, model_lse = call(**inputs, rounding=rounding_of(spec, config, head_dim, accumulator))
    out, lse = run(attention, inputs, config)
    assert_within_budget(out, truth=truth, model=model)
    assert_within_budget(lse, truth=truth_lse, model=model_lse)
    return out
