"""torch.compile(fullgraph=True) around every op: the same results, the same side effects."""

import copy
from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.cache.view import PagedView
from octavo.errors import ConfigError
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerBlock, PerHead, PerTensor, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import Quantized
from octavo.numerics.rotary import Rotary
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import AttentionCase, MatmulCase, PackedCase, PagedCase
from octavo.testing.inputs import (
    Draw,
    make_attention_inputs,
    make_decode_inputs,
    make_matmul_inputs,
    make_packed_inputs,
    make_paged_view,
    make_prefill_inputs,
)

# The compiler's own imports use what torch has deprecated; which ones depends on the version.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

FP8 = E4M3.dtype


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend: str = "aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


class Counter:
    """A backend that counts how often it compiles."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def check(function, *args) -> None:
    """The compiled function gives the eager function's bits, twice."""
    expected = function(*copy.deepcopy(args))
    run = compiled(function)
    for _ in range(2):
        result = run(*copy.deepcopy(args))
        assert len(result) == len(expected)
        for ours, theirs in zip(result, expected, strict=True):
            assert_same_bits(ours, theirs)


SPEC = AttentionSpec(causal=True, window=9, softcap=5.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_attention(dtype):
    """With something before and after the op, and the spec made inside."""
    case = AttentionCase(q_len=12, kv_len=20, has_sinks=True, has_key_mask=True)
    inputs = make_attention_inputs(case, dtype=dtype)
    scales = inputs.get("scales")

    def function(q, k, v, sinks, key_mask):
        out, lse = ops.attention(
            q,
            k,
            v,
            AttentionSpec(causal=True, window=9, softcap=5.0),
            scales,
            sinks=sinks + 1,
            key_mask=key_mask,
            return_lse=True,
        )
        return out * 2, lse + 1

    check(function, *(inputs[name] for name in ("q", "k", "v", "sinks", "key_mask")))


def test_packed_attention():
    inputs = make_packed_inputs(PackedCase(q_lens=(3, 0, 9)))
    packing = inputs["packing"]

    def function(q, k, v, ends):
        return (ops.attention(q, k, v, SPEC, packing=Packing.same(ends, 9)) + 1,)

    check(function, inputs["q"], inputs["k"], inputs["v"], packing.cu_seqlens_q)


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerHead(), PerToken(), PerBlock(2, 16)], ids=str
)
def test_quantize(granularity):
    def function(x):
        quantized = ops.quantize(x + 1, granularity, E5M2, margin=1.5, power_of_two=True)
        return quantized.dequantize() + 1, quantized.scale

    check(function, Draw(0).normal(5, 40))
    check(function, Draw(0).normal(40, 5).t())


def test_static_quantize():
    def function(x, scale):
        return (ops.quantize(x, PerToken(), scale=scale).dequantize(torch.bfloat16),)

    check(function, Draw(0).normal(5, 40), torch.rand(5) + 0.1)


def draw_qkv(seed: int = 0):
    return Draw(seed).normal(1, 5, 8, 40).split([4, 2, 2], dim=2)


def test_quantize_qkv():
    def dynamic(q, k, v):
        result = ops.quantize_qkv(q, k, v, granularity=PerHead())
        return result.q.float(), result.k.float(), result.scales.q, result.scales.v * 2

    def static(q, k, v, scale):
        result = ops.quantize_qkv(q, k, v, QkvScales(scale, scale, scale))
        return result.q.float(), result.v.float()

    check(dynamic, *draw_qkv())
    check(static, *draw_qkv(), torch.tensor(0.01))


def test_rotate_qk():
    def function(q, k, cos, sin):
        turned_q, turned_k = ops.rotate_qk(q, k, Rotary(cos, sin))
        return turned_q * 2, turned_k

    angle = torch.rand(5, 20)
    check(function, *draw_qkv()[:2], angle.cos(), angle.sin())


class DynamicQuantizer(torch.nn.Module):
    """Quantizes with histories, as an attention layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.history = torch.nn.ModuleList(AmaxHistory() for _ in "qkv")

    def forward(self, q, k, v):
        q_history, k_history, v_history = self.history
        result = ops.quantize_qkv(q, k, v, history=(q_history, k_history, v_history))
        out = ops.attention(result.q, result.k, result.v, scales=result.scales)
        return out, result.scales.q, result.scales.k


def test_histories_are_written():
    """Buffers of the module, 20 passes: the ring goes round inside the compiled graph."""
    eager, module = DynamicQuantizer(), DynamicQuantizer()
    run = compiled(module)
    for seed in range(20):
        inputs = draw_qkv(seed)
        for ours, theirs in zip(run(*inputs), eager(*inputs), strict=True):
            assert_same_bits(ours, theirs)
    for ours, theirs in zip(module.buffers(), eager.buffers(), strict=True):
        assert_same_bits(ours, theirs)
    assert int(module.history[2].num_passes) == 20


@pytest.mark.parametrize("granularity", [PerTensor(), PerToken()], ids=str)
def test_pages_are_written(granularity):
    """Append, then decode over the same pages, in one graph."""
    case = PagedCase(lengths=(3, 65), q_lens=(1, 1), granularity=granularity)

    def step(view, q, key, value, slots):
        ops.append_kv(view, key + 1, value, slots)
        return ops.decode_attention(q, view, out_dtype=torch.float32) + 1

    draw = Draw(7)
    q = draw.normal(2, 1, 4, 64)
    key, value = draw.normal(2, 2, 2, 64)
    results, views = [], []
    for run in (step, compiled(step)):
        view = make_paged_view(case)
        slots = view.slots(torch.tensor([0, 1]), torch.tensor([2, 64]))
        results.append(run(view, q, key, value, slots))
        views.append(view)
    assert_same_bits(*results)
    untouched = make_paged_view(case)
    for name in ("key_pages", "value_pages", "key_scale", "value_scale"):
        assert_same_bits(getattr(views[0], name), getattr(views[1], name))
    assert not torch.equal(
        views[1].key_pages.view(torch.uint8), untouched.key_pages.view(torch.uint8)
    )


def test_a_view_may_be_made_inside():
    view = make_paged_view(PagedCase(granularity=PerHead()))
    inputs = make_decode_inputs(PagedCase())

    def function(q, key_pages, value_pages, key_scale, value_scale, table, lengths):
        made = PagedView(key_pages, value_pages, key_scale, value_scale, table, lengths)
        return (ops.decode_attention(q, made),)

    check(function, inputs["q"], *vars(view).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_prefill(dtype):
    case = PagedCase(lengths=(20, 65), q_lens=(20, 3), has_sinks=True)
    inputs = make_prefill_inputs(case, dtype=dtype)
    view, q_scale = inputs["view"], inputs.get("q_scale")

    def function(q, ends, sinks):
        return ops.prefill_attention(q, view, ends, 20, SPEC, q_scale, sinks=sinks, return_lse=True)

    check(function, inputs["q"], inputs["cu_seqlens_q"], inputs["sinks"])


@pytest.mark.parametrize(
    "case",
    [
        MatmulCase(has_bias=True),
        MatmulCase(a=None),
        MatmulCase(a=PerBlock(1, 64), b=PerBlock(64, 64)),
    ],
    ids=str,
)
def test_matmul(case):
    inputs = make_matmul_inputs(case)
    weight = inputs["b"]

    def function(data, scale, bias):
        a = data if scale is None else Quantized(data, scale, case.a)
        return (ops.scaled_mm(a, weight, bias).relu(),)

    a = inputs["a"]
    data, scale = (a, None) if case.a is None else (a.data, a.scale)
    check(function, data, scale, inputs["bias"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_matvec(dtype):
    """Parts of a fused weight, and more around them in one graph."""
    draw = Draw(0)
    fused, bias = draw.normal(24, 40, dtype=dtype), draw.normal(16, dtype=dtype)

    def function(x, fused, bias):
        first = ops.matvec(x + 1, fused[:16], bias)
        return first.relu(), ops.matvec(first, fused[:, 8:24])

    check(function, draw.normal(1, 1, 40, dtype=dtype), fused, bias)


def test_linear_gelu():
    """With more around it in one graph."""
    draw = Draw(0)
    weight, bias = draw.normal(24, 40).bfloat16(), draw.normal(24).bfloat16()

    def function(x, weight, bias):
        return (ops.linear_gelu(x + 1, weight, bias) * 2,)

    check(function, draw.normal(2, 3, 40).bfloat16(), weight, bias)


def test_matvec_of_more_rows_is_told_while_compiling():
    run = compiled(lambda x, weight: ops.matvec(x, weight))
    with pytest.raises(Exception, match=r"x as one row, .* got \[2, 8\]"):
        run(torch.zeros(2, 8), torch.zeros(3, 8))


def test_a_linear_layer_quantizes_its_input_inside():
    weight = make_matmul_inputs(MatmulCase())["b"]

    def function(x):
        return (ops.scaled_mm(ops.quantize(x, PerToken()), weight) + 1,)

    check(function, Draw(0).normal(5, 192, dtype=torch.bfloat16))


def mark(x: torch.Tensor, *dims: int) -> torch.Tensor:
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    return x


def test_attention_compiles_once_for_all_lengths():
    counter = Counter()

    def function(q, k, v):
        return ops.attention(q, k, v, SPEC)

    run = torch.compile(function, fullgraph=True, backend=counter)
    for batch, q_len, kv_len in ((2, 12, 20), (3, 33, 65), (5, 130, 7)):
        case = AttentionCase(batch=batch, q_len=q_len, kv_len=kv_len)
        q, k, v = (mark(make_attention_inputs(case)[name], 0, 1) for name in "qkv")
        assert_same_bits(run(q, k, v), function(q, k, v))
    assert counter.count == 1


@pytest.mark.parametrize("granularity", [PerTensor(), PerToken(), PerBlock(1, 16)], ids=str)
def test_a_linear_layer_compiles_once_for_all_batches(granularity):
    counter = Counter()
    weight = make_matmul_inputs(MatmulCase(depth=64))["b"]

    def function(x):
        return ops.scaled_mm(ops.quantize(x, granularity), weight)

    run = torch.compile(function, fullgraph=True, backend=counter)
    for rows in (5, 17, 64):
        x = mark(Draw(rows).normal(rows, 64, dtype=torch.bfloat16), 0)
        assert_same_bits(run(x), function(x))
    assert counter.count == 1


def test_decoding_compiles_once_for_all_batches():
    counter = Counter()

    def function(q, view):
        return ops.decode_attention(q, view)

    run = torch.compile(function, fullgraph=True, backend=counter)
    view = make_paged_view(PagedCase(lengths=(5, 65, 130, 7)))
    for count in (2, 3, 4):
        part = replace(
            view,
            page_table=mark(view.page_table[:count].clone(), 0),
            lengths=mark(view.lengths[:count].clone(), 0),
        )
        q = mark(Draw(count).normal(count, 1, 4, 64), 0)
        assert_same_bits(run(q, part), function(q, part))
    assert counter.count == 1


def test_a_wrong_call_is_told_while_compiling():
    run = compiled(lambda q, k: ops.attention(q, k, k))
    with pytest.raises(Exception) as error:  # dynamo wraps what it cannot trace past
        run(torch.zeros(1, 5, 3, 64), torch.zeros(1, 5, 2, 64))
    assert "a multiple of the KV heads, got 3 and 2" in str(error.value)
    assert isinstance(error.value, ConfigError | torch._dynamo.exc.TorchDynamoException)


def test_a_gradient_is_refused_while_compiling():
    """AOT autograd makes the backward graph ahead: it says there what to do."""
    run = compiled(lambda q: ops.attention(q, q, q))
    q = torch.zeros(1, 5, 2, 64, requires_grad=True)
    with pytest.raises(Exception, match="has no gradient: expected inference.*torch.no_grad"):
        run(q)
    with torch.no_grad():
        assert run(q).shape == q.shape


@pytest.mark.slow
def test_inductor():
    """The backend that people use: everything in one graph, results and side effects alike."""
    eager, module = DynamicQuantizer(), DynamicQuantizer()
    weight = make_matmul_inputs(MatmulCase(depth=160, columns=160))["b"]
    case = PagedCase(lengths=(3, 65), q_lens=(1, 1), granularity=PerToken())

    def step(quantizer, view, x, slots, query):
        projected = ops.scaled_mm(ops.quantize(x, PerToken()), weight).view(-1, 1, 1, 160)
        q, k, v = projected.view(-1, 1, 4, 40).split([2, 1, 1], dim=2)
        out, _, _ = quantizer(q, k, v)
        key = torch.nn.functional.pad(k.flatten(0, 1), (0, 24)).expand(-1, 2, -1)
        ops.append_kv(view, key, key * 2, slots)
        decoded = ops.decode_attention(query, view)
        return torch.nn.functional.silu(out.float()), decoded

    views = make_paged_view(case), make_paged_view(case)
    slots = views[0].slots(torch.tensor([0, 1]), torch.tensor([2, 64]))
    run = compiled(step, backend="inductor")
    for seed in range(3):
        x = Draw(seed).normal(2, 160, dtype=torch.bfloat16)
        query = Draw(seed).normal(2, 1, 4, 64)
        ours = run(module, views[0], x, slots, query)
        theirs = step(eager, views[1], x, slots, query)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    for one, other in zip(module.buffers(), eager.buffers(), strict=True):
        assert_same_bits(one, other)
    for name in ("key_pages", "value_pages", "key_scale", "value_scale"):
        assert_same_bits(getattr(views[0], name), getattr(views[1], name))
