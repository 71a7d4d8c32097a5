"""The tensors of a pass: where every token comes from and goes to."""

import torch

from octavo.cache.spec import CacheSpec
from octavo.cache.storage import PagedStorage
from octavo.serving.engine.request import Request
from octavo.serving.engine.scheduler import Batch, Chunk
from octavo.serving.engine.sequence import Sequence
from octavo.serving.engine.step import make_step


def make_chunk(pages, start, stop, num_tokens):
    sequence = Sequence(Request(request_id="a", prompt=tuple(range(100, 100 + num_tokens))), 0)
    sequence.pages.extend(pages)
    return Chunk(sequence, start, stop - start, stop == num_tokens)


def step_of(*chunks):
    spec = CacheSpec(num_layers=1, num_kv_heads=1, head_dim=16, page_size=16, dtype=torch.float32)
    return make_step(Batch(chunks), PagedStorage(spec, 16, "cpu"))


def test_one_token_and_a_chunk_across_pages():
    step = step_of(make_chunk([7, 3], 20, 21, 21), make_chunk([5, 9, 2], 14, 34, 40))
    assert step.ids.tolist() == [120, *range(114, 134)]
    assert step.positions.tolist() == [20, *range(14, 34)]
    in_pages = [5 * 16 + 14, 5 * 16 + 15, *range(9 * 16, 10 * 16), 2 * 16, 2 * 16 + 1]
    assert step.slots.tolist() == [3 * 16 + 4, *in_pages]
    assert step.rows.tolist() == [0]
    assert step.single.page_table.tolist() == [[7, 3, 0, 0]]
    assert step.multi.page_table.tolist() == [[5, 9, 2, 0]]
    assert (step.single.lengths.tolist(), step.multi.lengths.tolist()) == ([21], [34])
    assert step.cu_seqlens.tolist() == [0, 20]
    assert (step.max_seqlen, step.num_cached_tokens) == (20, 34)


def test_tables_are_as_wide_as_a_power_of_two_and_aligned():
    step = step_of(make_chunk(range(5), 64, 65, 65), make_chunk([9], 2, 3, 3))
    assert step.single.page_table.shape == (2, 8)
    assert step.multi.num_sequences == 0 and step.multi.page_table.shape == (0, 1)
    assert step.rows.tolist() == [0, 1]
    for tensor in (step.single.page_table, step.single.lengths, step.cu_seqlens):
        assert tensor.storage_offset() % 4 == 0


def test_several_chunks_end_where_the_next_begins():
    step = step_of(make_chunk([0], 0, 3, 9), make_chunk([1], 0, 2, 2))
    assert step.cu_seqlens.tolist() == [0, 3, 5]
    assert step.rows.tolist() == [4]
    assert step.single.num_sequences == 0
