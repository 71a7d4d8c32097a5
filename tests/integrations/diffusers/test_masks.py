"""Masks of diffusers: padding is honoured in every shape that it comes in, the rest refused."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from octavo import ConfigError, Recipe, UnsupportedError, apply_
from octavo.integrations.diffusers.attention import reduce_mask
from octavo_testkit.models.fused_models import make

BATCH, Q_LEN, KV_LEN = 3, 5, 7
SIZES = (BATCH, Q_LEN, KV_LEN)


def some_keys():
    keys = torch.ones(BATCH, KV_LEN, dtype=torch.bool)
    keys[0, 2:4] = False  # in the middle: text before images, as in Qwen-Image
    keys[1, 5:] = False
    return keys


def some_queries():
    queries = torch.ones(BATCH, Q_LEN, dtype=torch.bool)
    queries[1, 3:] = False
    return queries


@pytest.mark.parametrize(
    "shape",
    [(BATCH, KV_LEN), (BATCH, 1, 1, KV_LEN), (BATCH, 4, 1, KV_LEN)],
    ids=["two dims", "every query", "every head"],
)
def test_key_padding(shape):
    keys = some_keys()
    mask = keys if len(shape) == 2 else keys[:, None, None].expand(shape)
    reduced = reduce_mask(mask, *SIZES)
    assert reduced.queries is None
    assert torch.equal(reduced.keys, keys)


def test_one_mask_for_the_whole_batch():
    keys = some_keys()[:1]
    assert torch.equal(reduce_mask(keys[:, None, None], *SIZES).keys, keys.expand(BATCH, -1))
    full = (some_queries()[1][:, None] & keys).reshape(Q_LEN, KV_LEN)
    reduced = reduce_mask(full, *SIZES)
    assert torch.equal(reduced.keys, keys.expand(BATCH, -1))
    assert torch.equal(reduced.queries, some_queries()[1:2].expand(BATCH, -1))


@pytest.mark.parametrize("num_heads", [1, 4])
def test_a_product_of_queries_and_keys(num_heads):
    keys, queries = some_keys(), some_queries()
    mask = (queries[:, None, :, None] & keys[:, None, None]).expand(-1, num_heads, -1, -1)
    reduced = reduce_mask(mask, *SIZES)
    assert torch.equal(reduced.keys, keys)
    assert torch.equal(reduced.queries, queries)


def test_a_mask_over_queries_alone():
    queries = some_queries()
    reduced = reduce_mask(queries[:, None, :, None], *SIZES)
    assert reduced.keys.all()
    assert torch.equal(reduced.queries, queries)


def test_nothing_is_visible():
    reduced = reduce_mask(torch.zeros(BATCH, 1, Q_LEN, KV_LEN, dtype=torch.bool), *SIZES)
    assert not reduced.keys.any() and not reduced.queries.any()


def test_one_hidden_pair_is_enough_to_refuse():
    mask = torch.ones(BATCH, 1, Q_LEN, KV_LEN, dtype=torch.bool)
    reduce_mask(mask, *SIZES)
    mask[2, 0, 4, 6] = False
    with pytest.raises(UnsupportedError, match="got another pattern"):
        reduce_mask(mask, *SIZES)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(Q_LEN, KV_LEN, dtype=torch.bool).tril(),
        torch.eye(Q_LEN, KV_LEN, dtype=torch.bool)[None, None],
        torch.tensor([True, False])[None, :, None, None].expand(BATCH, 2, 1, KV_LEN),
    ],
    ids=["causal", "diagonal", "by head"],
)
def test_other_patterns_are_refused(mask):
    with pytest.raises(UnsupportedError, match="got another pattern"):
        reduce_mask(mask, *SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_masks_that_are_added_are_refused(dtype):
    with pytest.raises(UnsupportedError, match="expected a bool mask"):
        reduce_mask(torch.zeros(BATCH, 1, 1, KV_LEN, dtype=dtype), *SIZES)


@pytest.mark.parametrize(
    "shape", [(BATCH, KV_LEN + 1), (2, 1, 1, KV_LEN), (BATCH, 1, 2, KV_LEN), (1, 1, 1, 1, KV_LEN)]
)
def test_masks_of_other_shapes_are_errors(shape):
    with pytest.raises(ConfigError, match="expected a mask that broadcasts"):
        reduce_mask(torch.ones(shape, dtype=torch.bool), *SIZES)


@torch.no_grad()
def test_padded_prompts_of_z_image_in_compiled_blocks():
    """Whose sizes become symbols when blocks of text, of pictures and of both share code."""
    model, inputs = make("z_image", torch.bfloat16)
    apply_(model, Recipe(attention="fp8"))
    expected = model(**inputs)[0]
    torch.compiler.reset()
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    for found, one in zip(model(**inputs)[0], expected, strict=True):
        assert torch.equal(found, one)
