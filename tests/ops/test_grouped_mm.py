"""grouped_mm as an op: what it means, what it takes and what it refuses."""

from dataclasses import replace

import pytest
import torch

from octavo import ConfigError, UnsupportedError, ops
from octavo.kernels.device import CPU, Device
from octavo.numerics.granularity import PerBlock, PerChannel, PerTensor, PerToken
from octavo.numerics.quantize import quantize
from octavo.reference import gemm
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import GROUPED, GroupedCase
from octavo.testing.inputs import make_grouped_inputs

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0))
A100 = Device(type="cuda", name="A100", capability=(8, 0))
CASE = GroupedCase(counts=(2, 0, 3), num_others=2, columns=6, depth=40, num_tokens=4, has_bias=True)


def call(**changes):
    return ops.grouped_mm(**(make_grouped_inputs(CASE) | changes))


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_the_reference_in_float64_is_the_dequantized_product(case):
    """Row by row, written down again; the scales of float32 are exact in float64."""
    inputs = make_grouped_inputs(case)
    a, b, tokens, bias = (inputs[name] for name in ("a", "b", "tokens", "bias"))
    x = a.double() if case.a is None else a.dequantize(torch.float64)
    x = x if tokens is None else x[tokens]
    rows = [
        x[row] @ b.dequantize(torch.float64)[expert].t() + (0 if bias is None else bias[expert])
        for row, expert in enumerate(
            expert for expert, count in enumerate(case.counts) for _ in range(count)
        )
    ]
    actual = gemm.grouped_mm(**inputs, compute=torch.float64)
    torch.testing.assert_close(actual, torch.stack(rows), rtol=1e-12, atol=1e-12)


def test_each_expert_is_a_scaled_mm():
    inputs = make_grouped_inputs(CASE)
    a, b, bias = inputs["a"], inputs["b"], inputs["bias"]
    out = ops.grouped_mm(**inputs)
    tokens = inputs["tokens"][2:5]
    data = a.data.view(torch.uint8)[tokens].view(a.data.dtype)
    part = replace(a, data=data, scale=a.scale[tokens])
    weight = replace(b, data=b.data[2], scale=b.scale[2])
    assert_same_bits(out[2:5], ops.scaled_mm(part, weight, bias[2]))
    assert not out[5:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_result_has_the_dtype_asked_for(dtype):
    out = call(out_dtype=dtype)
    assert out.dtype == dtype and out.shape == (7, 6) and out.is_contiguous()
    assert_same_bits(out, call(out_dtype=torch.float32).to(dtype))


def test_tokens_may_be_int32():
    inputs = make_grouped_inputs(CASE)
    assert_same_bits(call(tokens=inputs["tokens"].int()), call())


GOOD = make_grouped_inputs(CASE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.ones(4, 41)}, r"a \[tokens, K\] and b \[experts, columns, K\], got \[4, 41\]"),
        ({"b": quantize(torch.ones(6, 40), PerChannel())}, r"got \[4, 40\] and \[6, 40\]"),
        ({"a": torch.ones(4, 40, dtype=torch.float64)}, "expected a in bfloat16, float16 or"),
        ({"a": replace(GOOD["a"], scale=torch.ones(3))}, r"needs a float32 scale of shape \[4\]"),
        ({"b": replace(GOOD["b"], data=torch.ones(3, 6, 40))}, "b's data in FP8, got torch.float3"),
        ({"b": quantize(torch.ones(3, 6, 40), PerToken())}, "b per tensor, channel or block"),
        ({"a": quantize(torch.ones(4, 40), PerBlock(2, 20))}, "blocks of one row for a"),
        (
            {"ends": torch.tensor([2, 2], dtype=torch.int32)},
            r"ends as torch.int32 \[3\], got .*2\]",
        ),
        ({"ends": torch.tensor([2, 2, 5])}, r"got torch.int64 \[3\]"),
        ({"tokens": torch.zeros(7)}, r"tokens as torch.int32 or torch.int64 \[rows\], got torch.f"),
        ({"bias": torch.ones(6)}, r"a bias of shape \[3, 6\], got \[6\]"),
        ({"out_dtype": torch.float64}, "expected out_dtype bfloat16, float16 or float32"),
        ({"ends": torch.zeros(3, dtype=torch.int32, device="meta")}, "ends on cpu like a"),
        ({"impl": "cuda"}, "impl for grouped_mm, one of triton, reference; got 'cuda'"),
    ],
)
def test_what_does_not_fit_is_told(changes, message):
    with pytest.raises(ConfigError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("device", "dtype", "impl"),
    [
        (H200, torch.float8_e4m3fn, "triton"),
        (A100, torch.bfloat16, "triton"),
        (A100, torch.float8_e4m3fn, "reference"),
        (CPU, torch.float8_e4m3fn, "reference"),
    ],
)
def test_what_runs_where(device, dtype, impl):
    request = ops.Request(op="grouped_mm", device=device, dtype=dtype)
    assert ops.select(request).impl == impl
    if impl == "reference":
        with pytest.raises(UnsupportedError, match="impl='triton' cannot run"):
            ops.select(request, "triton")


@pytest.mark.parametrize("a", [PerToken(), PerTensor(), None], ids=str)
def test_torch_compile_sees_one_node(a):
    inputs = make_grouped_inputs(replace(CASE, a=a))
    run = torch.compile(lambda: ops.grouped_mm(**inputs) + 1, backend="eager", fullgraph=True)
    assert_same_bits(run(), ops.grouped_mm(**inputs) + 1)
