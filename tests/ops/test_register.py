"""The operators as torch.library sees them: schemas, fake results, gradients, meta tensors."""

import copy
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from octavo import ops
from octavo.errors import UnsupportedError
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerBlock, PerHead, PerTensor, PerToken
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import Quantized
from octavo.ops.register import on_device_of
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import AttentionCase, MatmulCase, PagedCase
from octavo.testing.inputs import (
    make_attention_inputs,
    make_decode_inputs,
    make_matmul_inputs,
    make_prefill_inputs,
)
from octavo_testkit.op_calls import (
    CALLS,
    SMALL,
    Calls,
    append_inputs,
    draw_qk,
    draw_qkv,
    gelu_inputs,
    history,
    matvec_inputs,
    tables,
)

OPERATORS = {
    "append_kv",
    "attention",
    "decode_attention",
    "linear_gelu",
    "matvec",
    "prefill_attention",
    "quantize_dynamic",
    "quantize_static",
    "quantize_qkv_dynamic",
    "quantize_qkv_static",
    "rotate_qk",
    "scaled_mm",
}


def record(name: str):
    with Calls() as calls:
        CALLS[name]()
    assert len(calls.found) == 1
    return calls.found[0]


def test_every_operator_is_checked_here():
    found = {record(name)[0]._schema.name.removeprefix("octavo::") for name in CALLS}
    assert found == OPERATORS


@pytest.mark.parametrize("name", CALLS)
def test_schema_fake_and_dispatch(name):
    """torch's own checks: what is mutated, what shapes and strides come back, what AOT makes."""
    operator, args = record(name)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if any(isinstance(x, torch.Tensor) and x.dtype.itemsize == 1 for x in tree_leaves(args)):
        checks.remove("test_schema")  # compares its copies by multiplying, which FP8 has not
    torch.library.opcheck(operator, args, test_utils=[*checks, "test_aot_dispatch_dynamic"])


def test_what_is_written_to_is_declared():
    writes = {
        name: [
            argument.name
            for argument in getattr(torch.ops.octavo, name).default._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for name in OPERATORS
    }
    assert {name: names for name, names in writes.items() if names} == {
        "append_kv": [
            "view_key_pages",
            "view_value_pages",
            "view_key_scale",
            "view_value_scale",
            "saturated",
        ],
        "quantize_qkv_dynamic": [
            f"rings_{i}_{name}"
            for i in range(3)
            for name in ("values", "num_passes", "num_nonfinite")
        ],
    }


def require_grad(inputs: dict, *names: str) -> dict:
    return inputs | {name: inputs[name].float().requires_grad_() for name in names}


def result_tensors(result) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple):
        return list(result)
    if isinstance(result, Quantized):
        return [result.data, result.scale]
    return [result.q, result.k, result.v, result.scales.q, result.scales.k, result.scales.v]


def normalized(weight, scales=None):
    q, k, v = (torch.ones(3, 2, 8) for _ in range(3))
    return ops.quantize_qkv(q, k, v, scales, norm=QkNorm(weight, weight, 1e-6))


# name -> (a function of inputs, inputs some of which require a gradient)
WITH_GRADIENTS = {
    "attention": (ops.attention, require_grad(make_attention_inputs(SMALL), "q", "k", "v")),
    "attention of q": (
        ops.attention,
        require_grad(make_attention_inputs(SMALL, dtype=torch.float32), "q"),
    ),
    "attention of sinks": (
        ops.attention,
        require_grad(make_attention_inputs(AttentionCase(has_sinks=True)), "sinks"),
    ),
    "prefill_attention": (
        ops.prefill_attention,
        require_grad(make_prefill_inputs(PagedCase()), "q"),
    ),
    "decode_attention": (ops.decode_attention, require_grad(make_decode_inputs(PagedCase()), "q")),
    "scaled_mm": (
        ops.scaled_mm,
        require_grad(make_matmul_inputs(MatmulCase(a=None, has_bias=True)), "a", "bias"),
    ),
    "linear_gelu": (ops.linear_gelu, require_grad(gelu_inputs(), "x", "weight", "bias")),
    "matvec": (ops.matvec, require_grad(matvec_inputs(), "x", "weight", "bias")),
    "matvec of a weight": (
        ops.matvec,
        {"x": torch.ones(4), "weight": torch.ones(3, 4, requires_grad=True)},
    ),
    "quantize": (ops.quantize, {"x": torch.ones(3, 4, requires_grad=True)}),
    "quantize_qkv of norms": (normalized, {"weight": torch.ones(1, 8, requires_grad=True)}),
    "quantize_qkv_static of norms": (
        partial(normalized, scales=QkvScales.ones("cpu")),
        {"weight": torch.ones(1, 8, requires_grad=True)},
    ),
    "quantize_static": (
        ops.quantize,
        {"x": torch.ones(3, 4, requires_grad=True), "scale": torch.ones(())},
    ),
    "quantize_qkv": (ops.quantize_qkv, require_grad(draw_qkv(), "q", "k", "v")),
    "quantize_qkv of a history": (
        ops.quantize_qkv,
        require_grad(draw_qkv(), "k") | {"history": history()},
    ),
    "quantize_qkv_static": (
        ops.quantize_qkv,
        require_grad(draw_qkv(), "v") | {"scales": QkvScales.ones()},
    ),
    "rotate_qk": (
        ops.rotate_qk,
        require_grad(draw_qk(), "q", "k") | {"rotary": tables()},
    ),
}


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_a_gradient_is_refused_and_not_lost(name):
    """Forward works with parameters that train; backward says that there is none."""
    op, inputs = WITH_GRADIENTS[name]
    results = result_tensors(op(**inputs))
    if "static" in name:  # its scales are the caller's own
        results = [x for x in results if x.dtype == E4M3.dtype and x.requires_grad]
    assert results
    assert all(x.requires_grad for x in results)
    for x in results:
        with pytest.raises(UnsupportedError, match="has no gradient: expected inference"):
            x.float().sum().backward()


@pytest.fixture
def seen():
    """What an implementation of matvec is given."""
    found = []

    def run(x, weight, bias):
        found.append((x.is_neg(), x.data_ptr()))
        return weight @ x

    ops.register_impl("matvec", "looking", run)
    yield found
    ops.unregister_impl("matvec", "looking")


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_signs_that_are_to_come_have_come(mode, seen):
    """As those of the sines of conjugated rotary tables: memory has the others."""
    table = torch.randn(4, dtype=torch.complex64)
    with mode():
        x = table.conj().imag
        assert x.is_neg()
        ops.matvec(x, torch.ones(3, 4), impl="looking")
    assert [is_neg for is_neg, _ in seen] == [False]


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad])
def test_constants_in_functions_of_functorch(mode, seen):
    """A gradient that goes another way is found, and implementations get tensors with memory."""
    weight, x = torch.ones(3, 4), torch.arange(4.0)

    def loss(y):
        with mode():
            constant = ops.matvec(y.detach(), weight, impl="looking") + ops.matvec(x, weight)
        return (y * y).sum() + constant.sum()

    assert torch.equal(torch.func.grad(loss)(x), 2 * x)
    assert len(seen) == 1


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_no_grad_leaves_no_graph(name):
    op, inputs = WITH_GRADIENTS[name]
    with torch.no_grad():
        results = result_tensors(op(**inputs))
    assert not any(x.requires_grad for x in results)
    with torch.inference_mode():
        op(**inputs)


def test_appending_what_requires_a_gradient():
    """Pages and scales stay out of the graph."""
    inputs = append_inputs(granularity=PerToken())
    inputs |= {name: inputs[name].float().requires_grad_() for name in ("key", "value")}
    ops.append_kv(**inputs)
    view = inputs["view"]
    for x in (view.key_pages, view.value_pages, view.key_scale, view.value_scale):
        assert not x.requires_grad


def test_histories_stay_out_of_the_graph():
    inputs = require_grad(draw_qkv(), "q", "k", "v")
    one = history()
    ops.quantize_qkv(**inputs, history=one)
    assert not any(buffer.requires_grad for each in one for buffer in each.ring)
    assert int(one[0].num_passes) == 1


def test_meta_tensors_give_shapes_without_data():
    meta = {"device": "meta", "dtype": torch.bfloat16}
    q, k = torch.empty(2, 5, 4, 64, **meta), torch.empty(2, 7, 2, 64, **meta)
    out, lse = ops.attention(q, k, k, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((2, 5, 4), torch.float32)
    quantized = ops.quantize(torch.empty(6, 300, **meta), PerBlock(1, 128))
    assert (quantized.scale.shape, quantized.data.dtype) == ((6, 3), E4M3.dtype)
    three = ops.quantize_qkv(q, k, k, granularity=PerHead())
    assert (three.k.shape, three.scales.q.shape) == (k.shape, (4,))
    weight = ops.quantize(torch.empty(9, 300, **meta), PerTensor())
    assert ops.scaled_mm(torch.empty(3, 300, **meta), weight).shape == (3, 9)
    wide = ops.linear_gelu(*(torch.empty(s, **meta) for s in ((2, 5, 300), (9, 300), (9,))))
    assert (wide.shape, wide.dtype) == ((2, 5, 9), torch.bfloat16)
    out = ops.matvec(torch.empty(1, 1, 300, **meta), torch.empty(9, 300, **meta))
    assert (out.shape, out.dtype, out.device.type) == ((1, 1, 9), torch.bfloat16, "meta")


@contextmanager
def default_dtype(dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: default_dtype(torch.bfloat16),
        lambda: default_dtype(torch.float64),
    ],
    ids=["autocast", "default-bfloat16", "default-float64"],
)
@pytest.mark.parametrize("name", CALLS)
def test_the_callers_context_changes_nothing(name, context):
    """A model is loaded under another default dtype and run under autocast."""
    operator, args = record(name)
    results = []
    for around in (nullcontext, context):
        mine = copy.deepcopy(args)
        with around():
            result = operator(*mine)
        written = [x for x in tree_leaves(mine) if isinstance(x, torch.Tensor)]
        results.append([x for x in tree_leaves(result) if x is not None] + written)
    for expected, found in zip(*results, strict=True):
        assert_same_bits(found, expected)


class OnOtherGpu(torch.Tensor):
    """Says that it lies on GPU 1."""

    is_cuda = True
    device = torch.device("cuda", 1)


def test_kernels_are_launched_on_the_device_of_the_operands(monkeypatch):
    """A model may lie on several GPUs while the first one is current."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: f"on {device}")
    there, here = torch.zeros(2).as_subclass(OnOtherGpu), torch.zeros(2)
    assert on_device_of((there, here)) == "on cuda:1"
    assert on_device_of((None, "text", there)) == "on cuda:1"
    for args in ((here, there), (), (None, 3, "text")):
        assert isinstance(on_device_of(args), nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert isinstance(on_device_of((there,)), nullcontext)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    x = torch.randn(64, 256, device="cuda:1", dtype=torch.bfloat16)
    result = ops.quantize(x, PerToken())
    assert torch.cuda.current_device() == 0
    assert_same_bits(result.data, ops.quantize(x.cpu(), PerToken()).data)
