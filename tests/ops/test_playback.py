"""Calls that are played from a tape: the same bits as other calls, or no tape at all."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.kernels.listening import Launch, listener
from octavo.numerics.amax import AmaxHistory
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerBlock, PerChannel, PerHead, PerTensor, PerToken
from octavo.numerics.qk_norm import QkNorm
from octavo.numerics.rotary import Rotary
from octavo.ops import register
from octavo.ops.playback import tape_call
from octavo.ops.register import Prepared
from octavo.ops.select import PREPARED, forget_calls
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

FP8 = E4M3.dtype


@pytest.fixture(autouse=True)
def nothing_remembered():
    forget_calls()
    yield
    forget_calls()


def flat(value) -> list[Tensor]:
    """All tensors in a result, or in arguments, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, tuple | list):
        value = list(getattr(value, "__dict__", {}).values())
    return [x for one in value for x in flat(one)]


def draw_qkv(draw: Draw, head_dim: int, *, is_joint: bool = False) -> dict[str, Tensor]:
    heads = {"q": 4, "k": 2, "v": 2}
    if is_joint:
        joint = draw.normal(2, 70, 8, head_dim, dtype=torch.bfloat16)
        return dict(zip(heads, joint.split(list(heads.values()), dim=2), strict=True))
    return {n: draw.normal(2, 70, num, head_dim, dtype=torch.bfloat16) for n, num in heads.items()}


def quantize_qkv(seed: int, head_dim: int = 64, **options):
    draw = Draw(seed, "cuda")
    given = draw_qkv(draw, head_dim, is_joint=options.pop("is_joint", False))
    if options.pop("has_rotary", False):
        angle = draw.normal(140, head_dim // 2)
        given["rotary"] = Rotary(angle.cos(), angle.sin())
    if options.pop("has_norm", False):
        given["norm"] = QkNorm(*draw.normal(2, 1, head_dim, dtype=torch.bfloat16), 1e-6)
    if options.pop("has_history", False):
        given["history"] = tuple(AmaxHistory().cuda() for _ in "qkv")
    if options.pop("is_static", False):
        known = ops.quantize_qkv(given["q"], given["k"], given["v"], impl="reference")
        given["scales"] = known.scales
    return given | options, ops.quantize_qkv


def attention(seed: int, case: AttentionCase, **options):
    names = ("return_lse", "out_dtype", "impl")
    call = {name: options.pop(name) for name in names if name in options}
    inputs = make_attention_inputs(case, seed=seed, device="cuda", **options)
    return inputs | call, ops.attention


def hopper_attention(seed: int, head_dim: int, **options):
    draw = Draw(seed, "cuda")
    qkv = ops.quantize_qkv(**draw_qkv(draw, head_dim), value_layout="transposed")
    given = {"q": qkv.q, "k": qkv.k, "v": qkv.v, "scales": qkv.scales, "value_layout": "transposed"}
    return given | options, ops.attention


def append_kv(seed: int, **options):
    draw = Draw(seed, "cuda")
    flags = {n: options.pop(n, False) for n in ("has_query", "is_fp8_query", "counts")}
    view = make_paged_view(PagedCase(**options), seed=seed, device="cuda")
    key, value = draw.normal(2, 3, 2, 64, dtype=torch.bfloat16)
    given = {"view": view, "key": key, "value": value}
    given["slots"] = torch.tensor([3, -1, 70], device="cuda")
    if flags["has_query"]:
        angle = draw.normal(3, 32)
        given["query"] = draw.normal(3, 4, 64, dtype=torch.bfloat16)
        given["rotary"] = Rotary(angle.cos(), angle.sin())
    if flags["is_fp8_query"]:
        given["q_scale"] = torch.ones((), device="cuda") / 100
    if flags["counts"]:
        given["saturated"] = torch.zeros(2, dtype=torch.int64, device="cuda")
    return given, ops.append_kv


def decode(seed: int, has_plan: bool = True, **options):
    inputs = make_decode_inputs(PagedCase(**options), seed=seed, device="cuda")
    if has_plan:
        inputs["plan"] = ops.plan_decode(
            inputs["view"], inputs["spec"], num_heads=inputs["q"].shape[2]
        )
    return inputs, ops.decode_attention


def scaled_mm(seed: int, rows: int, columns: int = 256, depth: int = 512, **options):
    draw = Draw(seed, "cuda")
    activation = options.pop("activation", PerToken())
    shape = (2, rows // 2, depth) if options.pop("is_batched", False) else (rows, depth)
    weight = ops.quantize(draw.normal(columns, depth), options.pop("weight", PerChannel()))
    given = {"a": draw.normal(*shape, dtype=torch.bfloat16), "b": weight, "activation": activation}
    if options.pop("is_static", False):
        given |= {"activation": PerTensor(), "scale": torch.ones((), device="cuda") / 90}
    if options.pop("has_bias", True):
        given["bias"] = draw.normal(columns, dtype=torch.bfloat16)
    return given | options, ops.scaled_mm


def quantize(seed: int, granularity, **options):
    x = Draw(seed, "cuda").normal(3, 70, 128, dtype=torch.bfloat16)
    return {"x": x, "granularity": granularity} | options, ops.quantize


def matvec(seed: int):
    draw = Draw(seed, "cuda")
    x, bias = draw.normal(512, dtype=torch.bfloat16), draw.normal(96, dtype=torch.bfloat16)
    return {"x": x, "weight": draw.normal(96, 512, dtype=torch.bfloat16), "bias": bias}, ops.matvec


def rotate(seed: int):
    draw = Draw(seed, "cuda")
    qkv, angle = draw_qkv(draw, 64), draw.normal(140, 32)
    given = {"q": qkv["q"], "k": qkv["k"], "rotary": Rotary(angle.cos(), angle.sin())}
    return given, ops.rotate_qk


def packed(seed: int, **options):
    return make_packed_inputs(PackedCase(), seed=seed, device="cuda", **options), ops.attention


def prefill(seed: int, **options):
    case = PagedCase(lengths=(5, 63, 64, 65, 130), q_lens=(2, 1, 63, 5, 64))
    return make_prefill_inputs(case, seed=seed, device="cuda", **options), ops.prefill_attention


def plan(seed: int):
    lengths = ((1, 63, 64, 65, 130), (130, 65, 1, 62, 64))[seed]  # as many pages in all
    return {"view": make_paged_view(PagedCase(lengths=lengths), device="cuda"), "num_heads": 4}, (
        ops.plan_decode
    )


def matmul(seed: int, case: MatmulCase):
    return make_matmul_inputs(case, seed=seed, device="cuda"), ops.scaled_mm


SMALL = AttentionCase(head_dim=64)
# name -> the arguments of a call, by a seed, and the op
CALLS = {
    "attention": lambda seed: attention(seed, SMALL),
    "attention-fp8": lambda seed: attention(seed, SMALL, dtype=FP8, return_lse=True),
    "attention-sinks": lambda seed: attention(
        seed, AttentionCase(has_sinks=True, spec=AttentionSpec(causal=True, window=9))
    ),
    "attention-mask": lambda seed: attention(seed, AttentionCase(has_key_mask=True)),
    "attention-64": lambda seed: hopper_attention(seed, 64),
    "attention-72": lambda seed: hopper_attention(seed, 72),
    "attention-128": lambda seed: hopper_attention(seed, 128, return_lse=True),
    "attention-triton": lambda seed: hopper_attention(seed, 64, impl="triton"),
    "attention-packed": lambda seed: packed(seed),
    "prefill": lambda seed: prefill(seed),
    "prefill-fp8": lambda seed: prefill(seed, dtype=FP8),
    "decode": lambda seed: decode(seed),
    "decode-sinks": lambda seed: decode(seed, has_sinks=True, granularity=PerHead()),
    "decode-bf16": lambda seed: decode(seed, dtype=torch.bfloat16),
    "decode-without-plan": lambda seed: decode(seed, has_plan=False),
    "append": lambda seed: append_kv(seed),
    "append-token": lambda seed: append_kv(seed, granularity=PerToken(), has_query=True),
    "append-query": lambda seed: append_kv(seed, has_query=True, is_fp8_query=True),
    "append-counts": lambda seed: append_kv(seed, counts=True),
    "plan": plan,
    "qkv": lambda seed: quantize_qkv(seed),
    "qkv-72": lambda seed: quantize_qkv(seed, 72, value_layout="transposed", is_joint=True),
    "qkv-history": lambda seed: quantize_qkv(seed, has_history=True, has_rotary=True),
    "qkv-static": lambda seed: quantize_qkv(seed, is_static=True, value_layout="transposed"),
    "qkv-norm": lambda seed: quantize_qkv(seed, has_norm=True, granularity=PerHead()),
    "quantize-tensor": lambda seed: quantize(seed, PerTensor()),
    "quantize-token": lambda seed: quantize(seed, PerToken()),
    "quantize-block": lambda seed: quantize(seed, PerBlock(1, 128)),
    "product-1": lambda seed: scaled_mm(seed, 1),
    "product-16": lambda seed: scaled_mm(seed, 16, is_batched=True, depth=4096),
    "product-128": lambda seed: scaled_mm(seed, 128),
    "product-128-tensor": lambda seed: scaled_mm(seed, 128, weight=PerTensor()),
    "product-static-16": lambda seed: scaled_mm(seed, 16, is_static=True),
    "product-static-128": lambda seed: scaled_mm(seed, 128, is_static=True, is_batched=True),
    "product-static-128-triton": lambda seed: scaled_mm(seed, 128, is_static=True, impl="triton"),
    "product-block": lambda seed: scaled_mm(
        seed, 128, activation=PerBlock(1, 128), weight=PerBlock(128, 128)
    ),
    "product-plain": lambda seed: scaled_mm(seed, 20, activation=None, has_bias=False),
    "product-fp8": lambda seed: matmul(seed, MatmulCase(depth=256, columns=128)),
    "matvec": matvec,
    "rotate": rotate,
}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLS)
def test_playbacks_give_the_same_bits_for_other_tensors(name, mode, monkeypatch):
    """What is compared too: arguments, into which some ops write."""
    make = CALLS[name]
    with mode():
        for seed in (0, 1):
            given, op = make(seed)
            expected = [flat(op(**given)), flat(given)]
            forget_calls()
            monkeypatch.setattr(register, "TAPE_AT", 1)
            first, _ = make(1 - seed)
            op(**first)
            op(**first)
            assert any(known.playback for known in PREPARED.values() if type(known) is Prepared)
            ours, op = make(seed)
            monkeypatch.setattr(register, "TAPE_AT", 0)  # nothing else is taped
            found = [flat(op(**ours)), flat(ours)]
            for mine, theirs in zip(found, expected, strict=True):
                for x, y in zip(mine, theirs, strict=True):
                    assert_same_bits(x, y)
                    assert x.stride() == y.stride()
            forget_calls()


@pytest.mark.gpu
def test_playbacks_are_captured_in_graphs():
    given, op = hopper_attention(0, 128)
    with torch.inference_mode():
        for _ in range(register.TAPE_AT + 2):
            expected = op(**given)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert_same_bits(op(**given), expected)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op(**given)
        given["q"].copy_(hopper_attention(1, 128)[0]["q"])
        graph.replay()
        assert_same_bits(out, op(**given))


@pytest.mark.gpu
def test_tensors_of_another_alignment_are_not_played():
    draw = Draw(0, "cuda")
    weight = ops.quantize(draw.normal(256, 512), PerChannel())
    memory = draw.normal(16 * 512 + 1, dtype=torch.bfloat16)
    aligned, other = memory[:-1].view(16, 512), memory[1:].view(16, 512)
    with torch.no_grad():
        expected = ops.scaled_mm(other.clone(), weight, activation=PerToken())
        for _ in range(register.TAPE_AT + 2):
            ops.scaled_mm(aligned, weight, activation=PerToken())
        assert any(known.playback for known in PREPARED.values())
        assert_same_bits(ops.scaled_mm(other, weight, activation=PerToken()), expected)


@pytest.mark.gpu
def test_one_tensor_in_two_places_and_then_two():
    q, k, v = (Draw(seed, "cuda").normal(1, 70, 4, 64, dtype=torch.bfloat16) for seed in range(3))
    with torch.no_grad():
        expected = flat(ops.quantize_qkv(q, k, v))
        forget_calls()
        for _ in range(register.TAPE_AT + 2):
            ops.quantize_qkv(q, q, q)
        for x, y in zip(flat(ops.quantize_qkv(q, k, v)), expected, strict=True):
            assert_same_bits(x, y)


def taped(run, *tensors):
    """What `run` gives for the tensors, and how it is played, if it is."""
    call = SimpleNamespace(**{f"x{i}": x for i, x in enumerate(tensors)})
    inputs = {f"call.{name}": x for name, x in vars(call).items()}
    return tape_call(lambda: run(*tensors), inputs, None)


def test_operators_of_torch_are_played_with_other_tensors():
    def run(x, y):
        made = torch.empty(3, 4)
        made.copy_(x)
        return made.t() @ y, torch.cat([x, y]).sum(0)[1:]

    x, y = torch.randn(2, 3, 4)
    _, playback = taped(run, x, y)
    assert playback is not None and playback.calls_torch
    other = SimpleNamespace(x0=torch.randn(3, 4), x1=torch.randn(3, 4))
    for mine, theirs in zip(playback.run(other), run(other.x0, other.x1), strict=True):
        assert_same_bits(mine, theirs)
        assert mine.stride() == theirs.stride()


constant = torch.ones(3)
UNTAPED = {
    "data": lambda x: x * float(x.sum()),
    "sizes that depend on data": lambda x: x[x > 0],
    "random numbers": lambda x: x + torch.rand(3),
    "a tensor of unknown origin": lambda x: x + constant,
    "an argument as result": lambda x: x[1:],
    "a result that nobody wrote": lambda x: torch.empty(3),
    "a view of other bits": lambda x: x.view(torch.int32) + 1,
    "several results in a list": lambda x: torch.stack(torch._foreach_add([x, x], 1)),
}


@pytest.mark.parametrize("name", UNTAPED)
def test_what_cannot_be_taped_is_not(name):
    result, playback = taped(UNTAPED[name], torch.tensor([1.0, -2.0, 3.0]))
    assert isinstance(result, Tensor) and playback is None


def test_one_tensor_in_two_places_is_a_condition():
    x, y = torch.ones(3), torch.zeros(3)
    _, playback = taped(lambda a, b: a + 2 * b, x, x)
    assert playback is not None
    assert playback.run(SimpleNamespace(x0=y, x1=y)).tolist() == [0.0] * 3
    assert playback.run(SimpleNamespace(x0=x, x1=y)) is None


def test_alignment_is_a_condition():
    memory = torch.ones(9)
    _, playback = taped(lambda a: a + 1, memory[:8])
    assert playback is not None
    assert playback.run(SimpleNamespace(x0=memory[:8])) is not None
    assert playback.run(SimpleNamespace(x0=memory[1:])) is None
    _, playback = taped(lambda a: a + 1, memory[1:])
    assert playback is not None
    assert playback.run(SimpleNamespace(x0=memory[:8])) is None


def test_a_playback_keeps_no_tensor_alive():
    def run(x):
        made = torch.empty(100)
        made.copy_(x)
        return made * 2

    x = torch.ones(100)
    seen = weakref.ref(x)
    _, playback = taped(run, x)
    del x
    gc.collect()
    assert playback is not None and seen() is None


class Compiled:
    """Stands for a compiled kernel: notes what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.given = []

    def run(self, *args):
        self.given.append(args[9:])


@pytest.fixture
def kernel(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("octavo.kernels.launch.stream_getter", lambda: lambda gpu: 0)
    return Compiled()


def tell(kernel, *arguments):
    """What a launcher does beside launching."""
    listener()(Launch(kernel, (1, 1, 1), arguments))


def test_a_launch_gets_the_addresses_of_other_tensors(kernel):
    def run(x, y):
        part = torch.empty(64)
        out = torch.empty(8)
        tell(kernel, x[2:], part, y, 3, out, None)
        return out.view(2, 4)

    x, y = torch.randn(2, 8)
    _, playback = taped(run, x, y)
    assert playback is not None and not playback.calls_torch and not kernel.given
    other = SimpleNamespace(x0=torch.randn(8), x1=torch.randn(8))
    found = playback.run(other)
    [(first, part, second, number, out, nothing)] = kernel.given
    assert first == other.x0.data_ptr() + 8 and second == other.x1.data_ptr()
    assert (number, nothing) == (3, None) and part % 16 == 0
    assert out == found.data_ptr() and found.shape == (2, 4)


@pytest.mark.parametrize("hidden", [lambda x: (x,), lambda x: SimpleNamespace(base=x)])
def test_memory_that_is_hidden_in_an_argument_is_not_taped(kernel, hidden):
    def run(x):
        out = torch.empty(8)
        tell(kernel, hidden(x), out)
        return out

    assert taped(run, torch.ones(8))[1] is None


def test_a_part_of_what_is_not_aligned_is_not_taped(kernel):
    """The part is aligned here; in another tensor that is not aligned either, it may not be."""

    def run(x):
        out = torch.empty(8)
        tell(kernel, x[2:], out)
        return out

    assert taped(run, torch.ones(11)[2:])[1] is None
    assert taped(run, torch.ones(8))[1] is not None


def test_launches_inside_an_operator_are_the_operators(kernel):
    def run(x):
        out = torch.empty_like(x)
        tell(kernel, x, out)
        return out

    ops.register_impl("matvec", "launching", lambda x, weight, bias: run(x))
    try:
        arguments = torch.ones(4), torch.ones(4, 4), None, "launching"
        with torch.no_grad():
            _, playback = taped(lambda x: torch.ops.octavo.matvec(x, *arguments[1:]), arguments[0])
    finally:
        ops.unregister_impl("matvec", "launching")
    assert playback is None  # its weight is not among the tensors of the call


def test_a_call_goes_on_where_taping_stumbles():
    result, playback = taped(lambda x: x.to_sparse().to_dense(), torch.ones(3))
    assert result.tolist() == [1.0] * 3 and playback is None


def test_other_calls_than_the_taped_one_run_as_before():
    """Here by their alignment: the signature is the same."""
    memory, weight, seen = torch.arange(5.0), torch.ones(3, 4), []

    def run(x, weight, bias):
        seen.append(x)
        return weight @ x

    ops.register_impl("matvec", "mine", run, is_repeatable=True)
    try:
        with torch.no_grad():
            for _ in range(register.TAPE_AT + 2):
                assert ops.matvec(memory[:4], weight, impl="mine").tolist() == [6.0] * 3
            assert len(seen) == register.TAPE_AT
            assert ops.matvec(memory[1:], weight, impl="mine").tolist() == [10.0] * 3
            assert len(seen) == register.TAPE_AT + 1
    finally:
        ops.unregister_impl("matvec", "mine")


def test_a_tape_of_an_implementation_that_is_gone_is_not_kept():
    x, weight, numbers = torch.ones(4), torch.ones(3, 4), [1.0, 2.0]

    def register_mine():
        number = numbers.pop(0)

        def run(x, weight, bias):
            calls.append(number)
            if len(calls) == register.TAPE_AT:  # by another thread, say
                ops.unregister_impl("matvec", "mine")
                register_mine()
            return weight @ x * number

        ops.register_impl("matvec", "mine", run, is_repeatable=True)

    calls = []
    register_mine()
    try:
        with torch.no_grad():
            found = [ops.matvec(x, weight, impl="mine")[0] for _ in range(register.TAPE_AT + 3)]
    finally:
        ops.unregister_impl("matvec", "mine")
    assert found == [4.0] * register.TAPE_AT + [8.0] * 3


def test_implementations_of_third_parties_are_taped_only_if_they_say_so(monkeypatch):
    seen = []

    def run(x, weight, bias):
        seen.append(x)
        return weight @ x

    x, weight = torch.ones(4), torch.ones(3, 4)
    for is_repeatable in (False, True):
        seen.clear()
        ops.register_impl("matvec", "mine", run, is_repeatable=is_repeatable)
        try:
            with torch.no_grad():
                for number in range(register.TAPE_AT + 5):
                    out = ops.matvec(x * number, weight, impl="mine")
                    assert out.tolist() == [4.0 * number] * 3
        finally:
            ops.unregister_impl("matvec", "mine")
        assert len(seen) == register.TAPE_AT + (0 if is_repeatable else 5)
