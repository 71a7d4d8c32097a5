"""quantize_qkv with rotary embedding and transposed values: results, strides, tracing, errors."""

import copy

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.formats import E4M3, E5M2
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import quantize
from octavo.numerics.rotary import Rotary
from octavo.reference.qkv import normalize, restore_values, rotate, transpose_values
from octavo.testing.asserts import assert_same_bits
from octavo.testing.inputs import Draw, cumulative

# The compiler's own imports use what torch has deprecated; which ones depends on the version.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def draw(*outer, heads=(4, 2, 2), head_dim=72, dtype=torch.bfloat16):
    """q, k and v as views of one projection."""
    joint = Draw(0).normal(*outer, sum(heads), head_dim, dtype=dtype)
    return joint.split(list(heads), dim=-2)


def tables(rows, half=36, **options):
    angle = torch.rand(rows, half) * 6
    return Rotary(angle.cos(), angle.sin(), **options)


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_queries_and_keys_are_turned_first(is_interleaved, granularity):
    q, k, v = draw(2, 5)
    rotary = tables(5, 20, is_interleaved=is_interleaved)
    result = ops.quantize_qkv(q, k, v, rotary=rotary, granularity=granularity)
    for name, x in (("q", rotate(q, rotary)), ("k", rotate(k, rotary)), ("v", v)):
        expected = quantize(x, granularity)
        assert_same_bits(getattr(result, name), expected.data)
        assert_same_bits(getattr(result.scales, name), expected.scale)


def norms(streams=1, head_dim=72, **options):
    q, k = torch.rand(2, streams, head_dim) + 0.5
    return QkNorm(q, k, 1e-6, **options)


@pytest.mark.parametrize("granularity", [PerTensor(), PerHead()], ids=str)
def test_queries_and_keys_are_normalized_before_they_are_turned(granularity):
    q, k, v = draw(2, 5)
    rotary, norm = tables(5, 20), norms(2, num_first=3)
    result = ops.quantize_qkv(q, k, v, norm=norm, rotary=rotary, granularity=granularity)
    for name, x, weight in (("q", q, norm.q), ("k", k, norm.k)):
        first = torch.nn.functional.rms_norm(x[:, :3].float(), (72,), weight[0], norm.eps)
        second = torch.nn.functional.rms_norm(x[:, 3:].float(), (72,), weight[1], norm.eps)
        both = torch.cat([first, second], dim=1)
        torch.testing.assert_close(normalize(x, weight, norm.eps, 3), both)
        expected = quantize(rotate(normalize(x, weight, norm.eps, 3), rotary), granularity)
        assert_same_bits(getattr(result, name), expected.data)
        assert_same_bits(getattr(result.scales, name), expected.scale)
    assert_same_bits(result.v, quantize(v, granularity).data)


def test_turned_values_go_into_the_history():
    q, k, v = draw(2, 5, dtype=torch.float32)
    q[0, 0, 0, 0] = torch.inf
    rotary = tables(10)
    history = tuple(AmaxHistory() for _ in "qkv")
    ops.quantize_qkv(q, k, v, rotary=rotary, history=history)
    expected = rotate(k, rotary).abs().amax()
    assert_same_bits(history[1].amax(), expected)
    assert int(history[0].num_nonfinite) == 2  # both values of the pair
    assert_same_bits(history[2].amax(), v.abs().amax())


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_transposed_values(fmt):
    q, k, v = draw(2, 19)
    rows = ops.quantize_qkv(q, k, v, fmt=fmt)
    result = ops.quantize_qkv(q, k, v, fmt=fmt, value_layout="transposed")
    assert (rows.value_layout, result.value_layout) == ("rows", "transposed")
    assert_same_bits(result.v, transpose_values(rows.v))
    assert_same_bits(restore_values(result.v, 19), rows.v)
    assert result.v.shape == (2, 2, 72, 32)
    assert result.v.is_contiguous()
    for name in "qk":
        assert_same_bits(getattr(result, name), getattr(rows, name))


def test_packed_transposed_values():
    q, k, v = draw(21)
    ends = cumulative((5, 0, 14))
    scales = QkvScales(*(torch.full((heads,), 0.02) for heads in (4, 2, 2)))
    rows = ops.quantize_qkv(q, k, v, scales)
    result = ops.quantize_qkv(q, k, v, scales, value_layout="transposed", cu_seqlens=ends)
    assert_same_bits(result.v, transpose_values(rows.v, ends))
    assert result.v.shape == (2, 72, 32 + 3 * 16)
    assert_same_bits(restore_values(result.v, 21, ends)[:19], rows.v[:19])


@pytest.mark.parametrize(("head_dim", "stride"), [(72, 80), (64, 64), (128, 128), (33, 48)])
def test_heads_are_aligned(head_dim, stride):
    q, k, v = draw(2, 3, head_dim=head_dim)
    for result in (
        ops.quantize_qkv(q, k, v),
        ops.quantize_qkv(q, k, v, QkvScales.ones()),
    ):
        assert result.q.stride() == (3 * 4 * stride, 4 * stride, stride, 1)
        for x in (result.k, result.v):
            assert x.stride() == (3 * 2 * stride, 2 * stride, stride, 1)


@pytest.mark.parametrize("lengths", [(1, 5), (5, 1), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"value_layout": "transposed"}], ids=str)
def test_first_is_concatenated(options, lengths):
    first, qkv = (draw(2, length) for length in lengths)
    whole = [torch.cat(both, dim=1) for both in zip(first, qkv, strict=True)]
    ours, theirs = (tuple(AmaxHistory((n,)) for n in (4, 2, 2)) for _ in range(2))
    options = options | {"rotary": tables(6 if 0 not in lengths else 3), "granularity": PerHead()}
    result = ops.quantize_qkv(*qkv, first=first, history=ours, **options)
    expected = ops.quantize_qkv(*whole, history=theirs, **options)
    static = ops.quantize_qkv(
        *qkv, expected.scales, first=first, **(options | {"granularity": None})
    )
    for name, one, other in zip("qkv", ours, theirs, strict=True):
        assert_same_bits(getattr(result, name), getattr(expected, name))
        assert_same_bits(getattr(static, name), getattr(expected, name))
        assert_same_bits(getattr(result.scales, name), getattr(expected.scales, name))
        assert_same_bits(one.values, other.values)


def test_norms_of_one_and_of_two_streams_with_first():
    first, qkv = draw(2, 3), draw(2, 5)
    whole = [torch.cat(both, dim=1) for both in zip(first, qkv, strict=True)]
    for norm in (norms(1), norms(2, num_first=3)):
        result = ops.quantize_qkv(*qkv, first=first, norm=norm)
        expected = ops.quantize_qkv(*whole, norm=norm)
        for name in "qkv":
            assert_same_bits(getattr(result, name), getattr(expected, name))


def call(**changes):
    q, k, v = draw(6)
    return ops.quantize_qkv(**({"q": q, "k": k, "v": v} | changes))


FOUR = dict(zip("qkv", draw(2, 3), strict=True))
FIRST = draw(2, 4)


def with_first(**changes):
    """FOUR behind FIRST, with other tensors in it."""
    return FOUR | {"first": tuple(changes.get(n, x) for n, x in zip("qkv", FIRST, strict=True))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value_layout": "columns"}, "value_layout rows or transposed, got 'columns'"),
        ({"value_layout": "transposed"}, r"got \[6, 2, 72\] without cu_seqlens"),
        (
            FOUR | {"value_layout": "transposed", "cu_seqlens": cumulative((3,))},
            r"got \[2, 3, 2, 72\] with cu_seqlens",
        ),
        ({"cu_seqlens": cumulative((6,))}, "leave them out for rows"),
        (
            {"value_layout": "transposed", "cu_seqlens": torch.tensor([0, 6])},
            "cu_seqlens as int32 .*got torch.int64",
        ),
        (
            {"value_layout": "transposed", "cu_seqlens": cumulative((6,)).to("meta")},
            "cu_seqlens on cpu like q, got it on meta",
        ),
        ({"rotary": tables(4)}, "rows divide the 6 tokens, got 4 rows"),
        ({"rotary": tables(6, 40)}, "at most head_dim / 2 = 36 columns, got 40"),
        (
            {"rotary": tables(3), "k": draw(4)[1], "v": draw(4)[2]},
            "rows divide the 4 tokens, got 3 rows",
        ),
        ({"rotary": Rotary(*(torch.ones(6, 4).to("meta"),) * 2)}, "cos on cpu like q"),
        ({"rotary": Rotary(*(torch.ones(6, 4).double(),) * 2)}, "cos and sin in bfloat16"),
        (
            {"norm": norms(2), "value_layout": "transposed", "cu_seqlens": cumulative((2, 4))},
            "two streams are for dense sequences",
        ),
        ({"norm": norms(2), "num_tokens": cumulative((6,))[-1:]}, "two streams are for dense"),
        ({"norm": norms(head_dim=64)}, "norm weights of 72 values, got 64"),
        ({"norm": norms(2, num_first=7)}, "num_first of at most 6 tokens, got 7"),
        ({"norm": QkNorm(*torch.ones(2, 1, 72).double(), 1e-6)}, "norm weights in bfloat16"),
        ({"norm": QkNorm(*torch.ones(2, 1, 72, device="meta"), 1e-6)}, "norm on cpu like q"),
        ({"first": FIRST}, r"expected q \[batch, length, heads, head_dim\] behind first, got \[6,"),
        (FOUR | {"first": FIRST[:2]}, "expected first as q, k and v, got 2 tensors"),
        (with_first(q=draw(2, 4)[1]), r"q of first as q but for its length, \[2, 3, 4, 72\], got"),
        (with_first(k=draw(1, 4)[1]), r"k of first as k but .* got \[1, 4, 2, 72\]"),
        (with_first(v=draw(4)[2]), r"v of first as v but .* got \[4, 2, 72\]"),
        (with_first(k=FIRST[1].half()), "k of first in torch.bfloat16 like k, got torch.float16"),
        (with_first(v=FIRST[2].to("meta")), "v of first on cpu like v, got it on meta"),
        (with_first(v=draw(2, 5)[2]), r"first of the same tokens, got lengths \[4, 4, 5\]"),
        (
            with_first() | {"q": draw(2, 5)[0]},
            r"q, k and v behind first of the same tokens, got lengths \[5, 3, 3\]",
        ),
        (with_first() | {"norm": norms(2, num_first=3)}, "the length of first, 4, got 3"),
        (with_first() | {"rotary": tables(3)}, "rows divide the 14 tokens, got 3 rows"),
        (
            {
                "first": FIRST,
                "value_layout": "transposed",
                "cu_seqlens": cumulative((2, 4)),
            },
            "first stands in front of dense sequences: leave cu_seqlens and num_tokens out",
        ),
        ({"first": FIRST, "num_tokens": cumulative((6,))[-1:]}, "first stands in front of dense"),
        ({"history": (AmaxHistory(),) * 3}, "got one of them twice"),
        (FOUR | {"num_tokens": cumulative((6,))[-1:]}, "num_tokens is for packed q, k and v"),
        ({"num_tokens": cumulative((6,))}, r"expected num_tokens as int32 \[1\], got"),
        ({"num_tokens": torch.tensor([6])}, r"expected num_tokens as int32 \[1\], got"),
        ({"num_tokens": cumulative((6,))[-1:].to("meta")}, "num_tokens on cpu like q"),
        (
            {"num_tokens": cumulative((6,))[-1:], "scales": QkvScales(*(torch.ones(()),) * 3)},
            "leave num_tokens out",
        ),
        ({"k": draw(6, head_dim=64)[1], "v": draw(6, head_dim=64)[2]}, "one head_dim, got 72 and"),
    ],
)
def test_wrong_calls_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        call(**changes)


def test_a_history_that_is_too_long_is_refused():
    history = tuple(AmaxHistory(length=length) for length in (16, 16, 2**16))
    with pytest.raises(ConfigError, match="history of v of at most 65535 passes, got 65536"):
        call(history=history)
    call(history=tuple(AmaxHistory(length=2**16 - 1) for _ in "qkv"))


def test_a_history_whose_values_are_strided_is_refused():
    history = tuple(AmaxHistory((heads,)) for heads in (4, 2, 2))
    history[1].values = torch.zeros(2, 16).t()
    with pytest.raises(ConfigError, match="contiguous values in the history of k"):
        call(history=history, granularity=PerHead())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.ones(72)}, r"1 or 2 streams, head_dim\], got \[72\]"),
        ({"q": torch.ones(3, 72), "k": torch.ones(3, 72)}, r"got \[3, 72\]"),
        ({"k": torch.ones(1, 72).double()}, "of one dtype, got torch.float32 and torch.float64"),
        ({"eps": -1.0}, "finite eps above 0, got -1.0"),
        ({"eps": 0.0}, "finite eps above 0, got 0.0"),
        ({"eps": float("nan")}, "finite eps"),
        ({"num_first": 1}, "0 for one stream, got 1"),
        ({"num_first": -1}, "num_first of 0 or more"),
    ],
)
def test_wrong_norms_are_refused(changes, message):
    given = {"q": torch.ones(1, 72), "k": torch.ones(1, 72), "eps": 1e-6} | changes
    with pytest.raises(ConfigError, match=message):
        QkNorm(**given)


OPTIONS = {
    "norm": {"norm": norms(2, num_first=2), "rotary": tables(6)},
    "rotary": {"rotary": tables(6)},
    "interleaved": {"rotary": tables(6, 10, is_interleaved=True)},
    "packed": {"value_layout": "transposed", "cu_seqlens": cumulative((2, 3))},
    "static": {"scales": QkvScales.ones(), "rotary": tables(6)},
    "dense": FOUR | {"value_layout": "transposed", "granularity": PerHead()},
    "first": with_first() | {"scales": QkvScales.ones(), "norm": norms(2, num_first=4)},
}


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the operators of octavo that a call uses, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "octavo":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


SLOW = {"first": pytest.mark.slow}  # test_register.py has a call with first, too


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in OPTIONS])
def test_fake_results_have_the_same_strides(name):
    with Calls() as calls:
        call(**OPTIONS[name])
    ((operator, args),) = calls.found
    torch.library.opcheck(operator, args)


def test_compiled():
    torch._dynamo.reset()
    history = tuple(AmaxHistory() for _ in "qkv")

    def function(q, k, v, cos, sin, ends, history):
        result = ops.quantize_qkv(
            q,
            k,
            v,
            rotary=Rotary(cos, sin),
            history=history,
            value_layout="transposed",
            cu_seqlens=ends,
        )
        return result.q.float() + 1, result.v.float(), result.scales.k

    q, k, v = draw(6)
    rotary, ends = tables(6), cumulative((2, 3))
    args = (q, k, v, rotary.cos, rotary.sin, ends)
    ours, theirs = copy.deepcopy(history), history
    run = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for x, expected in zip(run(*args, ours), function(*args, theirs), strict=True):
            assert_same_bits(x, expected)
    assert int(ours[0].num_passes) == 2


@pytest.mark.slow
def test_compiled_with_first():
    """Streams of several lengths in one graph."""
    torch._dynamo.reset()

    def function(qkv, first, weight):
        norm = QkNorm(weight, weight, 1e-6, first[0].shape[1])
        result = ops.quantize_qkv(*qkv, first=first, norm=norm, value_layout="transposed")
        return result.q.float() + 1, result.v.float(), result.scales.k

    run = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((3, 5), (4, 6)):
        first, qkv = (draw(2, length) for length in lengths)
        args = (qkv, first, torch.rand(2, 72) + 0.5)
        for x, expected in zip(run(*args), function(*args), strict=True):
            assert_same_bits(x, expected)
