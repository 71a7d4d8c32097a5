"""Prefill over pages against the reference, and the gathered layout byte by byte."""

import pytest
import torch

from octavo import ops
from octavo.cache.view import PagedView
from octavo.kernels.attention.config import default_gluon
from octavo.kernels.device import CPU, Device
from octavo.kernels.prefill.config import GatherConfig, objection
from octavo.numerics.accumulator import HOPPER_FP8
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.granularity import PerHead, PerTensor, PerToken
from octavo.reference.paged import gather_kv, paged_attention
from octavo.reference.qkv import restore_values
from octavo.reference.softmax import Rounding, kernel_rounding
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo.testing.cases import PagedCase
from octavo.testing.inputs import cumulative, make_paged_view, make_prefill_inputs

pytest.importorskip("triton")
from octavo.kernels.prefill.triton import gather, prefill

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
SMALL = PagedCase(lengths=(1, 63, 0, 65), q_lens=(1, 5, 0, 20), head_dim=32)


def check(case, dtype, device, num_cached_tokens=None):
    inputs = make_prefill_inputs(case, dtype=dtype, device=device)
    spec, view = inputs["spec"], inputs["view"]
    room = view.num_sequences * view.max_pages * view.page_size
    out, lse = prefill(
        inputs["q"],
        view,
        inputs["cu_seqlens_q"],
        inputs["max_seqlen_q"],
        spec,
        inputs.get("q_scale"),
        sinks=inputs["sinks"],
        out_dtype=torch.float32,
        num_cached_tokens=room if num_cached_tokens is None else num_cached_tokens,
    )
    del inputs["max_seqlen_q"]
    truth, truth_lse = paged_attention(**inputs, compute=torch.float64)
    rounding = kernel_rounding(dtype, spec)
    model, model_lse = paged_attention(**inputs, rounding=rounding)
    if rounding.weights == E4M3:  # what the accumulator cuts off shows in logits, not beside P
        _, model_lse = paged_attention(**inputs, rounding=Rounding(E4M3, HOPPER_FP8))
    assert_within_budget(out, truth=truth, model=model)
    assert_within_budget(lse, truth=truth_lse, model=model_lse)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("granularity", [PerTensor(), PerHead(), PerToken()], ids=str)
@pytest.mark.parametrize("page_dtype", [E4M3, E5M2], ids=str)
def test_scales_and_dtypes(page_dtype, granularity, dtype, device):
    lengths, q_lens = SMALL.lengths, SMALL.q_lens
    case = PagedCase(
        lengths=lengths, q_lens=q_lens, head_dim=32, dtype=page_dtype, granularity=granularity
    )
    check(case, dtype, device)


@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("layout", ["head_major", "token_major"])
def test_pages(layout, page_size, device):
    case = PagedCase(
        lengths=(page_size + 1, 40),
        q_lens=(20, 40),
        page_size=page_size,
        layout=layout,
        head_dim=40,
    )
    check(case, E4M3, device)
    check(case, BF16, device)


@pytest.mark.parametrize("page_dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_pages_that_are_not_fp8(page_dtype, device):
    case = PagedCase(lengths=(70,), q_lens=(9,), dtype=page_dtype, head_dim=32)
    check(case, page_dtype, device)


@pytest.mark.parametrize("page_dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_queries_lose_nothing_of_other_pages(dtype, page_dtype, device):
    case = PagedCase(lengths=(70,), q_lens=(9,), dtype=page_dtype, head_dim=32)
    check(case, dtype, device)


def test_no_sequences(device):
    """The result is contiguous, as torch.compile is told, whatever the queries are."""
    view = make_paged_view(PagedCase(lengths=(), q_lens=(), head_dim=32), device=device)
    q = torch.ones(4, 6, 32, dtype=BF16, device=device).transpose(0, 1)
    ends = torch.zeros(1, dtype=torch.int32, device=device)
    options = {"sinks": None, "out_dtype": BF16, "num_cached_tokens": 0}
    out, lse = prefill(q, view, ends, 0, AttentionSpec(), None, **options)
    assert out.is_contiguous() and lse.is_contiguous()
    assert not out.any() and not lse.any()


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(causal=True, window=20),
        AttentionSpec(causal=True, softcap=5.0),
        AttentionSpec(),
    ],
    ids=str,
)
def test_specs(spec, device):
    case = PagedCase(
        lengths=(100, 7), q_lens=(30, 7), head_dim=32, spec=spec, has_sinks=True, page_size=16
    )
    check(case, E4M3, device)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_nothing_in_the_cache(lengths, device):
    check(PagedCase(lengths=lengths, q_lens=(0,) * len(lengths)), E4M3, device)


def test_room_for_exactly_the_tokens_there_are(device):
    check(SMALL, E4M3, device, num_cached_tokens=sum(SMALL.lengths))


@pytest.mark.parametrize("granularity", [PerTensor(), PerToken()], ids=str)
@pytest.mark.parametrize("value_layout", ["rows", "transposed"])
def test_what_is_gathered(value_layout, granularity, device):
    case = PagedCase(
        lengths=(1, 63, 0, 65, 130), head_dim=72, page_size=16, granularity=granularity
    )
    view = make_paged_view(case, device=device)
    config = GatherConfig(block_tokens=32)
    num_tokens = sum(case.lengths)
    k, v, k_scale, v_scale, cu_seqlens = gather(view, E4M3, value_layout, num_tokens, config)
    assert torch.equal(cu_seqlens, cumulative(case.lengths, device=device))
    assert k.stride(1) == 80
    if value_layout == "transposed":
        v = restore_values(v, num_tokens, cu_seqlens)
    for i, (start, length) in enumerate(zip(cu_seqlens.tolist(), case.lengths, strict=False)):
        tokens = slice(start, start + length)
        expected = gather_kv(view, i)
        assert_same_bits(k[tokens], expected[0])
        assert_same_bits(v[tokens], expected[1])
        if isinstance(granularity, PerToken):
            assert_same_bits(k_scale[tokens], expected[2])
            assert_same_bits(v_scale[tokens], expected[3])


def test_many_sequences_find_their_start(device):
    case = PagedCase(lengths=(1, 2) * 70, num_kv_heads=1, num_heads=1, head_dim=32, page_size=16)
    view = make_paged_view(case, device=device)
    *_, cu_seqlens = gather(view, E4M3, "rows", sum(case.lengths))
    assert torch.equal(cu_seqlens, cumulative(case.lengths, device=device))


@pytest.mark.parametrize(
    ("capability", "dtype", "page_dtype", "message"),
    [
        ((8, 0), BF16, E4M3, "FP8 pages from compute capability 8.9 on"),
        ((8, 0), E4M3, E4M3, "FP8 tensor cores need compute capability 8.9"),
    ],
)
def test_objections(capability, dtype, page_dtype, message):
    assert message in objection(Device("cuda", "GPU", capability), dtype, page_dtype, 64)


def test_objections_of_other_devices():
    assert "CUDA GPU" in objection(CPU, BF16, BF16, 64)
    assert objection(Device("cuda", "A100", (8, 0)), BF16, BF16, 64) is None
    assert objection(Device("cuda", "H200", (9, 0)), E4M3, E4M3, 128) is None


def many_sequences(device):
    """70000 of two tokens, each with a page of its own."""
    pages = torch.randint(0, 100, (2, 70_000, 1, 16, 16), dtype=torch.uint8, device=device)
    pages = pages.view(E4M3)
    table = torch.arange(70_000, dtype=torch.int32, device=device).flip(0).unsqueeze(1)
    lengths = torch.full((70_000,), 2, dtype=torch.int32, device=device)
    one = torch.ones((), device=device)
    return PagedView(pages[0], pages[1], one, one, table, lengths)


def test_sequences_are_on_the_axis_that_holds_them(monkeypatch):
    """Axes 1 and 2 of a launch end at 65535."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr("octavo.kernels.prefill.triton._gather_kernel", Kernel())
    gather(many_sequences("cpu"), E4M3, "rows", 140_000)
    assert grids == [(70_000,)]


@pytest.mark.gpu
def test_more_sequences_than_other_axes_count():
    view = many_sequences("cuda")
    k, v, _, _, ends = gather(view, E4M3, "rows", 140_000)
    for x, pages in ((k, view.key_pages), (v, view.value_pages)):
        expected = pages.view(torch.uint8)[view.page_table[:, 0], 0, :2].flatten(0, 1)
        assert_same_bits(x.view(torch.uint8)[:, 0], expected)
    assert_same_bits(ends, torch.arange(0, 140_001, 2, dtype=torch.int32, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize("granularity", [PerHead(), PerToken()], ids=str)
def test_chunked_prefill_on_a_gpu(granularity, dtype):
    case = PagedCase(
        lengths=(9000, 777, 4096, 65),
        q_lens=(300, 777, 64, 1),
        num_heads=8,
        head_dim=128,
        granularity=granularity,
    )
    check(case, dtype, "cuda")
    check(case, dtype, "cuda", num_cached_tokens=sum(case.lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [72, 128])
def test_hopper_on_a_gpu(head_dim):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    case = PagedCase(
        lengths=(3000, 777, 64, 65, 0),
        q_lens=(300, 777, 64, 1, 0),
        num_heads=8,
        head_dim=head_dim,
        granularity=PerHead(),
        has_sinks=True,
    )
    inputs = make_prefill_inputs(case, dtype=E4M3, device="cuda")
    chosen, lse = ops.prefill_attention(**inputs, return_lse=True)
    assert_same_bits(ops.prefill_attention(**inputs, impl="gluon"), chosen)
    del inputs["max_seqlen_q"]
    truth, truth_lse = paged_attention(**inputs, compute=torch.float64)
    model, _ = paged_attention(**inputs, rounding=kernel_rounding(E4M3, case.spec))
    rounding = Rounding(E4M3, HOPPER_FP8, default_gluon(head_dim, case.spec).has_ones)
    _, model_lse = paged_attention(**inputs, rounding=rounding)
    assert_within_budget(chosen, truth=truth, model=model)
    assert_within_budget(lse, truth=truth_lse, model=model_lse)


@pytest.mark.gpu
def test_small_head_dims_on_a_gpu_are_triton():
    inputs = make_prefill_inputs(SMALL, dtype=E4M3, device="cuda")
    chosen, named = ops.prefill_attention(**inputs), ops.prefill_attention(**inputs, impl="triton")
    assert_same_bits(chosen, named)
    for _ in range(10):
        assert_same_bits(ops.prefill_attention(**inputs), chosen)
