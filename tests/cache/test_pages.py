"""PageAllocator: counts, sharing, prefix hashes, copy-on-write, eviction order."""

import subprocess
import sys

import pytest

from octavo.cache.pages import HASH_BYTES, ROOT_HASH, PageAllocator
from octavo.errors import CapacityError, ConfigError


def hash_of(name: str) -> bytes:
    return name.encode().ljust(HASH_BYTES, b".")


def published(allocator: PageAllocator, *names: str) -> list[int]:
    """One page in use for each name, published under its hash."""
    pages = allocator.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        allocator.publish(page, hash_of(name))
    return pages


def state(allocator: PageAllocator) -> tuple:
    """All of an allocator's state, to compare before and after an error."""
    return (
        tuple(allocator._counts),
        tuple(allocator._empty),
        tuple(allocator._cached),
        dict(allocator._hash_of),
        dict(allocator._page_of),
    )


@pytest.mark.parametrize("num_pages", [0, 1, 2, 33])
def test_all_pages_can_be_taken_once_and_come_back(num_pages: int) -> None:
    allocator = PageAllocator(num_pages, 64)
    pages = allocator.allocate(num_pages)
    assert sorted(pages) == list(range(num_pages))
    assert (allocator.num_in_use, allocator.num_free) == (num_pages, 0)
    with pytest.raises(CapacityError):
        allocator.allocate(1)
    allocator.free(pages)
    assert (allocator.num_in_use, allocator.num_free) == (0, num_pages)
    allocator.check_invariants()


@pytest.mark.parametrize(("taken", "utilization"), [(0, 0.0), (1, 0.25), (4, 1.0)])
def test_utilization(taken: int, utilization: float) -> None:
    allocator = PageAllocator(4, 16)
    allocator.allocate(taken)
    assert allocator.utilization == utilization


def test_utilization_of_no_pages_is_zero() -> None:
    assert PageAllocator(0, 16).utilization == 0.0


def test_capacity_error_names_the_numbers_and_takes_nothing() -> None:
    allocator = PageAllocator(10, 64)
    allocator.allocate(7)
    before = state(allocator)
    with pytest.raises(CapacityError, match=r"expected 4 free pages, got 3 of 10 \(7 in use\)"):
        allocator.allocate(4)
    assert state(allocator) == before
    assert len(allocator.allocate(3)) == 3


def test_allocate_nothing() -> None:
    assert PageAllocator(0, 16).allocate(0) == []


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    allocator = PageAllocator(2, 64)
    pages = allocator.allocate(2)
    allocator.share(pages)
    allocator.share(pages[:1])
    assert [allocator.num_references(page) for page in pages] == [3, 2]
    allocator.free(pages)
    allocator.free(pages)
    assert [allocator.num_references(page) for page in pages] == [1, 0]
    assert allocator.num_free == 1
    allocator.check_invariants()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.allocate(-1), "expected a number of pages of 0 or more, got -1"),
        (lambda a: a.free([0, 9]), "expected a page id below 4, got 9"),
        (lambda a: a.free([0, -1]), "expected a page id below 4, got -1"),
        (lambda a: a.share([0, 4]), "expected a page id below 4, got 4"),
        (lambda a: a.free([0, 3]), "got page 3, which is free"),
        (lambda a: a.share([0, 3]), "got page 3, which is free"),
        (lambda a: a.free([0, 1, 0]), r"each page once in a call, got \[0\] more than once"),
        (lambda a: a.free([2, 2]), r"each page once in a call, got \[2\] more than once"),
        (lambda a: a.share([1, 1]), r"each page once in a call, got \[1\] more than once"),
        (lambda a: a.publish(3, hash_of("x")), "got page 3, which is free"),
        (lambda a: a.publish(5, hash_of("x")), "expected a page id below 4, got 5"),
        (lambda a: a.publish(1, hash_of("x")), "page 1 is already published.*make_writable"),
        (lambda a: a.make_writable(3), "got page 3, which is free"),
        (lambda a: a.make_writable(-4), "expected a page id below 4, got -4"),
        (lambda a: a.num_references(4), "expected a page id below 4, got 4"),
        (lambda a: a.page_hashes([1], parent=b"short"), "a hash of 32 bytes, got 5"),
    ],
    ids=range(16),
)
def test_wrong_calls_raise_and_change_nothing(call, message: str) -> None:
    allocator = PageAllocator(4, 64)
    allocator.allocate(3)  # page 3 stays free
    allocator.share([2])
    allocator.publish(1, hash_of("known"))
    before = state(allocator)
    with pytest.raises(ConfigError, match=message):
        call(allocator)
    assert state(allocator) == before


@pytest.mark.parametrize(
    ("num_pages", "page_size", "message"),
    [(-1, 64, "num_pages must not be negative, got -1"), (1, 0, "page_size must be positive")],
)
def test_impossible_allocators_are_refused(num_pages: int, page_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PageAllocator(num_pages, page_size)


def test_a_freed_published_page_is_found_and_revived() -> None:
    allocator = PageAllocator(4, 64)
    pages = published(allocator, "a", "b")
    allocator.free(pages)
    assert (allocator.num_cached, allocator.num_free, allocator.num_in_use) == (2, 4, 0)
    assert allocator.match_prefix([hash_of("a"), hash_of("b")]) == pages
    assert (allocator.num_cached, allocator.num_free, allocator.num_in_use) == (0, 2, 2)
    allocator.check_invariants()


def test_a_match_in_use_is_shared() -> None:
    allocator = PageAllocator(2, 64)
    (page,) = published(allocator, "a")
    assert allocator.match_prefix([hash_of("a")]) == [page]
    assert allocator.num_references(page) == 2


@pytest.mark.parametrize(
    ("chain", "num_found"),
    [("", 0), ("a", 1), ("abc", 3), ("abx", 2), ("xbc", 0), ("axc", 1), ("abcd", 3)],
)
def test_the_longest_known_prefix_is_matched(chain: str, num_found: int) -> None:
    allocator = PageAllocator(4, 64)
    pages = published(allocator, "a", "b", "c")
    assert allocator.match_prefix([hash_of(name) for name in chain]) == pages[:num_found]
    references = [allocator.num_references(page) for page in pages]
    assert references == [2] * num_found + [1] * (3 - num_found)


def test_empty_pages_are_taken_before_cached_ones() -> None:
    allocator = PageAllocator(4, 64)
    pages = published(allocator, "a", "b")
    allocator.free(pages)
    assert set(allocator.allocate(2)).isdisjoint(pages)
    assert allocator.num_cached == 2


def test_the_tail_of_a_freed_sequence_is_evicted_first() -> None:
    allocator = PageAllocator(3, 64)
    pages = published(allocator, "a", "b", "c")
    allocator.free(pages)
    assert allocator.allocate(1) == [pages[2]]
    found = allocator.match_prefix([hash_of("a"), hash_of("b"), hash_of("c")])
    assert found == pages[:2]


def test_eviction_follows_the_least_recent_use() -> None:
    allocator = PageAllocator(3, 64)
    a, b, c = published(allocator, "a", "b", "c")
    for page in (a, b, c):
        allocator.free([page])
    allocator.free(allocator.match_prefix([hash_of("a")]))  # a is now the most recently used
    assert [allocator.allocate(1)[0] for _ in range(3)] == [b, c, a]


def test_an_evicted_page_is_not_found() -> None:
    allocator = PageAllocator(1, 64)
    allocator.free(published(allocator, "a"))
    (page,) = allocator.allocate(1)
    assert allocator.match_prefix([hash_of("a")]) == []
    allocator.free([page])
    assert allocator.num_cached == 0  # its new content was never published


def test_publish_keeps_the_first_page_of_a_hash() -> None:
    allocator = PageAllocator(3, 64)
    first, second = allocator.allocate(2)
    assert allocator.publish(first, hash_of("a")) == first
    assert allocator.publish(first, hash_of("a")) == first
    assert allocator.publish(second, hash_of("a")) == first
    allocator.free([second])
    assert allocator.num_cached == 0  # the duplicate is not findable, so it is empty
    allocator.free([first])
    assert allocator.num_cached == 1
    allocator.check_invariants()


def test_a_cached_page_stays_canonical() -> None:
    allocator = PageAllocator(2, 64)
    (first,) = published(allocator, "a")
    allocator.free([first])
    (second,) = allocator.allocate(1)
    assert allocator.publish(second, hash_of("a")) == first


def test_a_page_held_once_is_writable_in_place() -> None:
    allocator = PageAllocator(1, 64)
    (page,) = allocator.allocate(1)
    assert allocator.make_writable(page) == (page, None)
    assert allocator.num_references(page) == 1


def test_writing_a_published_page_makes_it_unfindable() -> None:
    allocator = PageAllocator(2, 64)
    (page,) = published(allocator, "a")
    assert allocator.make_writable(page) == (page, None)
    assert allocator.match_prefix([hash_of("a")]) == []
    assert allocator.publish(page, hash_of("b")) == page


def test_writing_a_shared_page_copies_it() -> None:
    allocator = PageAllocator(2, 64)
    (page,) = published(allocator, "a")
    allocator.share([page])
    copy, copy_from = allocator.make_writable(page)
    assert copy != page
    assert copy_from == page
    assert [allocator.num_references(p) for p in (page, copy)] == [1, 1]
    assert allocator.match_prefix([hash_of("a")]) == [page]  # the original keeps its hash
    allocator.check_invariants()


def test_copy_on_write_without_room_changes_nothing() -> None:
    allocator = PageAllocator(1, 64)
    (page,) = published(allocator, "a")
    allocator.share([page])
    before = state(allocator)
    with pytest.raises(CapacityError, match="expected 1 free pages, got 0 of 1"):
        allocator.make_writable(page)
    assert state(allocator) == before


def test_unpublish_all_forgets_content_but_not_holders() -> None:
    allocator = PageAllocator(4, 64)
    pages = published(allocator, "a", "b", "c")
    allocator.free(pages[1:])
    allocator.unpublish_all()
    assert (allocator.num_cached, allocator.num_in_use, allocator.num_free) == (0, 1, 3)
    assert allocator.match_prefix([hash_of("a")]) == []
    allocator.check_invariants()


@pytest.mark.parametrize(
    ("num_tokens", "num_hashes"), [(0, 0), (1, 0), (15, 0), (16, 1), (17, 1), (31, 1), (48, 3)]
)
def test_only_full_pages_have_a_hash(num_tokens: int, num_hashes: int) -> None:
    hashes = PageAllocator(0, 16).page_hashes(range(num_tokens))
    assert len(hashes) == num_hashes
    assert all(len(page_hash) == HASH_BYTES for page_hash in hashes)


def test_a_hash_depends_on_everything_before_it_and_nothing_after() -> None:
    allocator = PageAllocator(0, 4)
    hashes = allocator.page_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    changed = allocator.page_hashes([1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12])
    assert [a == b for a, b in zip(hashes, changed, strict=True)] == [True, False, False]


def test_equal_pages_at_different_places_have_different_hashes() -> None:
    hashes = PageAllocator(0, 4).page_hashes([7] * 16)
    assert len(set(hashes)) == 4


def test_salt_separates_sequences_and_parent_continues_them() -> None:
    allocator = PageAllocator(0, 4)
    tokens = list(range(12))
    plain = allocator.page_hashes(tokens)
    assert set(plain).isdisjoint(allocator.page_hashes(tokens, salt=b"adapter"))
    assert plain[1:] == allocator.page_hashes(tokens[4:], parent=plain[0])
    image = allocator.page_hashes(tokens[4:], salt=b"image", parent=plain[0])
    assert set(image).isdisjoint(plain)


def test_salt_cannot_stand_for_tokens_or_parent() -> None:
    allocator = PageAllocator(0, 1)
    (first,) = allocator.page_hashes([1])
    forged = allocator.page_hashes([0], salt=(1).to_bytes(8, sys.byteorder), parent=ROOT_HASH)
    assert first not in forged
    assert allocator.page_hashes([1, 1])[1] not in allocator.page_hashes([1], salt=first)


def test_pages_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import octavo.cache.pages"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
