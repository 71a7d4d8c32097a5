"""Which implementation runs: by name or not at all, or the first that has no objection."""

import ast
import importlib.util
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

from octavo import ops
from octavo.cache.view import PagedView
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.device import CPU, Device
from octavo.numerics.attention import AttentionSpec, Packing
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead, PerToken
from octavo.numerics.qkv import QkvScales
from octavo.numerics.quantize import Quantized
from octavo.ops.select import (
    _IMPLS,
    OPS,
    Request,
    features_of,
    find_run,
    impl_names,
    scale_granularity,
    select,
)
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import AttentionCase, PackedCase, PagedCase
from octavo.testing.inputs import (
    make_attention_inputs,
    make_decode_inputs,
    make_packed_inputs,
    make_prefill_inputs,
)

H200 = Device(type="cuda", name="H200", capability=(9, 0), num_sms=132)
REQUEST = Request(op="quantize", device=CPU, dtype=torch.bfloat16)

each_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture
def registry():
    """The registry; what a test registers is gone after it."""
    before = {op: list(impls) for op, impls in _IMPLS.items()}
    yield _IMPLS
    for op, impls in before.items():
        _IMPLS[op][:] = impls
    find_run.cache_clear()


def refuse(reason: str):
    return lambda request: reason


@each_op
def test_every_op_has_a_reference_that_serves_everything(op):
    assert impl_names(op)[-1] == "reference"
    for device in (CPU, H200, Device(type="meta", name="meta")):
        request = Request(op=op, device=device, dtype=torch.float32, features=frozenset({"sinks"}))
        assert select(request, "reference").impl == "reference"


@each_op
def test_every_op_is_public(op):
    assert op in ops.__all__
    assert callable(getattr(ops, op))


def test_a_cpu_runs_the_reference_and_says_why():
    selection = select(REQUEST)
    assert selection.impl == "reference"
    assert selection.reason == "plain torch runs on any device"
    assert selection.objections == {"triton": "Triton needs a CUDA GPU, got CPU"}
    assert select(REQUEST, "reference").reason == "asked for by name"


def test_selecting_is_pure(registry):
    asked = []

    def objection(request):
        asked.append(request)
        return "not today"

    ops.register_impl("quantize", "busy", print, objection=objection, is_automatic=True)
    before = {op: list(impls) for op, impls in registry.items()}
    answers = [select(REQUEST) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert asked == [REQUEST] * 3
    assert registry == before


def test_objections_explain_the_choice(registry):
    ops.register_impl("quantize", "a", print, objection=refuse("needs sm_90"), is_automatic=True)
    ops.register_impl("quantize", "b", print, objection=refuse("needs a GPU"), is_automatic=True)
    selection = select(REQUEST)
    assert selection.impl == "reference"
    assert list(selection.objections.items())[:2] == [("b", "needs a GPU"), ("a", "needs sm_90")]


def test_a_third_party_is_called_when_asked_and_only_then(registry):
    calls = []

    def run(x, granularity, fmt, *, scale, margin, power_of_two):
        calls.append((granularity, fmt, scale, margin, power_of_two))
        return Quantized(x.to(fmt.dtype), torch.tensor(7.0), granularity)

    ops.register_impl("quantize", "mine", run)
    assert impl_names("quantize") == ["mine", "triton", "reference"]
    x = torch.ones(3)
    assert ops.quantize(x).scale != 7
    assert not calls
    result = ops.quantize(x, impl="mine", margin=1.5)
    assert float(result.scale) == 7
    assert [call[3:] for call in calls] == [(1.5, False)]


def test_an_automatic_third_party_runs_unasked(registry):
    def run(x, granularity, fmt, **_):
        return Quantized(x.to(fmt.dtype), torch.tensor(7.0), granularity)

    def objection(request):
        return None if request.dtype == torch.float16 else f"{request.dtype} is too wide"

    ops.register_impl(
        "quantize", "mine", run, objection=objection, reason="faster", is_automatic=True
    )
    assert float(ops.quantize(torch.ones(3, dtype=torch.float16)).scale) == 7
    assert float(ops.quantize(torch.ones(3)).scale) != 7
    assert select(replace(REQUEST, dtype=torch.float16)).reason == "faster"


def test_an_objection_becomes_an_error_when_asked_by_name(registry):
    ops.register_impl("quantize", "mine", print, objection=refuse("x is too small"))
    with pytest.raises(UnsupportedError) as error:
        ops.quantize(torch.ones(3), impl="mine")
    assert str(error.value) == "quantize with impl='mine' cannot run: x is too small"


def test_an_empty_objection_is_an_objection(registry):
    ops.register_impl("quantize", "mine", print, objection=refuse(""), is_automatic=True)
    assert select(REQUEST).impl == "reference"
    with pytest.raises(UnsupportedError):
        select(REQUEST, "mine")


def test_an_error_of_an_implementation_is_not_swallowed(registry):
    def run(*args, **kwargs):
        raise RuntimeError("out of registers")

    ops.register_impl("quantize", "mine", run, is_automatic=True)
    with pytest.raises(RuntimeError, match="out of registers"):
        ops.quantize(torch.ones(3))


def test_when_nobody_can(registry):
    registry["quantize"].clear()
    ops.register_impl("quantize", "a", print, objection=refuse("no"), is_automatic=True)
    ops.register_impl("quantize", "b", print, objection=refuse("never"), is_automatic=True)
    with pytest.raises(UnsupportedError) as error:
        select(REQUEST)
    assert str(error.value) == "no implementation of quantize can run this: b: never; a: no"


def test_names_are_taken_once(registry):
    ops.register_impl("quantize", "mine", print)
    for name in ("mine", "reference"):
        with pytest.raises(ConfigError, match=f"quantize already has an implementation '{name}'"):
            ops.register_impl("quantize", name, print)
    ops.register_impl("attention", "mine", print)  # another op, another name


def test_unregister(registry):
    ops.register_impl("quantize", "mine", print)
    ops.unregister_impl("quantize", "mine")
    assert impl_names("quantize") == ["triton", "reference"]
    with pytest.raises(ConfigError, match="one of triton, reference; got 'mine'"):
        ops.unregister_impl("quantize", "mine")
    with pytest.raises(ConfigError, match="one of triton, reference; got 'mine'"):
        ops.quantize(torch.ones(3), impl="mine")


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.register_impl("softmax", "mine", print),
        lambda: ops.unregister_impl("softmax", "mine"),
        lambda: select(replace(REQUEST, op="softmax")),
        lambda: impl_names("softmax"),
    ],
)
def test_an_unknown_op_is_told_the_known_ones(call):
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value) == f"expected an op, one of {', '.join(OPS)}; got 'softmax'"


def test_requests_are_values():
    assert replace(REQUEST) == REQUEST
    assert hash(replace(REQUEST)) == hash(REQUEST)
    with pytest.raises(FrozenInstanceError):
        REQUEST.op = "attention"


@pytest.mark.parametrize(
    ("spec", "used", "expected"),
    [
        (AttentionSpec(), {}, ""),
        (AttentionSpec(causal=True), {"sinks": True, "lse": False}, "causal sinks"),
        (AttentionSpec(window=3, softcap=1.0), {}, "window softcap"),
        (AttentionSpec(promote_every=None), {"packed": True}, "one-level packed"),
        (AttentionSpec(promote_every=4, softmax_scale=0.1), {}, "promote-later"),
        (AttentionSpec(exponentials="codes"), {}, "codes"),
        (AttentionSpec(exponentials="exact"), {}, ""),
    ],
    ids=str,
)
def test_features(spec, used, expected):
    assert features_of(spec, **used) == set(expected.split())


@pytest.mark.parametrize(
    ("scale_shape", "expected"), [((), "tensor"), ((2,), "head"), ((1, 5, 2), "token")]
)
def test_granularity_of_a_scale(scale_shape, expected):
    assert scale_granularity(torch.ones(scale_shape), torch.ones(1, 5, 2, 8)) == expected
    packed_shape = scale_shape[1:] if len(scale_shape) == 3 else scale_shape
    assert scale_granularity(torch.ones(packed_shape), torch.ones(5, 2, 8)) == expected


class Spy:
    """Records the request of a call, then refuses it."""

    def __init__(self, op: str) -> None:
        self.requests: list[Request] = []
        ops.register_impl(op, "spy", print, objection=self.note)

    def note(self, request: Request) -> str:
        self.requests.append(request)
        return "only looking"


def request_of(op: str, function, **inputs) -> Request:
    spy = Spy(op)
    with pytest.raises(UnsupportedError, match="only looking"):
        function(**inputs, impl="spy")
    return spy.requests[0]


def test_what_a_request_for_attention_says(registry):
    spec = AttentionSpec(causal=True, window=5)
    case = AttentionCase(spec=spec, has_sinks=True, has_key_mask=True, head_dim=72)
    inputs = make_attention_inputs(case, dtype=torch.float8_e4m3fn)
    request = request_of("attention", ops.attention, **inputs, return_lse=True)
    assert request == Request(
        op="attention",
        device=CPU,
        dtype=torch.float8_e4m3fn,
        other_dtype=torch.float8_e4m3fn,
        head_dim=72,
        group=2,
        features=frozenset({"causal", "window", "sinks", "key_mask", "lse"}),
    )


def test_what_a_request_for_packed_attention_says(registry):
    inputs = make_packed_inputs(PackedCase(), dtype=torch.float8_e5m2, granularity=PerToken())
    request = request_of("attention", ops.attention, **inputs)
    assert request.features == {"packed"}
    assert request.granularity == "token"


def test_what_a_request_over_pages_says(registry):
    case = PagedCase(dtype=torch.float16, head_dim=32, has_sinks=True)
    decode = request_of("decode_attention", ops.decode_attention, **make_decode_inputs(case))
    assert (decode.dtype, decode.other_dtype) == (torch.bfloat16, torch.float16)
    assert decode.features == {"causal", "sinks"}
    prefill = request_of("prefill_attention", ops.prefill_attention, **make_prefill_inputs(case))
    assert (prefill.head_dim, prefill.granularity) == (32, "tensor")
    assert prefill.features == {"causal", "sinks"}


def test_the_reference_cannot_be_taken_away():
    with pytest.raises(ConfigError, match="is its specification"):
        ops.unregister_impl("attention", "reference")
    assert impl_names("attention")[-1] == "reference"


def probe(op, seen):
    """An implementation like the reference that keeps what it was given."""
    reference = _IMPLS[op][-1].run

    def run(*args, **options):
        seen.extend([*args, *options.values()])
        return reference(*args, **options)

    return run


def strided(x):
    """x with something between its elements."""
    return torch.stack((x, torch.full_like(x, 7)), dim=-1)[..., 0]


def test_implementations_get_small_operands_contiguous(registry):
    """Kernels read scales, sinks and lengths by their number alone."""
    packed = make_packed_inputs(PackedCase(has_sinks=True), dtype=torch.float8_e4m3fn)
    packing = packed["packing"]
    ends = Packing(strided(packing.cu_seqlens_q), strided(packing.cu_seqlens_k), 65, 65)
    of_pages = PagedCase(has_sinks=True, granularity=PerToken())
    prefill = make_prefill_inputs(of_pages, dtype=torch.float8_e4m3fn)
    decode = make_decode_inputs(of_pages)
    view = prefill["view"]
    view = replace(view, key_scale=strided(view.key_scale), value_scale=strided(view.value_scale))
    heads = QkvScales(strided(torch.ones(4)), torch.ones(1).expand(2), strided(torch.ones(2)))
    calls = {
        "attention": packed | {"packing": ends, "scales": heads},
        "prefill_attention": prefill | {"view": view, "q_scale": strided(prefill["q_scale"])},
        "decode_attention": decode,
        "quantize": {
            "x": torch.randn(3, 4, 16),
            "granularity": PerHead(),
            "scale": torch.ones(1).expand(4),
        },
    }
    for op, inputs in calls.items():
        if inputs.get("sinks") is not None:
            inputs["sinks"] = strided(inputs["sinks"])
        seen = []
        ops.register_impl(op, "probe", probe(op, seen))
        result = getattr(ops, op)(**inputs, impl="probe")
        expected = getattr(ops, op)(**inputs, impl="reference")
        tensors = [x for x in seen if isinstance(x, torch.Tensor)]
        tensors += [
            x for one in seen if isinstance(one, QkvScales | Packing) for x in vars(one).values()
        ]
        if op == "prefill_attention":
            tensors += [x for one in seen if isinstance(one, PagedView) for x in one.tensors]
        tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
        assert len(tensors) > 1
        assert all(x.is_contiguous() for x in tensors), op
        result, expected = (x.data if op == "quantize" else x for x in (result, expected))
        assert_same_bits(result, expected)


def test_what_was_found_is_kept_until_the_registry_changes(registry):
    asked = []

    def object_to(request: Request) -> str | None:
        asked.append(request)
        return None

    ops.register_impl("quantize", "first", print, objection=object_to, is_automatic=True)
    request = Request(op="quantize", device=CPU, dtype=torch.bfloat16)
    assert find_run(request, None) is print and find_run(request, None) is print
    assert len(asked) == 1
    ops.register_impl("quantize", "second", max, is_automatic=True)
    assert find_run(request, None) is max
    ops.unregister_impl("quantize", "second")
    assert find_run(request, None) is print


NAMED = [impl.run for impls in _IMPLS.values() for impl in impls if isinstance(impl.run, str)]


@pytest.mark.parametrize("run", NAMED)
def test_kernels_are_where_they_are_said_to_be(run):
    """Without importing them: Triton's interpreter must be chosen before any is."""
    module, _, function = run.partition(":")
    assert module.startswith("octavo.kernels.")
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    assert function in names


def test_every_kernel_is_imported_by_name():
    assert {run.split(".")[2] for run in NAMED} >= {"append_kv", "attention", "prefill", "quantize"}


def test_codes_on_a_gpu_are_the_reference_by_name():
    base = {"op": "attention", "dtype": E4M3.dtype, "other_dtype": E4M3.dtype, "head_dim": 64}
    codes = {**base, "features": frozenset({"codes", "transposed"})}
    assert select(Request(device=CPU, **codes)).impl == "reference"
    with pytest.raises(UnsupportedError) as error:
        select(Request(device=H200, **codes))
    assert str(error.value) == (
        "no implementation of attention can run this: gluon: it takes P by exponentials; triton: "
        "it takes P by exponentials; reference: it is slow on a GPU: ask for it by name"
    )
    assert select(Request(device=H200, **codes), "reference").impl == "reference"
    exact = features_of(AttentionSpec(exponentials="exact"), transposed=True)
    assert select(Request(device=H200, **base, features=exact)).impl == "gluon"
