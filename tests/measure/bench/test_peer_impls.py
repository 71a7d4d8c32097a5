"""A peer as the implementation of attention of prompts: FlashAttention-3 over gathered pages."""

from pathlib import Path

import pytest
import torch

from octavo import ops
from octavo.cache.view import PagedView
from octavo.errors import UnsupportedError
from octavo.measure.bench import peers
from octavo.measure.bench.peer_impls import gather, registered_prefill
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.error import relative_rms
from octavo.ops.select import impl_names
from octavo.reference.attention import attention

LENGTHS, PAGE_SIZE = (9, 4, 1), 4
# Queries of each sequence: its newest tokens, or all of them.
NEW = (3, 4, 1)


class Library:
    """vLLM's entry with keys of a fixed room for each sequence, by its 37 places."""

    folder = None

    def fwd(self, q, k, v, *rest):
        out, ends_q, ends_k = rest[3:6]
        lengths, (max_q, max_k), table = rest[8], rest[9:11], rest[11]
        scale, is_causal, left, right = rest[20:24]
        sinks = rest[30]
        assert len(rest) == 34 and right == (-1 if left == -1 else 0)
        window = None if left == -1 else left + 1
        assert table is None and max_q == max(NEW) and is_causal
        assert int(ends_k.diff().max()) == max_k
        for index, length in enumerate(lengths.tolist()):
            own = slice(*ends_q[index : index + 2].tolist())
            first = int(ends_k[index])
            keys, values = (x[None, first : first + length] for x in (k, v))
            spec = AttentionSpec(causal=True, softmax_scale=scale, window=window)
            result, _ = attention(q[None, own], keys, values, spec, sinks=sinks)
            out[own] = result[0].to(out.dtype)


@pytest.fixture
def library(monkeypatch):
    one = Library()

    def load(namespace, folder):
        one.folder = folder
        return one

    monkeypatch.setattr(peers, "load", load)
    return one


def make_view(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(2, 8, 2, PAGE_SIZE, 16, generator=generator).to(dtype)
    table = torch.tensor([[5, 2, 7, 0], [1, 0, 0, 0], [6, 0, 0, 0]], dtype=torch.int32)
    pages[:, 7, :, 1:] = float("nan")  # nobody has written there
    pages[:, 6, :, 1:] = float("nan")
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    one = torch.ones(())
    return PagedView(pages[0], pages[1], one, one, table, lengths)


def ends():
    return torch.tensor([0, *NEW]).cumsum(0).to(torch.int32)


def test_what_is_gathered_is_the_sequences_and_zeros():
    view = make_view()
    key, value, room = gather(view, sum(LENGTHS))
    assert room == 16 and key.shape == value.shape == (3 * room, 2, 16)
    for index, length in enumerate(LENGTHS):
        rows = key[index * room : (index + 1) * room]
        expected = [
            view.key_pages[view.page_table[index, token // PAGE_SIZE], :, token % PAGE_SIZE]
            for token in range(length)
        ]
        assert torch.equal(rows[:length], torch.stack(expected))
        assert (
            not rows[length:].any() and not value[index * room + length : (index + 1) * room].any()
        )
    short = PagedView(
        *[x[:1] if x is view.page_table or x is view.lengths else x for x in view.tensors]
    )
    assert gather(short, 9)[2] == 12  # three of its four pages


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 3.0, 0.0])])
def test_it_is_asked_for_by_name(library, window, sinks):
    q = torch.randn(sum(NEW), 4, 16).bfloat16()
    call = (q, make_view(), ends(), max(NEW), AttentionSpec(causal=True, window=window))
    more = {"num_cached_tokens": sum(LENGTHS), "sinks": sinks}
    expected = ops.prefill_attention(*call, impl="reference", **more)
    with registered_prefill(Path("peers")) as name:
        actual = ops.prefill_attention(*call, impl=name, **more)
        assert actual.shape == q.shape and library.folder == Path("peers")
        assert relative_rms(actual, expected) < 0.01
    assert name not in impl_names("prefill_attention")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (AttentionSpec(causal=True, softcap=4.0), {}, "causal, sinks, window; got softcap"),
        (AttentionSpec(window=4), {}, "window for causal attention, got another"),
        (AttentionSpec(causal=True, softmax_scale=1.0), {}, "softmax scale"),
        (AttentionSpec(causal=True), {"return_lse": True}, "got lse"),
    ],
)
def test_what_it_is_not_called_for(library, spec, options, message):
    q = torch.randn(sum(NEW), 4, 16).bfloat16()
    with registered_prefill(None) as name, pytest.raises(UnsupportedError, match=message):
        ops.prefill_attention(q, make_view(), ends(), max(NEW), spec, impl=name, **options)


def test_dtypes_it_is_not_called_for(library):
    q = torch.randn(sum(NEW), 4, 16)
    with registered_prefill(None) as name:
        with pytest.raises(UnsupportedError, match="called in bfloat16"):
            ops.prefill_attention(q, make_view(torch.float32), ends(), max(NEW), impl=name)
        pages = make_view(torch.float32)
        fp8 = PagedView(*(x.to(torch.float8_e4m3fn) if x.dim() == 4 else x for x in pages.tensors))
        with pytest.raises(UnsupportedError, match="over bfloat16"):
            ops.prefill_attention(q.bfloat16(), fp8, ends(), max(NEW), impl=name)
