"""append_kv with queries and rotary embedding: results, tracing, errors."""

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.numerics.quantize import quantize
from octavo.numerics.rotary import Rotary
from octavo.reference.paged import append_kv as reference
from octavo.reference.qkv import rotate
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import PagedCase
from octavo.testing.inputs import Draw, make_paged_view

# The compiler's own imports use what torch has deprecated; which ones depends on the version.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

PAGES = ("key_pages", "value_pages", "key_scale", "value_scale")
SLOTS = torch.tensor([3, -1, 70])


def tables(rows=3, half=32, **options):
    angle = torch.rand(rows, half) * 6
    return Rotary(angle.cos(), angle.sin(), **options)


def draw():
    """Query, key and value of three tokens, views of one projection."""
    return Draw(0).normal(3, 8, 64, dtype=torch.bfloat16).split([4, 2, 2], dim=1)


@pytest.mark.parametrize("dtype", [E4M3.dtype, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_keys_and_queries_are_turned(is_interleaved, dtype):
    case = PagedCase(dtype=dtype)
    ours, theirs = make_paged_view(case), make_paged_view(case)
    query, key, value = draw()
    rotary = tables(half=20, is_interleaved=is_interleaved)
    turned = ops.append_kv(ours, key, value, SLOTS, query=query, rotary=rotary)
    assert ops.append_kv(theirs, rotate(key, rotary), value, SLOTS) is None
    for name in PAGES:
        assert_same_bits(getattr(ours, name), getattr(theirs, name))
    assert_same_bits(turned, rotate(query, rotary).bfloat16())  # of padding, too


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_queries_for_prefill_are_fp8(shape):
    query, key, value = draw()
    scale = torch.full(shape, 0.01)
    rotary = tables()
    turned = ops.append_kv(
        make_paged_view(PagedCase()),
        key,
        value,
        SLOTS,
        query=query,
        rotary=rotary,
        q_scale=scale,
    )
    granularity = PerHead() if shape else PerTensor()
    assert_same_bits(turned, quantize(rotate(query, rotary), granularity, scale=scale).data)


def test_queries_without_a_turn_are_copied():
    query, key, value = draw()
    turned = ops.append_kv(make_paged_view(PagedCase()), key, value, SLOTS, query=query)
    assert_same_bits(turned, query.contiguous())
    assert turned.is_contiguous()
    assert turned.data_ptr() != query.data_ptr()


def test_scales_per_token_are_those_of_turned_keys():
    case = PagedCase(granularity=PerToken())
    ours, theirs = make_paged_view(case), make_paged_view(case)
    query, key, value = draw()
    rotary = tables()
    ops.append_kv(ours, key, value, SLOTS, rotary=rotary)
    reference(theirs, rotate(key, rotary), value, SLOTS)
    for name in PAGES:
        assert_same_bits(getattr(ours, name), getattr(theirs, name))
    scale = quantize(rotate(key, rotary), PerToken()).scale
    assert_same_bits(ours.key_scale[0, :, 3], scale[0])


def call(**changes):
    query, key, value = draw()
    view = make_paged_view(PagedCase())
    good = {"view": view, "key": key, "value": value, "slots": SLOTS, "query": query}
    return ops.append_kv(**(good | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"query": torch.zeros(2, 4, 64)},
            r"query of shape \[3, num_heads, 64\], got \[2, 4, 64\]",
        ),
        (
            {"query": torch.zeros(3, 4, 32)},
            r"query of shape \[3, num_heads, 64\], got \[3, 4, 32\]",
        ),
        ({"query": torch.zeros(3, 64)}, r"query of shape \[3, num_heads, 64\], got \[3, 64\]"),
        ({"query": torch.zeros(3, 3, 64)}, "a multiple of the KV heads, got 3 and 2"),
        ({"query": torch.zeros(3, 4, 64).to(E4M3.dtype)}, "query in bfloat16, float16 or float32"),
        ({"query": torch.zeros(3, 4, 64).to("meta")}, "query on cpu like pages"),
        ({"query": None, "q_scale": torch.ones(())}, "q_scale quantizes the query"),
        ({"q_scale": torch.ones(2)}, r"query \[3, 4, 64\] needs a float32 scale of shape \[4\]"),
        ({"q_scale": torch.ones(()).double()}, "needs a float32 scale"),
        ({"saturated": torch.zeros(2)}, r"saturated as contiguous int64 \[2\].*got torch.float32"),
        ({"saturated": torch.zeros(3, dtype=torch.int64)}, r"got torch.int64 \[3\]"),
        ({"saturated": torch.zeros(2, 2, dtype=torch.int64)[:, 0]}, r"with strides \[2\]"),
        ({"saturated": torch.zeros(2, dtype=torch.int64, device="meta")}, "saturated on cpu like"),
        ({"rotary": tables(2)}, "rows divide the 3 tokens, got 2 rows"),
        ({"rotary": tables(3, 33)}, "at most head_dim / 2 = 32 columns, got 33"),
        ({"rotary": Rotary(*(torch.ones(3, 4).to("meta"),) * 2)}, "cos on cpu like key"),
        ({"rotary": Rotary(*(torch.ones(3, 4).double(),) * 2)}, "cos and sin in bfloat16"),
    ],
)
def test_wrong_calls_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        call(**changes)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the operators of octavo that a call uses, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "octavo":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [
        {"rotary": tables()},
        {"q_scale": torch.ones(4)},
        {"q_scale": torch.ones(4), "query": torch.ones(4, 3, 64).transpose(0, 1)},
        {"query": None, "rotary": tables()},
    ],
    ids=lambda options: "-".join(options),
)
def test_fake_results_have_the_same_strides(options):
    with Calls() as calls:
        call(**options)
    ((operator, args),) = calls.found
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(operator, args, test_utils=checks)


def test_counts_are_added_up_when_compiled():
    torch._dynamo.reset()

    def step(view, key, value, slots, saturated):
        ops.append_kv(view, key * 1e4, value, slots, saturated=saturated)
        return saturated * 2

    counts = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        view = make_paged_view(PagedCase())
        _, key, value = draw()
        saturated = torch.tensor([5, 7])
        for _ in range(2):
            doubled = run(view, key, value, SLOTS, saturated)
        assert doubled.tolist() == [2 * n for n in saturated.tolist()]
        counts.append(saturated.tolist())
    assert counts[0] == counts[1]
    assert counts[0][0] > 5 and counts[0][1] == 7


def test_compiled():
    torch._dynamo.reset()

    def step(view, query, key, value, slots, cos, sin):
        turned = ops.append_kv(view, key, value, slots, query=query + 1, rotary=Rotary(cos, sin))
        return turned * 2

    rotary = tables()
    results, views = [], []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        view = make_paged_view(PagedCase(granularity=PerToken()))
        results.append(run(view, *draw(), SLOTS, rotary.cos, rotary.sin))
        views.append(view)
    assert_same_bits(*results)
    for name in PAGES:
        assert_same_bits(*(getattr(view, name) for view in views))


def test_queries_that_require_a_gradient():
    """Pages stay out of the graph; the turned queries say that there is no gradient."""
    query, key, value = draw()
    turned = call(query=query.float().requires_grad_(), rotary=tables())
    assert turned.requires_grad
    with torch.no_grad():
        assert not call(query=query.float().requires_grad_()).requires_grad
