"""Calls whose signature was checked before: the same results and errors, with less host work."""

import gc
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.errors import ConfigError
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerChannel, PerToken
from octavo.numerics.qkv import QkvScales, QuantizedQkv
from octavo.numerics.quantize import Quantized
from octavo.ops.matvec import MatvecArguments
from octavo.ops.select import MAX_PREPARED, PREPARED, forget_calls, remember
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import PagedCase
from octavo.testing.inputs import make_paged_view
from octavo_testkit.counting import num_function_calls
from octavo_testkit.op_calls import CALLS, Calls


@pytest.fixture(autouse=True)
def nothing_prepared():
    forget_calls()
    yield
    forget_calls()


def num_remembered() -> int:
    """Signatures of calls that pass torch's dispatcher by."""
    return sum(state != "dispatched" for _, state, *_ in PREPARED)


def tensors_of(result) -> list[Tensor]:
    """All tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    parts = result if isinstance(result, tuple) else getattr(result, "__dict__", {}).values()
    return [x for one in parts for x in tensors_of(one)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_later_calls_give_the_same_bits(name, mode):
    def run():
        torch.manual_seed(0)
        return tensors_of(CALLS[name]())

    expected = run()  # gradients are on: nothing is remembered
    assert not num_remembered()
    with mode():
        for _ in range(3):
            found = run()
            assert num_remembered() == 1
            for ours, theirs in zip(found, expected, strict=True):
                assert_same_bits(ours, theirs)
                assert ours.stride() == theirs.stride()


@pytest.fixture
def checks(monkeypatch):
    """The calls of matvec whose arguments were checked."""
    seen, check = [], MatvecArguments.check

    def counting(self):
        seen.append(self)
        check(self)

    monkeypatch.setattr(MatvecArguments, "check", counting)
    return seen


def test_a_signature_is_checked_once(checks):
    x, weight = torch.ones(40), torch.ones(6, 40)
    with torch.no_grad():
        for _ in range(3):
            ops.matvec(x, weight)
        assert len(checks) == 1
        ops.matvec(torch.zeros(40), weight)  # other values
        assert len(checks) == 1


class Subclass(Tensor):
    """Torch calls its methods for it: nobody else may decide what happens to it."""


OTHERS = {
    "shape": lambda x: torch.ones(1, 40),
    "dtype": lambda x: x.bfloat16(),
    "stride": lambda x: torch.ones(80)[::2],
    "subclass": lambda x: x.as_subclass(Subclass),
    "negated": lambda x: torch.ones(40, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_signature_is_checked(checks, name):
    x, weight = torch.ones(40), torch.ones(6, 40)
    with torch.no_grad():
        ops.matvec(x, weight)
        other = OTHERS[name](x)
        ops.matvec(other, weight.to(other.dtype))
    assert len(checks) == 2


def test_wrong_arguments_raise_after_good_ones():
    x, weight = torch.ones(40), torch.ones(6, 40)
    with torch.no_grad():
        for _ in range(2):
            ops.matvec(x, weight)
        for wrong in (torch.ones(41), torch.ones(40).long(), torch.ones(2, 40)):
            for _ in range(2):  # a signature that was refused is not remembered
                with pytest.raises(ConfigError, match="expected .*x"):
                    ops.matvec(wrong, weight)
        with pytest.raises(ConfigError, match="expected impl for matvec"):
            ops.matvec(x, weight, impl="none")


def test_nobody_who_listens_misses_a_call():
    x, weight = torch.ones(40), torch.ones(6, 40)

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with torch.no_grad():
        for _ in range(2):
            ops.matvec(x, weight)
        with Calls() as calls:
            ops.matvec(x, weight)
        assert [str(operator) for operator, _ in calls.found] == ["octavo.matvec.default"]
        with Functions():
            ops.matvec(x, weight)
    assert "octavo.matvec.default" in map(str, seen)


def test_a_gradient_is_refused_after_calls_without():
    x, weight = torch.ones(40, requires_grad=True), torch.ones(6, 40)
    with torch.no_grad():
        for _ in range(2):
            assert not ops.matvec(x, weight).requires_grad
    assert ops.matvec(x, weight).requires_grad


def test_negated_memory_is_never_given_to_an_implementation():
    seen = []

    def run(x, weight, bias):
        seen.append(x.is_neg())
        return weight @ x

    ops.register_impl("matvec", "looking", run)
    try:
        with torch.no_grad():
            for _ in range(3):
                x = torch.randn(4, dtype=torch.complex64).conj().imag
                ops.matvec(x, torch.ones(3, 4), impl="looking")
    finally:
        ops.unregister_impl("matvec", "looking")
    assert seen == [False] * 3


def test_autocast_reaches_no_implementation():
    x, weight = torch.randn(40), torch.randn(6, 40)
    with torch.no_grad():
        expected = [ops.matvec(x, weight) for _ in range(2)][1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same_bits(ops.matvec(x, weight), expected)


def test_shapes_are_found_without_data():
    fake = torch._subclasses.FakeTensorMode()
    with torch.no_grad():
        ops.matvec(torch.ones(40), torch.ones(6, 40))
        with fake:
            for _ in range(2):
                out = ops.matvec(torch.ones(40), torch.ones(6, 40))
                assert isinstance(out, torch._subclasses.FakeTensor)
        for _ in range(2):
            out = ops.matvec(torch.ones(40, device="meta"), torch.ones(6, 40, device="meta"))
            assert out.is_meta
    assert num_remembered() == 1


def test_nothing_is_remembered_where_the_import_was_traced():
    """As where a model imports octavo while its shapes are found on fake tensors."""
    code = """
import torch
with torch._subclasses.FakeTensorMode():
    from octavo import ops
    from octavo.ops.select import PREPARED
    with torch.no_grad():
        for _ in range(2):
            ops.matvec(torch.ones(4), torch.ones(3, 4))
with torch.no_grad():
    for _ in range(2):
        assert float(ops.matvec(torch.ones(4), torch.ones(3, 4))[0]) == 4
print(sum(state != 'dispatched' for _, state, *_ in PREPARED))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr


def test_a_new_implementation_is_asked_at_once():
    x, weight = torch.ones(40), torch.ones(6, 40)
    with torch.no_grad():
        ops.matvec(x, weight)
        ops.register_impl(
            "matvec", "mine", lambda x, weight, bias: torch.full((6,), 7.0), is_automatic=True
        )
        try:
            assert ops.matvec(x, weight)[0] == 7
        finally:
            ops.unregister_impl("matvec", "mine")
        assert ops.matvec(x, weight)[0] == 40


def test_threads_share_what_was_checked(checks):
    """Whether gradients are on is a thread's own."""
    x, weight, found = torch.ones(40), torch.ones(6, 40), []

    def work():
        found.append(ops.matvec(x, weight))
        with torch.inference_mode():
            found.append(ops.matvec(x, weight))

    with torch.inference_mode():
        ops.matvec(x, weight)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(checks) == 2  # the first, and the one with gradients
    assert all(int(out[0]) == 40 for out in found)


def test_one_history_twice_is_refused_after_three():
    q = torch.ones(1, 5, 2, 16)
    three = [AmaxHistory() for _ in range(3)]
    with torch.no_grad():
        for _ in range(2):
            ops.quantize_qkv(q, q, q, history=tuple(three))
        with pytest.raises(ConfigError, match="one of them twice"):
            ops.quantize_qkv(q, q, q, history=(three[0], three[0], three[2]))
    assert [int(one.num_passes) for one in three] == [2, 2, 2]


@pytest.mark.parametrize("number", [2, 4])
def test_other_numbers_of_tensors_are_refused_after_three(number):
    q = torch.ones(1, 5, 2, 16)
    with torch.no_grad():
        for _ in range(2):
            ops.quantize_qkv(q, q, q, first=(q, q, q))
        with pytest.raises(
            ConfigError, match=f"expected first as q, k and v, got {number} tensors"
        ):
            ops.quantize_qkv(q, q, q, first=(q,) * number)


def test_a_plan_of_another_step_is_refused_after_a_good_one():
    view = make_paged_view(PagedCase())
    q = torch.randn(5, 1, 4, 64)
    plan = ops.plan_decode(view, num_heads=4)
    with torch.no_grad():
        expected = ops.decode_attention(q, view)
        for _ in range(2):
            assert_same_bits(ops.decode_attention(q, view, plan=plan), expected)
        with pytest.raises(ConfigError, match="plan made for impl='triton'"):
            ops.decode_attention(q, view, plan=plan, impl="triton")


def test_plans_of_other_steps_are_made_anew():
    view = make_paged_view(PagedCase())
    steps = [{"num_heads": 4}, {"num_heads": 8}, {"num_heads": 4, "q_len": 2}]
    for _ in range(2):
        found = [ops.plan_decode(view, **step).settings for step in steps]
        assert [one.q_len for one in found] == [1, 1, 2]
        assert len(set(found)) >= 2
        with pytest.raises(ConfigError, match="expected 1 to 4 query tokens, got 5"):
            ops.plan_decode(view, num_heads=4, q_len=5)
        with pytest.raises(ConfigError, match="multiple of the KV heads"):
            ops.plan_decode(view, num_heads=view.num_kv_heads + 1)


def test_what_is_remembered_costs_the_garbage_collector_little():
    """A server sees prompts of many lengths; the collector does not walk tuples of plain values."""
    with torch.inference_mode():
        for length in range(1, 101):
            q = torch.ones(1, length, 2, 16)
            ops.attention(q, q, q, AttentionSpec(causal=True))
    assert len(PREPARED) == 100
    for _ in range(3):  # one depth of tuples after the other
        gc.collect()
    walked = [part for signature in PREPARED for part in signature if gc.is_tracked(part)]
    assert {type(part) for part in walked} == {AttentionSpec} and len(walked) == 100
    assert len({id(prepared) for prepared in PREPARED.values()}) == 1


def test_signatures_do_not_pile_up():
    for number in range(MAX_PREPARED + 3):
        remember(("test", number), print)
    assert len(PREPARED) == 3


@contextmanager
def stub(op: str, result):
    """An implementation that only gives back what it is told to."""
    ops.register_impl(op, "stub", lambda *args, **options: result)
    try:
        yield
    finally:
        ops.unregister_impl(op, "stub")


def stubbed_calls():
    """Each op, what its stub gives back, and a call by it."""
    x = torch.randn(1, 5, 4, 64, dtype=torch.bfloat16)
    x8, one = x.to(E4M3.dtype), torch.ones(())
    scales, spec = QkvScales(one, one, one), AttentionSpec()
    qkv = QuantizedQkv(x8, x8, x8, scales)
    weight = Quantized(torch.ones(64, 64).to(E4M3.dtype), torch.ones(64), PerChannel())
    view, slots = make_paged_view(PagedCase()), torch.arange(3)
    key, q = torch.randn(3, view.num_kv_heads, 64), torch.randn(5, 1, 4, 64)
    impl = {"impl": "stub"}
    return {
        "append_kv": (None, lambda: ops.append_kv(view, key, key, slots, **impl)),
        "attention": ((x, x), lambda: ops.attention(x8, x8, x8, spec, scales, **impl)),
        "decode_attention": (q, lambda: ops.decode_attention(q, view, **impl)),
        "quantize_qkv": (qkv, lambda: ops.quantize_qkv(x, x, x, **impl)),
        "quantize_qkv static": (qkv, lambda: ops.quantize_qkv(x, x, x, scales, **impl)),
        "scaled_mm": (x, lambda: ops.scaled_mm(x[0, 0], weight, activation=PerToken(), **impl)),
    }


# A first call makes 65 to 130 function calls; checks, selection and dispatch are most of them.
MAX_FUNCTION_CALLS = 42


@pytest.mark.parametrize("name", stubbed_calls())
def test_the_host_work_of_a_checked_call_is_bounded(name):
    """Without the implementation's own. Functions are counted: time would vary with the machine."""
    result, call = stubbed_calls()[name]
    with stub(name.split()[0], result), torch.inference_mode():
        first = num_function_calls(call)
        assert num_function_calls(call) <= MAX_FUNCTION_CALLS < first
