"""The scheduler alone, with a model that is a hash of the tokens: order, budgets, pages."""

import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.pages import PageAllocator
from octavo.errors import CapacityError, ConfigError
from octavo.serving.engine.request import Request, Sampling
from octavo.serving.engine.scheduler import Chunk, Scheduler
from octavo.serving.engine.sequence import Sequence
from octavo.serving.engine.settings import EngineSettings


def make_scheduler(num_pages=16, page_size=4, **changes):
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 8, **changes}
    return Scheduler(PageAllocator(num_pages, page_size), EngineSettings(**options))


def make_request(name, num_prompt=4, max_tokens=3, first=0):
    prompt = tuple(range(first, first + num_prompt))
    return Request(request_id=name, prompt=prompt, sampling=Sampling(max_tokens=max_tokens))


def next_token(tokens):
    """A "model": depends on all tokens so far, and on nothing else."""
    return hash(tuple(tokens)) % 50


def run_step(scheduler):
    """One pass; returns its batch. Requests end at their max_tokens."""
    batch = scheduler.schedule()
    sampled = batch.sampled
    scheduler.advance(batch, [next_token(s.tokens) for s in sampled])
    for sequence in sampled:
        if sequence.num_output_tokens == sequence.request.sampling.max_tokens:
            scheduler.finish(sequence, "length")
    scheduler.check_invariants()
    return batch


def run_all(scheduler, max_steps=10_000):
    batches = []
    while scheduler.has_work:
        batches.append(run_step(scheduler))
        assert batches[-1].chunks, "nothing runs although something waits"
        assert len(batches) < max_steps
    return batches


def test_the_module_needs_no_torch():
    code = "import sys, octavo.serving.engine.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_prompt_is_cut_into_chunks_and_then_decoded():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=19, max_tokens=3))
    batches = run_all(scheduler)
    assert [b.num_tokens for b in batches] == [8, 8, 3, 1, 1]
    assert [len(b.sampled) for b in batches] == [0, 0, 1, 1, 1]
    assert scheduler.allocator.num_in_use == 0


def test_decoding_comes_first_and_prompts_get_the_rest():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=4, max_tokens=9))
    run_step(scheduler)
    scheduler.add(make_request("b", num_prompt=20, max_tokens=1, first=100))
    chunks = run_step(scheduler).chunks
    assert [(c.sequence.request_id, c.num_tokens, c.samples) for c in chunks] == [
        ("a", 1, True),
        ("b", 7, False),
    ]


def test_one_token_left_of_a_prompt_is_a_single_one():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=9, max_tokens=2))
    scheduler.add(make_request("b", num_prompt=20, max_tokens=2, first=100))
    run_step(scheduler)
    batch = run_step(scheduler)
    assert [c.num_tokens for c in batch.chunks] == [1, 7]
    assert batch.num_single == 1
    assert [s.request_id for s in batch.sampled] == ["a"]


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, num_prompt=2, first=ord(name)))
    run_step(scheduler)
    assert [s.request_id for s in scheduler.running] == ["a", "b"]
    assert [s.request_id for s in scheduler.waiting] == ["c"]


def test_the_latest_is_preempted_and_keeps_its_tokens():
    scheduler = make_scheduler(num_pages=5, enable_prefix_caching=False)
    first = scheduler.add(make_request("a", num_prompt=4, max_tokens=12))
    latest = scheduler.add(make_request("b", num_prompt=4, max_tokens=12, first=100))
    while scheduler.num_preemptions == 0:
        run_step(scheduler)
    assert scheduler.waiting[0] is latest and first.state == "running"
    assert not latest.pages and latest.num_computed == 0
    kept = list(latest.tokens)
    assert latest.num_output_tokens > 0
    run_all(scheduler)
    assert latest.tokens[: len(kept)] == kept
    assert latest.num_output_tokens == 12 and latest.finish_reason == "length"
    assert latest.tokens[4:] == expected_output(latest)


def expected_output(sequence):
    tokens = list(sequence.request.prompt)
    for _ in range(sequence.request.sampling.max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(sequence.request.prompt) :]


def test_requests_that_fill_all_pages_run_at_once():
    """Who has all the pages it will ever need keeps none of them from a newcomer."""
    scheduler = make_scheduler(num_pages=9, max_num_batched_tokens=64)
    for name in "abc":
        scheduler.add(make_request(name, num_prompt=9, max_tokens=4, first=100 * ord(name)))
    assert [chunk.num_tokens for chunk in run_step(scheduler).chunks] == [9, 9, 9]
    run_all(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_page_is_kept_for_each_that_will_grow():
    scheduler = make_scheduler(num_pages=9, max_num_batched_tokens=64)
    scheduler.add(make_request("a", num_prompt=9, max_tokens=5))  # 13 tokens: a fourth page
    for name in "bc":
        scheduler.add(make_request(name, num_prompt=9, max_tokens=4, first=100 * ord(name)))
    assert [chunk.num_tokens for chunk in run_step(scheduler).chunks] == [9, 9]
    run_all(scheduler)
    assert scheduler.num_preemptions == 0


def test_full_pages_of_a_known_prompt_are_found_and_one_token_is_computed():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", num_prompt=8, max_tokens=1))
    run_all(scheduler)
    again = scheduler.add(make_request("b", num_prompt=8, max_tokens=1))
    batch = run_step(scheduler)
    assert again.num_cached == 4  # the second page would leave nothing to compute
    assert batch.num_tokens == 4
    assert again.usage.cached_tokens == 4
    assert scheduler.cached_tokens == 4 and scheduler.prompt_tokens == 16


def test_generated_tokens_are_found_too():
    scheduler = make_scheduler()
    first = scheduler.add(make_request("a", num_prompt=4, max_tokens=6))
    run_all(scheduler)
    prompt = (*first.tokens, 7)
    again = scheduler.add(Request(request_id="b", prompt=prompt, sampling=Sampling(max_tokens=1)))
    run_all(scheduler)
    assert again.num_cached == 8


def test_pages_with_images_are_found_by_the_same_images_alone():
    def add(name, digest, *more):
        spans = [SimpleNamespace(start=6, stop=9, digest=digest), *more]
        images = SimpleNamespace(spans=spans, offset=-1)
        options = {"sampling": Sampling(max_tokens=1), "images": images}
        sequence = scheduler.add(Request(request_id=name, prompt=tuple(range(17)), **options))
        run_all(scheduler)
        return sequence.num_cached

    scheduler = make_scheduler()
    assert add("a", b"cat") == 0
    # Pages of four: the text before the image is the same, and nothing from its page on.
    assert add("b", b"dog") == 4
    assert add("c", b"cat") == 16
    second = SimpleNamespace(start=12, stop=13, digest=b"fox")
    assert add("d", b"cat", second) == 12
    scheduler.add(Request(request_id="e", prompt=tuple(range(17)), sampling=Sampling(max_tokens=1)))
    run_all(scheduler)
    assert scheduler.cached_tokens == 4 + 16 + 12 + 4


def test_positions_before_between_and_after_images():
    spans = [SimpleNamespace(start=s, stop=s + 2, digest=b"") for s in (4, 9)]
    images = SimpleNamespace(spans=spans, offset=-3)
    sequence = Sequence(Request(request_id="a", prompt=tuple(range(20)), images=images), 0)

    def chunk(start, num_tokens):
        return Chunk(sequence, start, num_tokens, False)

    assert [chunk(*at).has_images for at in ((0, 4), (3, 2), (7, 1), (10, 1), (11, 5))] == [
        *(False, True, True, True, False)
    ]
    assert (chunk(2, 2).position, chunk(11, 3).position, chunk(25, 1).position) == (2, 8, 22)
    plain = Sequence(Request(request_id="b", prompt=(1,)), 0)
    assert not Chunk(plain, 0, 1, True).has_images and Chunk(plain, 7, 1, True).position == 7


def test_without_prefix_caching_nothing_is_kept():
    scheduler = make_scheduler(enable_prefix_caching=False)
    for name in "ab":
        sequence = scheduler.add(make_request(name, num_prompt=9, max_tokens=1))
        run_all(scheduler)
        assert sequence.num_cached == 0
    assert scheduler.allocator.num_cached == 0


def test_what_can_never_fit_is_refused():
    scheduler = make_scheduler(num_pages=4, page_size=4)
    scheduler.add(make_request("fits", num_prompt=14, max_tokens=3))
    with pytest.raises(ConfigError, match=r"context of 17 tokens, got 15 \+ 3"):
        scheduler.add(make_request("long", num_prompt=15, max_tokens=3))
    run_all(scheduler)
    limited = make_scheduler(max_context=10)
    with pytest.raises(ConfigError, match="context of 10 tokens"):
        limited.add(make_request("long", num_prompt=8, max_tokens=3))


def test_a_full_queue_and_a_known_id_are_refused():
    scheduler = make_scheduler(max_queue=2)
    scheduler.add(make_request("a"))
    with pytest.raises(ConfigError, match="'a' again"):
        scheduler.add(make_request("a"))
    scheduler.add(make_request("b"))
    with pytest.raises(CapacityError, match="max_queue 2"):
        scheduler.add(make_request("c"))
    run_step(scheduler)
    scheduler.add(make_request("c"))


def test_abort_frees_pages_wherever_the_request_is():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("runs", max_tokens=8))
    scheduler.add(make_request("waits", first=50))
    run_step(scheduler)
    for name in ("runs", "waits"):
        aborted = scheduler.abort(name)
        assert aborted.finish_reason == "abort"
        scheduler.check_invariants()
    assert scheduler.abort("nobody") is None
    assert not scheduler.has_work and scheduler.allocator.num_in_use == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: expected a number greater than or equal to 1, got 0"),
        ({"max_queue": 0}, "max_queue"),
        ({"max_context": 0}, "max_context"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"max_num_seqs \(9\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**changes)


def test_a_pass_needs_its_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    with pytest.raises(ConfigError, match="expected 1 tokens, got 0"):
        scheduler.advance(scheduler.schedule(), [])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_loads_keep_every_promise(data):
    page_size = data.draw(st.sampled_from([1, 2, 4]), "page_size")
    num_pages = data.draw(st.integers(4, 20), "num_pages")
    max_num_seqs = data.draw(st.integers(1, 6), "max_num_seqs")
    budget = data.draw(st.integers(max_num_seqs, 16), "budget")
    scheduler = make_scheduler(
        num_pages,
        page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=data.draw(st.booleans(), "caching"),
    )
    chance = random.Random(data.draw(st.integers(0, 2**16), "seed"))
    sequences = []
    for number in range(chance.randrange(1, 12)):
        room = scheduler.max_context
        num_prompt = chance.randrange(1, room)
        request = make_request(
            str(number),
            num_prompt,
            chance.randrange(1, room - num_prompt + 1),
            chance.choice([0, 0, 9]),
        )
        sequences.append(scheduler.add(request))
        for _ in range(chance.randrange(4)):
            run_step(scheduler)
        if chance.random() < 0.2:
            scheduler.abort(chance.choice(sequences).request_id)
            scheduler.check_invariants()
    while scheduler.has_work:
        eldest = scheduler.open_sequences[0]
        before = (eldest.num_output_tokens, eldest.num_computed)
        batch = run_step(scheduler)
        assert 0 < batch.num_tokens <= budget
        assert len({c.sequence.request_id for c in batch.chunks}) == len(batch.chunks)
        assert (
            eldest.state == "finished" or (eldest.num_output_tokens, eldest.num_computed) > before
        )
    for sequence in sequences:
        if sequence.finish_reason == "length":
            assert list(sequence.output) == expected_output(sequence)
        else:
            assert sequence.finish_reason == "abort"
    assert scheduler.allocator.num_in_use == 0


def test_a_leak_would_be_noticed():
    scheduler = make_scheduler()
    sequence = scheduler.add(make_request("a", max_tokens=8))
    run_step(scheduler)
    sequence.pages.pop()
    with pytest.raises(AssertionError):
        scheduler.check_invariants()
