"""PageAllocator against a naive model, step by random step."""

from random import Random

import pytest

from octavo.cache.pages import PageAllocator
from octavo.errors import CapacityError, ConfigError

hypothesis = pytest.importorskip("hypothesis")  # a GPU machine may have only torch and pytest
stateful = pytest.importorskip("hypothesis.stateful")
st = hypothesis.strategies

HASHES = [bytes([name]) * 32 for name in range(6)]
CHAINS = st.lists(st.sampled_from(HASHES), unique=True, min_size=1, max_size=4)
INDICES = st.integers(0, 1000)


class AllocatorModel(stateful.RuleBasedStateMachine):
    """The model: holders per page, content per page, cached pages by last use, sequences."""

    @stateful.initialize(num_pages=st.sampled_from([0, 1, 4, 7]))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages, 4)
        self.holders = dict.fromkeys(range(num_pages), 0)
        self.content: dict[int, bytes] = {}
        self.cached: list[int] = []
        self.sequences: list[list[int]] = []

    @stateful.rule(chain=CHAINS)
    def admit(self, chain: list[bytes]) -> None:
        """As an engine does: reuse the known prefix, allocate the rest, publish it."""
        pages = self.match_prefix(chain)
        missing = chain[len(pages) :]
        pages += self.allocate(len(missing)) or []
        if pages:
            self.sequences.append(pages)
        for page, page_hash in zip(pages, chain, strict=False):
            self.publish(page, page_hash)

    @stateful.rule(num_pages=st.integers(0, 3))
    def admit_unpublished(self, num_pages: int) -> None:
        if pages := self.allocate(num_pages):
            self.sequences.append(pages)

    @stateful.rule(index=INDICES)
    def fork(self, index: int) -> None:
        if self.sequences:
            pages = self.sequences[index % len(self.sequences)]
            self.allocator.share(pages)
            for page in pages:
                self.holders[page] += 1
            self.sequences.append(list(pages))

    @stateful.rule(index=INDICES)
    def finish(self, index: int) -> None:
        if self.sequences:
            pages = self.sequences.pop(index % len(self.sequences))
            self.allocator.free(pages)
            for page in reversed(pages):
                self.holders[page] -= 1
                if self.holders[page] == 0 and page in self.content:
                    self.cached.append(page)

    @stateful.rule(index=INDICES, place=INDICES)
    def write(self, index: int, place: int) -> None:
        if not self.sequences:
            return
        pages = self.sequences[index % len(self.sequences)]
        place %= len(pages)
        page = pages[place]
        if self.holders[page] == 1:
            assert self.allocator.make_writable(page) == (page, None)
            self.content.pop(page, None)
        elif not self.free_pages():
            with pytest.raises(CapacityError, match="got 0 of"):
                self.allocator.make_writable(page)
        else:
            copy, copy_from = self.allocator.make_writable(page)
            assert copy_from == page
            self.expect_taken([copy])
            self.holders[page] -= 1
            pages[place] = copy

    @stateful.rule(page=st.integers(-1, 7), page_hash=st.sampled_from(HASHES))
    def publish(self, page: int, page_hash: bytes) -> None:
        is_republished = self.content.get(page, page_hash) != page_hash
        if self.holders.get(page, 0) == 0 or is_republished:
            with pytest.raises(ConfigError, match=f"page .*{page}"):
                self.allocator.publish(page, page_hash)
            return
        first = next((p for p, known in self.content.items() if known == page_hash), page)
        assert self.allocator.publish(page, page_hash) == first
        if first == page:
            self.content[page] = page_hash

    @stateful.rule(page=st.integers(-1, 7))
    def free_wrongly(self, page: int) -> None:
        with pytest.raises(ConfigError, match=f"{page}"):
            self.allocator.free([page, page])

    @stateful.rule()
    def unpublish_all(self) -> None:
        if len(self.cached) > 2:  # rarely, so that pages have time to grow old
            self.allocator.unpublish_all()
            self.content.clear()
            self.cached.clear()

    @stateful.invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check_invariants()
        counts = {page: self.allocator.num_references(page) for page in self.holders}
        assert counts == self.holders
        held = [page for pages in self.sequences for page in pages]
        assert counts == {page: held.count(page) for page in self.holders}
        assert self.allocator.num_cached == len(self.cached)
        assert self.allocator.num_free == len(self.free_pages())
        assert self.allocator.num_in_use + self.allocator.num_free == len(self.holders)

    def free_pages(self) -> set[int]:
        return {page for page, count in self.holders.items() if count == 0}

    def match_prefix(self, chain: list[bytes]) -> list[int]:
        page_of = {page_hash: page for page, page_hash in self.content.items()}
        expected = []
        for page_hash in chain:
            if page_hash not in page_of:
                break
            expected.append(page_of[page_hash])
        assert self.allocator.match_prefix(chain) == expected
        for page in expected:
            self.holders[page] += 1
        self.cached = [page for page in self.cached if page not in expected]
        return expected

    def allocate(self, num_pages: int) -> list[int] | None:
        if num_pages > len(self.free_pages()):
            with pytest.raises(CapacityError, match=f"expected {num_pages} free pages"):
                self.allocator.allocate(num_pages)
            return None
        pages = self.allocator.allocate(num_pages)
        assert len(pages) == num_pages
        self.expect_taken(pages)
        return pages

    def expect_taken(self, pages: list[int]) -> None:
        """Check that `pages` were free: empty ones first, then cached ones by age. Take them."""
        empty = self.free_pages() - set(self.cached)
        num_empty = min(len(pages), len(empty))
        assert len(set(pages)) == len(pages)
        assert set(pages[:num_empty]) <= empty
        assert pages[num_empty:] == self.cached[: len(pages) - num_empty]
        for page in pages:
            self.holders[page] = 1
            self.content.pop(page, None)
        self.cached = [page for page in self.cached if page not in pages]


TestAllocatorModel = AllocatorModel.TestCase
TestAllocatorModel.settings = hypothesis.settings(stateful_step_count=50)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_walk(seed: int) -> None:
    """What short walks rarely reach: full caches, old pages, copies of copies."""
    model, random = AllocatorModel(), Random(seed)
    model.start(num_pages=7)
    steps = {
        lambda: model.admit(random.sample(HASHES, random.randint(1, 4))): 4,
        lambda: model.admit_unpublished(random.randint(0, 3)): 1,
        lambda: model.fork(random.randrange(1000)): 1,
        lambda: model.finish(random.randrange(1000)): 4,
        lambda: model.write(random.randrange(1000), random.randrange(1000)): 3,
        lambda: model.publish(random.randint(-1, 7), random.choice(HASHES)): 1,
        lambda: model.free_wrongly(random.randint(-1, 7)): 1,
        lambda: model.unpublish_all(): 0.1,
    }
    for step in random.choices(list(steps), list(steps.values()), k=1000):
        step()
        model.agrees_with_the_model()


@hypothesis.given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12),
    st.binary(max_size=9),
    st.binary(max_size=9),
)
def test_hashes_are_equal_exactly_when_tokens_and_salt_are(a, b, salt_a, salt_b) -> None:
    allocator = PageAllocator(0, 2)
    hashes = zip(allocator.page_hashes(a, salt_a), allocator.page_hashes(b, salt_b), strict=False)
    for index, (left, right) in enumerate(hashes):
        end = 2 * (index + 1)
        assert (left == right) == (a[:end] == b[:end] and salt_a == salt_b)
