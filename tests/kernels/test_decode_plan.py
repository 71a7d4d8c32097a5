"""Plans of decode steps: what `make_items` says, and items that cover each token once."""

from dataclasses import replace

import pytest
import torch

from octavo import ops
from octavo.errors import ConfigError
from octavo.kernels.decode.config import (
    MAX_SEQUENCES,
    DecodeShape,
    default,
    default_gluon,
    plan_settings,
)
from octavo.kernels.device import Device
from octavo.numerics.attention import AttentionSpec
from octavo.numerics.decode_plan import ITEM_BLOCKS, DecodePlan, PlanSettings, make_items
from octavo.ops.plan_decode import settings_for
from octavo.testing.asserts import assert_same_bits
from octavo.testing.cases import PagedCase
from octavo.testing.inputs import make_paged_view

pytest.importorskip("triton")
from octavo.kernels.decode.triton import make_plan

H200 = Device(type="cuda", name="NVIDIA H200", capability=(9, 0), num_sms=132)
BATCHES = {
    "one": [32768],
    "one-token": [1],
    "nothing": [0],
    "even": [32768] * 8,
    "uneven": [131072, 1000, 2000, 4096, 8192, 16384, 32768, 65536],
    "awkward": [16384] * 24,
    "short": [1024] * 20,
    "mixed": [0, 1, 255, 256, 257, 0, 70000, 3],
    "many": [(i * 7919) % 5000 for i in range(50)],
}


def settings_of(lengths, **changes):
    options = {
        "block_tokens": 256,
        "q_len": 1,
        "window": None,
        "num_slots": 264,
        "programs_per_item": 8,
        "capacity": len(lengths) + 99,
    }
    return PlanSettings(**(options | changes))


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def used(items):
    return items[items[:, 0] >= 0].tolist()


def simulated_makespan(items, settings):
    """When the last program ends, if each slot takes the next item as soon as it is free."""
    free = [0] * settings.num_slots
    for _, first, end, *_ in used(items):
        for _ in range(settings.programs_per_item):
            slot = free.index(min(free))
            free[slot] += end - first + ITEM_BLOCKS
    return max(free)


@pytest.mark.parametrize("changes", [{}, {"window": 5000, "q_len": 3, "programs_per_item": 5}])
@pytest.mark.parametrize("name", BATCHES)
def test_the_kernel_makes_the_plan_that_is_specified(name, changes, device):
    lengths = int32(BATCHES[name], device)
    settings = settings_of(lengths, **changes)
    items, counters = make_plan(lengths, settings, max_blocks=1024)
    assert_same_bits(items.cpu(), make_items(lengths, settings))
    assert not counters.any()
    assert len(counters) == len(lengths) * settings.programs_per_item


@pytest.mark.parametrize("window", [None, 1, 300, 5000])
@pytest.mark.parametrize("name", BATCHES)
def test_items_cover_what_each_sequence_sees_once(name, window):
    lengths = BATCHES[name]
    settings = settings_of(lengths, window=window, q_len=2)
    rows = used(make_items(int32(lengths), settings))
    for sequence, length in enumerate(lengths):
        own = [row for row in rows if row[0] == sequence]
        assert [row[3] for row in own] == list(range(len(own)))
        assert {row[4] for row in own} == {len(own)}
        assert {row[5] for row in own} == {length}
        oldest = 0 if window is None else max(0, length - 2 - window + 1)
        assert own[0][1] == oldest // settings.block_tokens
        assert own[-1][2] == -(-length // settings.block_tokens)
        assert all(a[2] == b[1] for a, b in zip(own, own[1:], strict=False))
    sizes = [row[2] - row[1] for row in rows]
    assert all(a >= b - 1 for a, b in zip(sizes, sizes[1:], strict=False))  # longest first


@pytest.mark.parametrize(
    ("name", "factor"),
    [("one", 1.15), ("even", 1.05), ("uneven", 1.05), ("awkward", 1.05), ("many", 1.3)],
)
def test_programs_end_together(name, factor):
    """All slots busy to the end, but for this factor; the cost of the items is work as well."""
    lengths = BATCHES[name]
    settings = settings_of(lengths)
    items = make_items(int32(lengths), settings)
    total = sum(-(-length // settings.block_tokens) for length in lengths)
    work = (total + ITEM_BLOCKS * len(used(items))) * settings.programs_per_item
    assert simulated_makespan(items, settings) <= factor * work / settings.num_slots


def test_uneven_batches_take_no_longer_than_even_ones():
    even, uneven = ([32768] * 8, BATCHES["uneven"])
    times = [
        simulated_makespan(make_items(int32(x), settings_of(x)), settings_of(x))
        for x in (even, uneven)
    ]
    assert times[1] <= 1.05 * times[0]


def test_a_very_large_batch(device):
    lengths = [(i * 7919) % 700 for i in range(5000)]
    settings = settings_of(lengths)
    items, counters = make_plan(int32(lengths, device), settings, max_blocks=3)
    assert_same_bits(items.cpu(), make_items(int32(lengths), settings))
    assert len(counters) == 8 * 5000 and not counters.any()


def test_a_batch_without_sequences(device):
    settings = settings_of([], capacity=3)
    items, counters = make_plan(int32([], device), settings, max_blocks=4)
    assert_same_bits(items.cpu(), make_items(int32([]), settings))
    assert len(counters) == 0


@pytest.mark.parametrize("configure", [default, default_gluon])
@pytest.mark.parametrize("num_sequences", [1, 8, 300])
def test_the_capacity_holds_every_plan(num_sequences, configure):
    shape = DecodeShape(
        num_sequences=num_sequences,
        q_len=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=64,
        max_pages=2048,
        q_dtype=torch.bfloat16,
        page_dtype=torch.float8_e4m3fn,
    )
    settings = plan_settings(shape, configure(shape, H200), H200)
    generator = torch.Generator().manual_seed(num_sequences)
    for high in (2, 300, 131072):
        lengths = torch.randint(0, high, (num_sequences,), generator=generator)
        items = make_items(lengths.int(), settings)
        assert items.shape == (settings.capacity, 6)
        assert {row[0] for row in used(items)} == set(range(num_sequences))


def test_settings_travel_as_numbers():
    for window in (None, 7):
        settings = settings_of([1], window=window)
        assert PlanSettings.of_numbers(settings.numbers) == settings


def test_a_plan_on_the_cpu_is_for_the_reference():
    view = make_paged_view(PagedCase())
    plan = ops.plan_decode(view, num_heads=4)
    assert plan.impl == "reference"
    assert_same_bits(plan.items, make_items(view.lengths, plan.settings))
    q = torch.randn(5, 1, 4, 64)
    assert_same_bits(ops.decode_attention(q, view, plan=plan), ops.decode_attention(q, view))


def test_torch_sees_plans_as_they_are():
    """torch's own checks of the two operators: schema, shapes and strides without data."""
    view = make_paged_view(PagedCase(dtype=torch.bfloat16))
    plan = ops.plan_decode(view, num_heads=4)
    max_tokens = view.max_pages * view.page_size
    arguments = (view.lengths, plan.settings.numbers, max_tokens, "reference")
    torch.library.opcheck(torch.ops.octavo.plan_decode, arguments)
    q = torch.randn(5, 1, 4, 64)
    spec, planned = "causal=True", (plan.items, plan.counters, plan.settings.numbers, plan.impl)
    torch.library.opcheck(
        torch.ops.octavo.decode_attention,
        (q, *view.tensors, spec, None, torch.float32, *planned, None),
    )


def test_a_plan_for_something_else_is_refused():
    view = make_paged_view(PagedCase())
    plan = ops.plan_decode(view, num_heads=4)
    with pytest.raises(ConfigError, match="plan made for impl='triton', got one for 'reference'"):
        ops.decode_attention(torch.randn(5, 1, 4, 64), view, plan=plan, impl="triton")
    with pytest.raises(ConfigError, match="expected 1 to 4 query tokens, got 5"):
        ops.plan_decode(view, num_heads=4, q_len=5)
    with pytest.raises(ConfigError, match="a multiple of the KV heads, got 5 and 2"):
        ops.plan_decode(view, num_heads=5)


@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_a_plan_for_too_many_sequences_is_refused(impl):
    view = make_paged_view(PagedCase(lengths=(1,), head_dim=128))
    many = replace(
        view,
        page_table=view.page_table.expand(MAX_SEQUENCES + 1, -1),
        lengths=view.lengths.repeat(MAX_SEQUENCES + 1),
    )
    options = {"num_heads": 4, "q_len": 1, "dtype": torch.bfloat16}
    with pytest.raises(ConfigError, match="at most 32768 sequences, got 32769"):
        settings_for(impl, many, AttentionSpec(causal=True), **options)
    settings_for("reference", many, AttentionSpec(causal=True), **options)


@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_a_plan_for_another_batch_is_refused(impl, device):
    """Its settings may be the same: on an H200 those of 10 … 66 sequences of 32k tokens are."""
    view = make_paged_view(PagedCase(head_dim=128), device=device)
    options = {"num_heads": 4, "q_len": 1, "dtype": torch.bfloat16}
    settings = settings_for(impl, view, AttentionSpec(causal=True), **options)
    items, counters = make_plan(view.lengths, settings, max_blocks=4)
    more = torch.cat((counters, counters[: settings.programs_per_item]))
    plan = DecodePlan(items, more, settings, impl)
    q = torch.randn(5, 1, 4, 128, dtype=torch.bfloat16, device=device)
    with pytest.raises(ConfigError, match="made for 5 sequences, got one for 6"):
        ops.decode_attention(q, view, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["gluon", "triton"])
def test_a_plan_must_fit_the_call(impl):
    view = make_paged_view(PagedCase(head_dim=128), device="cuda")
    plan = ops.plan_decode(view, num_heads=4, impl=impl)
    q = torch.randn(5, 1, 4, 128, device="cuda", dtype=torch.bfloat16)
    expected = ops.decode_attention(q, view, impl=impl)
    assert_same_bits(ops.decode_attention(q, view, plan=plan), expected)
    with pytest.raises(ConfigError, match="expected a plan made for"):
        ops.decode_attention(q, view, AttentionSpec(causal=True, window=9), plan=plan)
    with pytest.raises(ConfigError, match="expected a plan made for"):
        ops.decode_attention(q.expand(5, 2, 4, 128), view, plan=plan)
