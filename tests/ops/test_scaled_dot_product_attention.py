"""octavo.scaled_dot_product_attention means what torch's means, or raises."""

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo import AttentionSpec, ConfigError, PerHead, QkvScales, UnsupportedError, ops
from octavo.kernels.device import Device
from octavo.numerics.error import relative_rms
from octavo.ops import check
from octavo.testing.asserts import assert_same_bits, assert_within_budget


def draw(*shape, kv_heads=None, kv_len=None, dtype=torch.bfloat16, value_dim=None, seed=0):
    """query [*shape], and key and value of kv_heads and kv_len where they differ."""
    generator = torch.Generator().manual_seed(seed)
    *outer, length, head_dim = shape
    if kv_heads is not None:
        outer = [*outer[:-1], kv_heads]
    length = length if kv_len is None else kv_len
    shapes = [shape, (*outer, length, head_dim), (*outer, length, value_dim or head_dim)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def rounded(x):
    """x with the rounding of e4m3 and one scale."""
    return ops.quantize(x).dequantize(torch.float64)


def check_budget(out, query, key, value, **options):
    """Within twice the error of FP8 inputs and weights, both in plain torch, against float64."""
    wide = [x.double() for x in (query, key, value)]
    truth = F.scaled_dot_product_attention(*wide, **options)
    narrow = [rounded(x) for x in (query, key, value)]
    assert_within_budget(out, truth=truth, model=with_fp8_weights(*narrow, **options))


def with_fp8_weights(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """What torch documents for its function, with P rounded relative to each row's maximum."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen if attn_mask is None else attn_mask
    p = (logits.masked_fill(~seen, -torch.inf)).softmax(-1)
    top = p.amax(-1, keepdim=True)
    p8 = (p / top * 256).to(torch.float8_e4m3fn).double() / 256 * top
    return p8 @ v


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 65, 64), {}),
        ((1, 3, 63, 72), {}),
        ((2, 1, 1, 64), {"kv_len": 130}),
        ((1, 5, 40, 128), {"kv_len": 1}),
        ((2, 3, 33, 40), {"kv_len": 70, "value_dim": 24}),
        ((1, 2, 33, 32), {"value_dim": 80}),
        ((1, 2, 20, 9), {}),
        ((7, 30, 64), {}),  # no batch
        ((30, 64), {}),  # nor heads
        ((2, 3, 2, 30, 64), {}),  # two dimensions of batch
    ],
    ids=str,
)
def test_shapes_of_torch(shape, options):
    qkv = draw(*shape, **options)
    out = octavo.scaled_dot_product_attention(*qkv)
    assert out.shape == F.scaled_dot_product_attention(*qkv).shape
    check_budget(out, *qkv)


def test_the_layout_is_torchs_and_not_that_of_ops_attention():
    qkv = draw(2, 8, 8, 64, seed=1)  # either reading fits
    truth = F.scaled_dot_product_attention(*qkv).float()
    assert relative_rms(octavo.scaled_dot_product_attention(*qkv), truth) < 0.1
    assert relative_rms(ops.attention(*qkv), truth) > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_result_has_the_dtype_of_the_query(dtype):
    qkv = draw(1, 2, 40, 64, dtype=dtype)
    out = octavo.scaled_dot_product_attention(*qkv)
    assert out.dtype == dtype
    check_budget(out, *qkv)


@pytest.mark.parametrize("lengths", [(40, 40), (40, 70), (70, 40), (1, 9), (9, 1), (200, 130)])
def test_is_causal_lines_up_the_first_query_with_the_first_key(lengths):
    qkv = draw(2, 3, lengths[0], 64, kv_len=lengths[1])
    out = octavo.scaled_dot_product_attention(*qkv, is_causal=True)
    check_budget(out, *qkv, is_causal=True)


def test_keys_that_no_query_sees_choose_no_scale():
    query, key, value = draw(1, 2, 8, 64, kv_len=20)
    expected = octavo.scaled_dot_product_attention(query, key, value, is_causal=True)
    key[:, :, 8:] *= 1000
    value[:, :, 8:] *= 1000
    out = octavo.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert_same_bits(out.contiguous(), expected.contiguous())


def test_grouped_heads():
    qkv = draw(2, 6, 33, 64, kv_heads=2)
    out = octavo.scaled_dot_product_attention(*qkv, enable_gqa=True)
    check_budget(out, *qkv, enable_gqa=True)
    flat = [x[0] for x in qkv]
    out = octavo.scaled_dot_product_attention(*flat, enable_gqa=True)
    check_budget(out, *flat, enable_gqa=True)


def test_scale():
    qkv = draw(1, 2, 33, 64)
    out = octavo.scaled_dot_product_attention(*qkv, scale=0.3)
    check_budget(out, *qkv, scale=0.3)


@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 70), (1, 1, 70), (1, 70), (2, 1, 1, 1), (1, 1, 1, 70)], ids=str
)
def test_masks_that_hide_keys(shape):
    qkv = draw(2, 3, 40, 64, kv_len=70)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[..., 0] = True
    out = octavo.scaled_dot_product_attention(*qkv, attn_mask=mask)
    check_budget(out, *qkv, attn_mask=mask)


def test_a_mask_of_five_dimensions_and_one_of_two():
    qkv = draw(2, 3, 2, 10, 64)
    mask = torch.rand(1, 3, 1, 1, 10, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[..., 0] = True
    check_budget(octavo.scaled_dot_product_attention(*qkv, mask), *qkv, attn_mask=mask)
    flat = draw(1, 64, kv_len=10)
    mask = torch.arange(10)[None] < 6
    check_budget(octavo.scaled_dot_product_attention(*flat, mask), *flat, attn_mask=mask)


def test_a_query_that_sees_nothing_gives_zeros():
    qkv = draw(2, 3, 5, 64, kv_len=7)
    mask = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 7)
    out = octavo.scaled_dot_product_attention(*qkv, mask)
    assert out[0].isfinite().all() and bool((out[1] == 0).all())
    assert_same_bits(out[1], F.scaled_dot_product_attention(*qkv, mask)[1])


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 2, 0, 64), (2, 0, 5, 64)], ids=str)
def test_nothing_to_attend(shape):
    qkv = draw(*shape)
    assert octavo.scaled_dot_product_attention(*qkv).shape == shape


def test_no_keys():
    qkv = draw(2, 2, 5, 64, kv_len=0, value_dim=40)
    mask = torch.ones(2, 1, 1, 0, dtype=torch.bool)
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}):
        out = octavo.scaled_dot_product_attention(*qkv, **options)
        assert_same_bits(out, torch.zeros(2, 2, 5, 40, dtype=torch.bfloat16))


def test_heads_of_their_own_scale():
    qkv = draw(1, 2, 40, 64)
    for x in qkv:
        x[:, 1] *= 1e6
    exact = F.scaled_dot_product_attention(*(x.double() for x in qkv))
    alone = octavo.scaled_dot_product_attention(*qkv, granularity=PerHead())
    together = octavo.scaled_dot_product_attention(*qkv)
    assert relative_rms(alone[:, 0], exact[:, 0]) < 0.06
    assert relative_rms(together[:, 0], exact[:, 0]) > 0.2


def test_static_scales():
    qkv = draw(1, 2, 40, 64)
    tokens_first = [x.transpose(1, 2) for x in qkv]
    scales = ops.quantize_qkv(*tokens_first).scales
    assert_same_bits(
        octavo.scaled_dot_product_attention(*qkv, scales=scales).contiguous(),
        octavo.scaled_dot_product_attention(*qkv).contiguous(),
    )
    with pytest.raises(ConfigError, match="leave granularity out"):
        octavo.scaled_dot_product_attention(*qkv, scales=scales, granularity=PerHead())


def test_views_are_not_copied(monkeypatch):
    """Views of a joint projection, as modules make them, reach the op as they are."""
    joint = torch.randn(2, 30, 3, 4, 64, dtype=torch.bfloat16)
    qkv = [x.transpose(1, 2) for x in joint.unbind(2)]
    module = octavo.ops.scaled_dot_product_attention.__globals__
    seen = []

    def note(q, k, v, **options):
        seen.extend((q, k, v))
        return ops.quantize_qkv(q, k, v, **options)

    monkeypatch.setitem(module, "quantize_qkv", note)
    out = octavo.scaled_dot_product_attention(*qkv)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in qkv]
    assert [x.stride() for x in seen] == [x.stride() for x in joint.unbind(2)]
    # What follows in a module, .transpose(1, 2).flatten(2), is a view as well.
    assert out.transpose(1, 2).is_contiguous()
    again = octavo.scaled_dot_product_attention(*(x.contiguous() for x in qkv))
    assert_same_bits(out.contiguous(), again.contiguous())


def test_nan_stays_and_inf_saturates():
    qkv = draw(1, 2, 8, 64)
    qkv[0][0, 0, 3, 0] = torch.nan
    out = octavo.scaled_dot_product_attention(*qkv)
    assert out[0, 0, 3].isnan().all() and int(out.isnan().sum()) == 64
    qkv = draw(1, 2, 8, 64)
    qkv[2][0, 0, 3, 0] = torch.inf
    assert octavo.scaled_dot_product_attention(*qkv).isfinite().all()


def test_gradients_raise():
    query, key, value = draw(1, 2, 8, 64, dtype=torch.float32)
    out = octavo.scaled_dot_product_attention(query.requires_grad_(), key, value)
    with pytest.raises(UnsupportedError, match="has no gradient: expected inference"):
        out.sum().backward()
    with torch.no_grad():
        assert not octavo.scaled_dot_product_attention(query, key, value).requires_grad


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 0.1}, UnsupportedError, r"expected dropout_p=0\.0, got 0\.1"),
        (
            {"attn_mask": torch.zeros(8, 8)},
            UnsupportedError,
            r"expected a bool attn_mask, .* got torch\.float32: FP8 attention adds no bias",
        ),
        (
            {"attn_mask": torch.ones(8, 8, dtype=torch.bool)},
            UnsupportedError,
            r"the same for all heads and queries, such as \[1, 1, 1, 8\], got \[8, 8\]",
        ),
        (
            {"attn_mask": torch.ones(1, 4, 1, 8, dtype=torch.bool)},
            UnsupportedError,
            r"got \[1, 4, 1, 8\]",
        ),
        (
            {"attn_mask": torch.ones(1, 9, dtype=torch.bool)},
            ConfigError,
            r"broadcasts to \[2, 4, 8, 8\], got \[1, 9\]",
        ),
        (
            {"attn_mask": torch.ones(1, 2, 1, 1, 8, dtype=torch.bool)},
            ConfigError,
            r"got \[1, 2, 1, 1, 8\]",
        ),
        (
            {"attn_mask": torch.ones(1, 8, dtype=torch.bool), "is_causal": True},
            ConfigError,
            "expected attn_mask or is_causal=True, got both",
        ),
        ({"scale": -1.0}, UnsupportedError, r"expected a positive finite scale, got -1\.0"),
        ({"scale": 0.0}, UnsupportedError, r"got 0\.0"),
        ({"impl": "none"}, ConfigError, "expected impl for attention, one of"),
    ],
)
def test_what_fp8_cannot_do(options, error, message):
    with pytest.raises(error, match=message):
        octavo.scaled_dot_product_attention(*draw(2, 4, 8, 64), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k[:, :2], v[:, :2]), "pass enable_gqa=True for grouped heads"),
        (lambda q, k, v: (q, k[:1], v[:1]), "of one batch"),
        (lambda q, k, v: (q, k, v[:, :, :3]), "key and value of the same heads and length"),
        (lambda q, k, v: (q, k[..., :32], v), "of one head_dim above 0, got 64 and 32"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v), "of one head_dim above 0, got 0 and 0"),
        (lambda q, k, v: (q, k[0], v[0]), r"expected query, key and value \[\.\.\., heads, length"),
        (lambda q, k, v: (q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), r"heads, length, head_dim\]"),
        (lambda q, k, v: (q, k.half(), v), "in one dtype, got torch.bfloat16, torch.float16"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "got torch.float64"),
    ],
)
def test_tensors_that_do_not_fit(change, message):
    with pytest.raises(ConfigError, match=message):
        octavo.scaled_dot_product_attention(*change(*draw(2, 4, 8, 64)))


def test_grouped_heads_that_do_not_divide():
    qkv = draw(2, 4, 8, 64, kv_heads=3)
    with pytest.raises(ConfigError, match="a multiple of the KV heads, got 4 and 3"):
        octavo.scaled_dot_product_attention(*qkv, enable_gqa=True)


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    device = Device(type="cuda", name="NVIDIA A100", capability=(8, 0))
    monkeypatch.setattr(check, "describe", lambda _: device)
    with pytest.raises(UnsupportedError, match=r"scaled_dot_product_attention: .* \(sm_80\)"):
        octavo.scaled_dot_product_attention(*draw(1, 2, 8, 64))
    out = octavo.scaled_dot_product_attention(*draw(1, 2, 8, 64), impl="reference")
    assert out.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kv_len", [8, 5, 20])
def test_one_graph(kv_len):
    torch._dynamo.reset()
    compiled = torch.compile(
        octavo.scaled_dot_product_attention, fullgraph=True, backend="aot_eager"
    )
    qkv = draw(1, 2, 8, 64, kv_len=kv_len)
    mask = torch.arange(kv_len) != 2
    for options in ({"is_causal": True}, {"attn_mask": mask[None, None, None]}):
        out = compiled(*qkv, **options)
        expected = octavo.scaled_dot_product_attention(*qkv, **options)
        assert_same_bits(out.contiguous(), expected.contiguous())
    torch._dynamo.reset()


def test_ops_attention_points_to_torchs_layout_where_heads_contradict():
    query, key, value = draw(1, 4, 60, 64, kv_len=70)
    hint = (
        r"for torch's \[\.\.\., heads, length, head_dim\] use octavo\.scaled_dot_product_attention"
    )
    with pytest.raises(ConfigError, match=hint):
        ops.attention(query, key, value, AttentionSpec())
    with pytest.raises(ConfigError, match=hint):
        ops.quantize_qkv(query, key, value)


def test_scales_of_the_wrong_number_of_heads():
    scales = QkvScales(torch.ones(3), torch.ones(4), torch.ones(4))
    with pytest.raises(ConfigError, match=r"q scale of shape \[\] or \[4\]"):
        octavo.scaled_dot_product_attention(*draw(1, 4, 8, 64), scales=scales)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "options", "call"),
    [
        ((2, 4, 300, 128), {}, {}),
        ((1, 3, 257, 72), {}, {"is_causal": True}),
        ((2, 8, 100, 64), {"kv_heads": 2, "kv_len": 333}, {"enable_gqa": True}),
        ((1, 4, 333, 64), {"kv_len": 100}, {"is_causal": True}),
        ((1, 2, 40, 16), {}, {"scale": 0.3}),
    ],
    ids=str,
)
def test_kernels_have_the_layout_of_torch(shape, options, call):
    """On a GPU, without a copy of what lies as torch's layers leave it."""
    qkv = [x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in draw(*shape, **options)]
    out = octavo.scaled_dot_product_attention(*(x.cuda() for x in qkv), **call)
    assert out.is_cuda and out.dtype == torch.bfloat16
    check_budget(out.cpu(), *qkv, **call)


@pytest.mark.gpu
def test_padding_masks_on_a_gpu():
    qkv = draw(2, 4, 130, 64)
    mask = torch.arange(130)[None, None, None] < torch.tensor([70, 130]).view(2, 1, 1, 1)
    out = octavo.scaled_dot_product_attention(*(x.cuda() for x in qkv), attn_mask=mask.cuda())
    check_budget(out.cpu(), *qkv, attn_mask=mask)
