"""The decode kernels against float64: Triton on a GPU or in the interpreter, Gluon on a GPU."""

from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.cache.view import PagedView
from octavo.kernels.decode.config import (
    DecodeShape,
    candidates,
    default,
    default_gluon,
    is_valid,
    objection,
    objection_to_gluon,
    plan_settings,
    work,
)
from octavo.kernels.device import CPU, Device, describe
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.decode_plan import DecodePlan, make_items
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.reference.paged import paged_attention
from octavo.reference.softmax import kernel_rounding
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.cases import PagedCase
from octavo.testing.inputs import make_decode_inputs

pytest.importorskip("triton")
from octavo.kernels.decode.triton import decode

E4M3, E5M2, BF16, FP16 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
)
H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132)
L4 = Device(type="cuda", name="L4", capability=(8, 9), num_sms=58)
A100 = Device(type="cuda", name="A100", capability=(8, 0), num_sms=108)
# Few slots, so that the interpreter has few programs and yet several splits.
SMALL = Device(type="cuda", name="small", capability=(9, 0), num_sms=4)

SINGLE = (1, 1)
FEATURES = [
    PagedCase(lengths=(130,), q_lens=(1,), num_heads=2, head_dim=64),
    PagedCase(lengths=(300, 0), q_lens=SINGLE, granularity=PerHead(), has_sinks=True),
    PagedCase(lengths=(1, 200), q_lens=(3, 3), granularity=PerToken(), page_size=16),
    PagedCase(lengths=(150, 2), q_lens=(4, 4), dtype=E5M2, layout="token_major", page_size=32),
    PagedCase(lengths=(259,), q_lens=(1,), dtype=BF16, head_dim=128, page_size=128),
    PagedCase(
        lengths=(270, 40),
        q_lens=(2, 2),
        spec=AttentionSpec(causal=True, window=70, softcap=20.0),
        has_sinks=True,
        granularity=PerToken(),
    ),
    PagedCase(
        lengths=(200,), q_lens=(3,), spec=AttentionSpec(window=50, softmax_scale=0.2), page_size=16
    ),
    PagedCase(lengths=(65, 64), q_lens=SINGLE, num_heads=7, num_kv_heads=1, head_dim=72),
    PagedCase(lengths=(140,), q_lens=(2,), num_heads=32, num_kv_heads=2, head_dim=80),
    PagedCase(lengths=(33, 17), q_lens=SINGLE, num_heads=9, num_kv_heads=3, head_dim=32),
    PagedCase(lengths=(70,), q_lens=(1,), num_heads=2, num_kv_heads=2, head_dim=256, dtype=FP16),
    PagedCase(lengths=(70,), q_lens=(1,), num_heads=2, num_kv_heads=2, head_dim=96),
]


def shape_of(q, view, spec):
    return DecodeShape(
        num_sequences=q.shape[0],
        q_len=q.shape[1],
        num_heads=q.shape[2],
        num_kv_heads=view.num_kv_heads,
        head_dim=view.head_dim,
        page_size=view.page_size,
        max_pages=view.max_pages,
        q_dtype=q.dtype,
        page_dtype=view.dtype,
        has_token_scales=view.key_scale.dim() == 3,
        window=spec.window,
    )


def run_triton(inputs, out_dtype=None, **changes):
    """The Triton kernel with a plan made on the host for a small device."""
    q, view, spec = inputs["q"], inputs["view"], inputs["spec"]
    shape = shape_of(q, view, spec)
    config = replace(default(shape, SMALL), **changes)
    settings = plan_settings(shape, config, SMALL)
    num_counters = len(view.lengths) * settings.programs_per_item
    counters = torch.zeros(num_counters, dtype=torch.int32, device=q.device)
    plan = DecodePlan(make_items(view.lengths, settings).to(q.device), counters, settings, "triton")
    out = decode(q, view, spec, plan, config, sinks=inputs["sinks"], out_dtype=out_dtype or q.dtype)
    assert not counters.any()
    return out


def truth_and_model(inputs):
    q, view, spec = inputs["q"], inputs["view"], inputs["spec"]
    ends = torch.arange(0, (q.shape[0] + 1) * q.shape[1], q.shape[1], dtype=torch.int32)
    arguments = (q.flatten(0, 1), view, ends, spec)
    sinks = inputs["sinks"]
    truth, _ = paged_attention(*arguments, sinks=sinks, compute=torch.float64)
    model, _ = paged_attention(*arguments, sinks=sinks, rounding=kernel_rounding(q.dtype, spec))
    return truth.view(q.shape), model.view(q.shape)


def assert_right(actual, inputs):
    truth, model = truth_and_model(inputs)
    assert actual.is_contiguous()
    assert_within_budget(actual, truth=truth, model=model.to(actual.dtype).float())


def poison(view: PagedView) -> None:
    """NaN in every slot that no sequence owns, and in the scales of such slots."""
    owned = torch.zeros(view.num_pages, view.page_size, dtype=torch.bool, device=view.device)
    for row, length in enumerate(view.lengths.tolist()):
        positions = torch.arange(length, device=view.device)
        slots = view.slots(torch.full_like(positions, row), positions)
        owned.view(-1)[slots] = True
    free = ~owned[:, None, :, None]
    for pages in (view.key_pages, view.value_pages):
        nan = torch.full_like(pages, float("nan"), dtype=torch.float32).to(pages.dtype)
        as_bytes, nan_bytes = pages.view(torch.uint8), nan.view(torch.uint8)
        as_bytes.copy_(torch.where(free, nan_bytes, as_bytes))
    for scale in (view.key_scale, view.value_scale):
        if scale.dim() == 3:
            scale.masked_fill_(free[..., 0], float("nan"))


def decode_inputs(case, *, dtype=BF16, device="cpu", seed=0):
    inputs = make_decode_inputs(case, dtype=dtype, device=device, seed=seed)
    poison(inputs["view"])
    return inputs


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_triton(case, device):
    inputs = decode_inputs(case, device=device)
    assert_right(run_triton(inputs, block_tokens=64), inputs)


@pytest.mark.parametrize("q_dtype", [torch.float32, FP16], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, BF16, FP16, torch.float32], ids=str)
def test_triton_dtypes(dtype, q_dtype, device):
    case = PagedCase(lengths=(90,), q_lens=(2,), num_heads=2, num_kv_heads=1, dtype=dtype)
    inputs = decode_inputs(case, dtype=q_dtype, device=device)
    assert_right(run_triton(inputs, out_dtype=torch.float32), inputs)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_bytes_are_decoded_exactly(dtype, device, monkeypatch):
    """As GPUs without FP8 types do it: every byte, NaN and ±Inf included."""
    monkeypatch.setattr("octavo.kernels.decode.triton.is_fp8_native", lambda device: False)
    case = PagedCase(lengths=(16,), q_lens=(1,), num_heads=1, num_kv_heads=1, dtype=dtype)
    case = replace(case, page_size=16, head_dim=256)
    inputs = make_decode_inputs(case, device=device)
    inputs["q"].zero_()
    view = inputs["view"]
    page = int(view.page_table[0, 0])
    # With q = 0 the result is the mean of 16 values: one byte among zeros for each of 256 columns.
    bytes_of_page = view.value_pages.view(torch.uint8)[page, 0]
    bytes_of_page.zero_()
    bytes_of_page[3] = torch.arange(256, dtype=torch.uint8, device=view.device)
    view.key_pages.view(torch.uint8)[page] = 0
    out = run_triton(inputs, out_dtype=torch.float32)
    value = view.value_pages[page, 0, 3].float() * view.value_scale / 16
    finite = torch.isfinite(value)
    torch.testing.assert_close(out.flatten()[finite], value[finite], rtol=1e-6, atol=0)
    assert not torch.isfinite(out.flatten()[~finite]).any()


@pytest.mark.parametrize("impl", ["triton", pytest.param("gluon", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "case",
    [
        PagedCase(lengths=(130, 40), q_lens=(2, 2), head_dim=64, granularity=PerHead()),
        PagedCase(lengths=(130,), q_lens=(1,), head_dim=64, dtype=FP16),
        PagedCase(
            lengths=(130,),
            q_lens=(1,),
            head_dim=64,
            granularity=PerToken(),
            spec=AttentionSpec(causal=True, softcap=20.0),
        ),
    ],
    ids=str,
)
def test_queries_beyond_float16(case, impl, device):
    """Beside usual queries, which then see all keys alike, large ones of usual logits and huge."""
    inputs = decode_inputs(case, device=device)
    inputs["q"][:, :, 1] *= 2.0**20
    # Logits beyond 2^24 are exact only where products are rounded before they are subtracted.
    inputs["q"][:, :, 2] *= 2.0**100 if impl == "triton" else 2.0**40
    inputs["spec"] = replace(case.spec, softmax_scale=2.0**-23)
    out = run_triton(inputs) if impl == "triton" else ops.decode_attention(**inputs, impl=impl)
    assert_right(out, inputs)


def test_no_sequences_and_strided_queries(device):
    case = PagedCase(lengths=(), q_lens=(), page_size=16)
    assert run_triton(decode_inputs(case, device=device)).shape == (0, 1, 4, 64)
    case = PagedCase(lengths=(20, 70), q_lens=(2, 2))
    inputs = decode_inputs(case, device=device)
    q = inputs["q"]
    for strided in (q.transpose(0, 2).contiguous().transpose(0, 2), q.mT.contiguous().mT):
        assert not strided.is_contiguous()
        assert_same_bits(run_triton(inputs | {"q": strided}), run_triton(inputs))


def test_pages_of_any_size(device):
    """Foreign pages: 24 tokens each, and more query heads for a KV head than one program takes."""
    pages = torch.randn(2, 5, 1, 24, 32, device=device).bfloat16()
    table = torch.tensor([[4, 1, 3]], dtype=torch.int32, device=device)
    lengths = torch.tensor([60], dtype=torch.int32, device=device)
    scale = torch.ones((), device=device)
    view = PagedView(pages[0], pages[1], scale, scale, table, lengths)
    q = torch.randn(1, 1, 70, 32, device=device).bfloat16()
    inputs = {"q": q, "view": view, "spec": AttentionSpec(causal=True), "sinks": None}
    assert_right(run_triton(inputs), inputs)


def request(device=H200, **changes):
    options = {"dtype": BF16, "other_dtype": E4M3, "head_dim": 128, "group": 4, "page_size": 64}
    return ops.Request(op="decode_attention", device=device, **(options | changes))


@pytest.mark.parametrize(
    ("device", "changes", "impl"),
    [
        (H200, {}, "gluon"),
        (L4, {}, "gluon"),
        (A100, {}, "triton"),
        (CPU, {}, "reference"),
        (H200, {"head_dim": 96}, "triton"),
        (H200, {"head_dim": 512}, "reference"),
        (H200, {"group": 40}, "gluon"),
        (H200, {"dtype": torch.float32}, "triton"),
        (H200, {"dtype": FP16, "other_dtype": BF16}, "triton"),
        (H200, {"other_dtype": torch.float32}, "triton"),
        (H200, {"page_size": 48}, "triton"),
    ],
    ids=str,
)
def test_selection(device, changes, impl):
    assert ops.select(request(device, **changes)).impl == impl


def test_objections():
    old = Device(type="cuda", name="T4", capability=(7, 5), num_sms=40)
    assert objection(H200, head_dim=128) is None
    assert "CUDA GPU, got CPU" in objection(CPU, head_dim=128)
    assert "8.0 or newer, got 7.5" in objection(old, head_dim=128)
    assert "at most 256, got 512" in objection(H200, head_dim=512)
    plain = {"q_dtype": BF16, "page_dtype": E4M3, "head_dim": 128, "page_size": 64}
    assert objection_to_gluon(H200, **plain) is None
    assert "CUDA GPU, got CPU" in objection_to_gluon(CPU, **plain)
    for device, changes, message in (
        (A100, {}, "8.9 or newer, got 8.0"),
        (H200, {"head_dim": 80}, "64, 128 or 256, got 80"),
        (H200, {"page_size": 48}, "16, 32, 64 or 128, got 48"),
        (H200, {"page_dtype": torch.float32}, "pages, got float32"),
        (H200, {"q_dtype": torch.float32}, "in torch.float16, too coarse for torch.float32"),
        (H200, {"q_dtype": FP16, "page_dtype": BF16}, "too coarse for torch.float16 queries"),
    ):
        assert message in objection_to_gluon(device, **(plain | changes))


@pytest.mark.parametrize("dtypes", [(torch.float32, E4M3), (BF16, torch.float32), (FP16, BF16)])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_tiles_of_float32_fit_the_smallest_shared_memory(head_dim, dtypes):
    q_dtype, page_dtype = dtypes
    shape = DecodeShape(
        num_sequences=8,
        q_len=4,
        num_heads=128,
        num_kv_heads=8,
        head_dim=head_dim,
        page_size=64,
        max_pages=512,
        q_dtype=q_dtype,
        page_dtype=page_dtype,
    )
    config = default(shape, L4)
    assert is_valid(config, shape)
    # Queries, keys and values as the products take them.
    assert 4 * head_dim * (config.columns + 2 * config.block_tokens) <= L4.shared_bytes


@pytest.mark.parametrize("page_dtype", [E4M3, BF16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 7, 16, 64])
@pytest.mark.parametrize("num_sequences", [1, 256])
def test_defaults_are_valid(num_sequences, rows, head_dim, page_dtype):
    shape = DecodeShape(
        num_sequences=num_sequences,
        q_len=1,
        num_heads=8 * rows,
        num_kv_heads=8,
        head_dim=head_dim,
        page_size=64,
        max_pages=512,
        q_dtype=BF16,
        page_dtype=page_dtype,
    )
    assert is_valid(default(shape, H200), shape)
    assert is_valid(default_gluon(shape, H200), shape)
    assert default_gluon(shape, L4).use_pdl is False
    assert candidates(shape, H200)
    flops, num_bytes = work(shape, 100)
    assert num_bytes == 100 * 2 * 8 * head_dim * page_dtype.itemsize
    assert flops == 4 * 100 * 8 * rows * head_dim


def gpu_cases():
    """Every feature, and every size at which something else begins."""
    base = PagedCase(
        lengths=(1, 63, 64, 65, 257, 0, 1000, 5000),
        q_lens=(1,) * 8,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
    )
    cases = [base]
    cases += [replace(base, head_dim=dim) for dim in (64, 256)]
    cases += [replace(base, page_size=size) for size in (16, 32, 128)]
    cases += [replace(base, page_size=size, layout="token_major") for size in (16, 64)]
    cases += [replace(base, dtype=dtype) for dtype in (E5M2, BF16, FP16)]
    cases += [replace(base, dtype=BF16, head_dim=dim) for dim in (64, 256)]
    cases += [replace(base, granularity=g) for g in (PerHead(), PerToken())]
    cases += [replace(base, granularity=PerToken(), page_size=16, head_dim=64, dtype=E5M2)]
    cases += [replace(base, num_heads=2 * group) for group in (1, 5, 7, 8, 9, 16)]
    cases += [replace(base, q_lens=(q_len,) * 8) for q_len in (2, 3, 4)]
    cases += [replace(base, q_lens=(4,) * 8, num_heads=32, head_dim=dim) for dim in (64, 256)]
    cases += [replace(base, q_lens=(4,) * 8, spec=AttentionSpec())]
    cases += [
        replace(base, spec=AttentionSpec(causal=True, window=window), q_lens=(q_len,) * 8)
        for window in (1, 100, 600)
        for q_len in (1, 3)
    ]
    cases += [replace(base, spec=AttentionSpec(window=100), q_lens=(3,) * 8)]
    cases += [replace(base, has_sinks=True)]
    everything = replace(
        base,
        spec=AttentionSpec(causal=True, window=300, softcap=15.0, softmax_scale=0.1),
        has_sinks=True,
        q_lens=(3,) * 8,
        granularity=PerToken(),
        page_size=16,
        layout="token_major",
    )
    cases += [replace(everything, dtype=dtype) for dtype in (E4M3, E5M2)]
    cases += [replace(everything, dtype=BF16, granularity=PerTensor(), head_dim=64)]
    return cases


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_grid_on_a_gpu(impl, case):
    q_dtype = FP16 if case.dtype == FP16 else BF16
    inputs = decode_inputs(case, dtype=q_dtype, device="cuda")
    actual = ops.decode_attention(**inputs, impl=impl)
    assert_right(actual, inputs)
    for out_dtype in (torch.float32, FP16):
        assert_right(ops.decode_attention(**inputs, impl=impl, out_dtype=out_dtype), inputs)
    for _ in range(5):
        assert_same_bits(ops.decode_attention(**inputs, impl=impl), actual)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 72, 80, 96, 192])
def test_other_head_dims_run_in_triton(head_dim):
    case = PagedCase(lengths=(1, 300, 2000), q_lens=(1,) * 3, head_dim=head_dim, num_heads=8)
    inputs = decode_inputs(case, device="cuda")
    assert_right(ops.decode_attention(**inputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["gluon", "triton"])
@pytest.mark.parametrize("dtype", [E4M3, BF16], ids=str)
def test_repeated_runs_are_the_same(impl, dtype):
    lengths = (20000, 1, 700, 4097, 0, 9000, 257, 12000)
    case = PagedCase(lengths=lengths, q_lens=(1,) * 8, num_heads=32, num_kv_heads=8, head_dim=128)
    inputs = decode_inputs(replace(case, dtype=dtype), device="cuda")
    plan = ops.plan_decode(inputs["view"], num_heads=32, impl=impl)
    assert_same_bits(plan.items.cpu(), make_items(inputs["view"].lengths, plan.settings))
    expected = ops.decode_attention(**inputs, plan=plan)
    assert_right(expected, inputs)
    for _ in range(50):
        assert_same_bits(ops.decode_attention(**inputs, plan=plan), expected)
    assert not plan.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_lengths_change_in_a_cuda_graph(impl):
    case = PagedCase(lengths=(3000, 3000, 3000), q_lens=(1,) * 3, num_heads=8, head_dim=128)
    inputs = make_decode_inputs(case, device="cuda")
    view = inputs["view"]

    def step():
        plan = ops.plan_decode(view, num_heads=8, impl=impl)
        return [ops.decode_attention(inputs["q"], view, plan=plan) for _ in range(2)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for lengths in ([1, 2, 3], [3000, 0, 64], [65, 2999, 1500]):
        view.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        for out in outs:
            assert_right(out, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_append_plan_and_decode_in_a_cuda_graph(impl):
    """Each kernel may start before the one in front has ended, and must wait for it."""
    case = PagedCase(lengths=(230, 190, 140), q_lens=(1,) * 3, num_heads=8, head_dim=128)
    inputs = make_decode_inputs(case, device="cuda")
    q, view = inputs["q"], inputs["view"]
    key, value = (torch.randn(3, 2, 128, dtype=q.dtype, device="cuda") for _ in range(2))
    slots = torch.zeros(3, dtype=torch.int64, device="cuda")

    def step():
        ops.append_kv(view, key, value, slots)
        plan = ops.plan_decode(view, num_heads=8, impl=impl)
        return [ops.decode_attention(q, view, plan=plan) for _ in range(2)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    view.lengths.copy_(torch.tensor([200, 127, 63]))
    for _ in range(20):
        position = view.lengths.long()
        pages = view.page_table.gather(1, (position // 64)[:, None]).squeeze(1)
        slots.copy_(pages * 64 + position % 64)
        view.lengths.add_(1)
        for x in (q, key, value):
            x.copy_(torch.randn_like(x))
        graph.replay()
        for out in outs:
            assert_right(out, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["gluon", "triton"])
@pytest.mark.parametrize("dtype", [E4M3, BF16], ids=str)
def test_pages_beyond_32_bits(impl, dtype):
    num_pages = 2**31 // (2 * 64 * 128) + 8
    pages = torch.zeros(2, num_pages, 2, 64, 128, dtype=torch.uint8, device="cuda")
    pages = pages.view(dtype) if dtype == E4M3 else pages.to(dtype)
    table = torch.arange(num_pages - 4, num_pages, dtype=torch.int32, device="cuda").view(1, 4)
    scale = torch.ones((), device="cuda")
    lengths = torch.tensor([250], dtype=torch.int32, device="cuda")
    view = PagedView(pages[0], pages[1], scale, scale, table, lengths)
    pages[:, -4:] = torch.randn(2, 4, 2, 64, 128, device="cuda").to(dtype)
    q = torch.randn(1, 1, 8, 128, device="cuda", dtype=BF16)
    inputs = {"q": q, "view": view, "spec": AttentionSpec(causal=True), "sinks": None}
    assert_right(ops.decode_attention(**inputs, impl=impl), inputs)


@pytest.mark.gpu
def test_a_gpu_chooses_gluon():
    device = describe("cuda")
    assert ops.select(request(device)).impl == "gluon"
    assert ops.select(request(device, head_dim=80)).impl == "triton"
