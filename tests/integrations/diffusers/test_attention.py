"""FP8 attention as diffusers' backend: against torch's own attention, mask by mask."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import nn

from octavo import ConfigError, Recipe, UnsupportedError, apply_, restore_
from octavo.integrations.diffusers import attention
from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import PerHead, PerTensor
from octavo.numerics.quantize import quantize
from octavo.recipe import AttentionSettings
from octavo.testing.asserts import assert_same_bits, assert_within_budget
from octavo_testkit.models.tiny_pipelines import FAMILIES, load_pipeline, run_pipeline

BATCH, HEADS, HEAD_DIM = 2, 4, 16
TENSOR = AttentionSettings()
HEAD = AttentionSettings(granularity="head")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def make_qkv(q_len=33, kv_len=33, num_kv_heads=HEADS, dtype=torch.bfloat16, device="cpu"):
    lengths = ((q_len, HEADS), (kv_len, num_kv_heads), (kv_len, num_kv_heads))
    return [torch.randn(BATCH, n, h, HEAD_DIM).to(device, dtype) for n, h in lengths]


def dispatch(qkv, settings=TENSOR, promote_every=1, **options):
    backend = attention.register(settings, promote_every)
    return dispatch_attention_fn(*qkv, backend=backend, **options)


def sdpa(qkv, is_causal=False, attn_mask=None, scale=None):
    q, k, v = (x.double().transpose(1, 2) for x in qkv)
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def assert_like_sdpa(qkv, out, granularity=None, **options):
    """As close to torch in float64 as torch itself on operands that were rounded to FP8."""
    granularity = granularity or PerTensor()
    rounded = [quantize(x.float(), granularity, E4M3).dequantize() for x in qkv]
    assert out.dtype == qkv[0].dtype
    assert_within_budget(out, truth=sdpa(qkv, **options), model=sdpa(rounded, **options))


def padding(*lengths, total=33):
    return torch.arange(total) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 33), (1, 33), (33, 1), (7, 130), (130, 7)])
def test_plain(q_len, kv_len, dtype):
    qkv = make_qkv(q_len, kv_len, dtype=dtype)
    assert_like_sdpa(qkv, dispatch(qkv))


def test_one_scale_for_each_head():
    qkv = make_qkv()
    qkv[1][:, :, 0] *= 50  # one loud head spoils the scale of a tensor, not those of the others
    out = dispatch(qkv, HEAD)
    assert_like_sdpa(qkv, out, PerHead())
    assert attention.register(HEAD) is not attention.register(TENSOR)
    assert not torch.equal(out, dispatch(qkv))


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads(num_kv_heads):
    qkv = make_qkv(num_kv_heads=num_kv_heads)
    assert_like_sdpa(qkv, dispatch(qkv, enable_gqa=True))
    with pytest.raises(ConfigError, match="or enable_gqa"):
        dispatch(qkv)


def test_causal():
    qkv = make_qkv(num_kv_heads=2)
    out = dispatch(qkv, is_causal=True, enable_gqa=True)
    assert_like_sdpa(qkv, out, is_causal=True)
    changed = [x.clone() for x in qkv]
    changed[1][:, -1] = changed[1][:, -2]
    changed[2][:, -1] = 0
    later = dispatch(changed, is_causal=True, enable_gqa=True)
    assert_same_bits(later[:, :-1], out[:, :-1])


def test_a_scale_of_the_logits():
    qkv = make_qkv()
    assert_like_sdpa(qkv, dispatch(qkv, scale=0.5), scale=0.5)


@pytest.mark.parametrize("dims", [2, 4])
def test_key_padding(dims):
    qkv, keys = make_qkv(), padding(20, 33)
    out = dispatch(qkv, attn_mask=keys if dims == 2 else keys[:, None, None])
    assert_like_sdpa(qkv, out, attn_mask=keys[:, None, None])
    assert not torch.equal(out, dispatch(qkv))


def test_padding_in_the_middle_is_never_seen():
    qkv, keys = make_qkv(), torch.ones(BATCH, 33, dtype=torch.bool)
    keys[0, 5:11] = False
    out = dispatch(qkv, attn_mask=keys[:, None, None])
    assert_like_sdpa(qkv, out, attn_mask=keys[:, None, None])
    qkv[2][0, 5:11] = -qkv[2][0, 5:11]
    assert_same_bits(dispatch(qkv, attn_mask=keys[:, None, None]), out)


def test_a_full_mask_that_is_padding():
    """HunyuanVideo-1.5: queries of padding see nothing, and torch gives them 0."""
    qkv, valid = make_qkv(), padding(20, 33)
    mask = valid[:, None, :, None] & valid[:, None, None]
    out = dispatch(qkv, attn_mask=mask)
    assert_like_sdpa(qkv, out, attn_mask=mask)
    assert (out[0, 20:] == 0).all() and (out[0, :20] != 0).any()


def test_a_sequence_without_keys():
    qkv, keys = make_qkv(), padding(0, 33)
    out = dispatch(qkv, attn_mask=keys[:, None, None])
    assert (out[0] == 0).all()
    assert_like_sdpa(qkv, out, attn_mask=keys[:, None, None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.ones(33, 33, dtype=torch.bool).tril()}, "got another pattern"),
        ({"attn_mask": torch.zeros(BATCH, 1, 1, 33)}, "expected a bool mask"),
        ({"attn_mask": padding(33, 33)[:, None, None], "is_causal": True}, "got both"),
        ({"dropout_p": 0.1}, "expected dropout_p 0"),
        ({"attention_kwargs": {"return_lse": True}}, "expected no return_lse"),
        ({"parallel_config": object()}, "expected no parallel_config"),
    ],
    ids=["pattern", "bias", "causal and mask", "dropout", "lse", "parallel"],
)
def test_what_it_cannot_do_is_refused(options, message):
    with pytest.raises(UnsupportedError, match=message):
        dispatch(make_qkv(), **options)


def test_causal_queries_of_other_tokens_are_refused():
    with pytest.raises(UnsupportedError, match="5 queries and 33 keys"):
        dispatch(make_qkv(5, 33), is_causal=True)


def test_what_other_backends_take_is_not_dropped():
    """diffusers passes on what a backend's signature names, and drops the rest unseen."""
    attention.register(TENSOR)
    names = _AttentionBackendRegistry._supported_arg_names
    known = set().union(*names.values()) - {"others"}
    assert known <= names[AttentionBackendName("octavo")]
    own = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    own |= {"return_lse", "_parallel_config"}
    for name in sorted(known - own):
        with pytest.raises(UnsupportedError, match=f"expected no {name}, got 7"):
            dispatch(make_qkv(), attention_kwargs={name: 7})


def test_nan_stays_visible():
    qkv = make_qkv()
    qkv[0][0, 3, 1, 2] = torch.nan
    out = dispatch(qkv)
    assert out[0, 3, 1].isnan().all() and out[1].isfinite().all()


def test_the_member_is_appended_once_and_copies_are_the_same():
    member = attention.register(TENSOR)
    assert attention.register(AttentionSettings(granularity="tensor")) is member
    assert AttentionBackendName("octavo") is member is AttentionBackendName["OCTAVO"]
    assert pickle.loads(pickle.dumps(member)) is member and copy.deepcopy(member) is member
    assert list(AttentionBackendName).count(member) == 1
    never = attention.register(TENSOR, None)
    assert never.value == "octavo_promote_never" and never is not member


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reaches_the_backend_with_the_masks_that_we_know(
    family, folder_of, monkeypatch
):
    pipe = load_pipeline(folder_of(family))
    apply_(pipe, Recipe(attention="fp8"))
    member = AttentionBackendName("octavo")
    run, calls = _AttentionBackendRegistry._backends[member], []

    def note(query, key, value, **options):
        calls.append((query, key, options))
        return run(query, key, value, **options)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, member, note)
    run_pipeline(pipe, family)
    masks = [options["attn_mask"] for _, _, options in calls]
    assert calls
    if family == "hunyuan_video":
        assert {mask.dim() for mask in masks} == {4}
        assert all(mask.shape[2] == mask.shape[3] > 2000 for mask in masks)
    elif family == "cosmos3":
        assert [options["is_causal"] for _, _, options in calls] == [True, False] * 2
        assert all(query.shape[2] == 2 * key.shape[2] for query, key, _ in calls)
        assert all(query.shape[1] < key.shape[1] for query, key, _ in calls[1::2])
    elif family == "wan":
        assert any(query.shape[1] != key.shape[1] for query, key, _ in calls)
        assert masks == [None] * len(calls)
    elif family != "z_image":
        assert masks == [None] * len(calls)


@pytest.mark.parametrize("family", ["qwen_image", "z_image"])
def test_prompts_of_two_lengths_are_masked_as_in_bf16(family, folder_of, monkeypatch):
    """A batch whose shorter prompt is padded: each picture is as close as it is alone."""
    prompts = ["a cat", "a much longer prompt about a dog that runs over a field of flowers"]
    options = dict(FAMILIES[family].call, num_inference_steps=1, output_type="latent")
    options["max_sequence_length"] = 512  # of bytes here: the templates are long
    if "negative_prompt" in options:
        options["negative_prompt"] = ["x", "y"]
    masks = []

    def latents(pipe):
        generator = torch.Generator().manual_seed(0)
        given = list(prompts)  # Z-Image's pipeline writes its chat template into the list
        return pipe(prompt=given, generator=generator, **options).images.float()

    pipe = load_pipeline(folder_of(family))
    before = latents(pipe)
    apply_(pipe, Recipe(attention="fp8"))
    member = AttentionBackendName("octavo")
    run = _AttentionBackendRegistry._backends[member]

    def note(*args, **options):
        masks.append(options["attn_mask"])
        return run(*args, **options)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, member, note)
    after = latents(pipe)
    assert any(mask is not None and not mask.all() for mask in masks)
    for i in range(2):
        assert 0 < (after[i] - before[i]).norm() / before[i].norm() < 0.05


def test_skipped_layers(folder_of):
    pipe = load_pipeline(folder_of("wan"))
    changes = apply_(pipe, Recipe(attention="fp8", skip_layers=["attn2", "1"]))
    assert changes.layers["transformer.attention"] == ["blocks.0.attn1"]
    backends = {
        name: layer.processor._attention_backend
        for name, layer in attention.find_layers(pipe.transformer).items()
    }
    assert backends.pop("blocks.0.attn1") == "octavo"
    assert set(backends.values()) == {None}


def test_a_backend_that_was_set_comes_back(folder_of):
    transformer = load_pipeline(folder_of("flux")).transformer
    layer = transformer.transformer_blocks[0].attn
    layer.processor._attention_backend = AttentionBackendName.NATIVE
    apply_(transformer, Recipe(attention={"granularity": "head"}, promote_every=None))
    assert layer.processor._attention_backend == "octavo_head_promote_never"
    with pytest.raises(ConfigError, match="got FP8 already"):
        apply_(transformer, Recipe(attention="fp8"))
    restore_(transformer)
    assert layer.processor._attention_backend is AttentionBackendName.NATIVE


def test_shared_and_parallel_processors(folder_of):
    transformer = load_pipeline(folder_of("flux")).transformer
    first = transformer.transformer_blocks[0].attn
    second = transformer.single_transformer_blocks[0].attn
    second.processor = first.processor
    with pytest.raises(UnsupportedError, match="expected a processor of its own"):
        apply_(transformer, Recipe(attention="fp8", skip_layers=["single_transformer_blocks"]))
    assert len(apply_(transformer, Recipe(attention="fp8")).layers["attention"]) == 2
    assert len(restore_(transformer).layers["attention"]) == 2
    first.processor._parallel_config = object()
    with pytest.raises(UnsupportedError, match="got context parallelism"):
        apply_(transformer, Recipe(attention="fp8"))


@pytest.mark.parametrize("mask", [None, "keys", "full"])
def test_compiled_in_one_graph(mask):
    valid = padding(20, 33)
    masks = {"keys": valid[:, None, None], "full": valid[:, None, :, None] & valid[:, None, None]}
    qkv, options = make_qkv(), {"attn_mask": masks.get(mask)}
    attention.register(TENSOR)
    compiled = torch.compile(dispatch, fullgraph=True, backend="eager")
    assert_same_bits(compiled(qkv, **options), dispatch(qkv, **options))


def test_a_compiled_graph_refuses_other_masks_too():
    compiled = torch.compile(dispatch, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="got another pattern"):
        compiled(make_qkv(), attn_mask=torch.ones(33, 33, dtype=torch.bool).tril())


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, "keys", "full"])
@pytest.mark.parametrize("q_len", [33, 300])
def test_on_a_gpu(q_len, mask):
    lengths = [(q_len, HEADS), (300, HEADS), (300, HEADS)]
    qkv = [torch.randn(BATCH, n, h, 64, device="cuda", dtype=torch.bfloat16) for n, h in lengths]
    keys = padding(200, 300, total=300).cuda()
    queries = padding(20, q_len, total=q_len).cuda()
    masks = {"keys": keys[:, None, None], "full": queries[:, None, :, None] & keys[:, None, None]}
    out = dispatch(qkv, attn_mask=masks.get(mask))
    assert_like_sdpa(qkv, out, attn_mask=masks.get(mask))
