"""Which pages are in use, which are free, and which still hold a known prefix: ids only, no memory.

A page is in exactly one of three states:

in use    one or more sequences hold it (its reference count)
cached    nobody holds it, but its content is published: `match_prefix` can bring it back
empty     nobody holds it and nobody can find it

Cached and empty pages are both free: `allocate` takes empty ones first, then evicts cached ones,
the least recently used first.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from octavo.errors import CapacityError, ConfigError

# 256 bits: two prompts with one hash would read each other's pages.
HASH_BYTES = 32
# The parent of a sequence's first page.
ROOT_HASH = bytes(HASH_BYTES)


class PageAllocator:
    """Hands out page ids, counts who holds them and finds pages by the hash of their prefix.

    A call that raises changes nothing.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 0:
            raise ConfigError(f"num_pages must not be negative, got {num_pages}")
        if page_size < 1:
            raise ConfigError(f"page_size must be positive, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [0] * num_pages
        self._empty = deque(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """How many pages `allocate` can hand out: empty and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """How many pages somebody holds."""
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        """How many free pages `match_prefix` can still find."""
        return len(self._cached)

    @property
    def utilization(self) -> float:
        """The share of pages in use, 0 to 1."""
        return self.num_in_use / self.num_pages if self.num_pages else 0.0

    def num_references(self, page: int) -> int:
        """How many holders this page has; 0 if it is free."""
        self._check_id(page)
        return self._counts[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Take this many free pages, each held once; their old content is no longer found."""
        if num_pages < 0:
            raise ConfigError(f"expected a number of pages of 0 or more, got {num_pages}")
        if num_pages > self.num_free:
            raise CapacityError(
                f"expected {num_pages} free pages, got {self.num_free} of {self.num_pages} "
                f"({self.num_in_use} in use): free some sequences or ask for fewer"
            )
        pages = [self._take_free() for _ in range(num_pages)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold these pages, which are in use, once more."""
        self._check_in_use(pages)
        for page in pages:
            self._counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Give up one hold on each of these pages, named in the order of their sequence.

        A page that nobody holds any more stays findable, if published, until it is evicted. The
        last page is evicted first: without its predecessors a page cannot be found anyway.
        """
        self._check_in_use(pages)
        for page in reversed(pages):
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._empty.append(page)

    def page_hashes(
        self, token_ids: Sequence[int], salt: bytes = b"", parent: bytes = ROOT_HASH
    ) -> list[bytes]:
        """The hash of each full page of `token_ids`: of its parent's hash, its tokens and `salt`.

        salt: whatever else decides the content, such as an image or an adapter. parent: the hash of
        the page before the first token, to continue a sequence or to change the salt within one.
        """
        if len(parent) != HASH_BYTES:
            raise ConfigError(f"parent must be a hash of {HASH_BYTES} bytes, got {len(parent)}")
        hashes = []
        for end in range(self.page_size, len(token_ids) + 1, self.page_size):
            tokens = array("q", token_ids[end - self.page_size : end])
            # Only the last part has no fixed length, so no two inputs make the same bytes.
            parent = hashlib.blake2b(
                parent + tokens.tobytes() + salt, digest_size=HASH_BYTES
            ).digest()
            hashes.append(parent)
        return hashes

    def publish(self, page: int, page_hash: bytes) -> int:
        """Make this full page findable by its hash; returns the page that is found by it.

        That is another page if one with the same content came first; `page` then stays unpublished.
        """
        self._check_in_use([page])
        if self._hash_of.get(page, page_hash) != page_hash:
            raise ConfigError(
                f"page {page} is already published under another hash: "
                "call make_writable before its content changes"
            )
        canonical = self._page_of.setdefault(page_hash, page)
        if canonical == page:
            self._hash_of[page] = page_hash
        return canonical

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of this chain of hashes, each held once more."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            self._cached.pop(page, None)
            self._counts[page] += 1
            pages.append(page)
        return pages

    def make_writable(self, page: int) -> tuple[int, int | None]:
        """Exchange one hold on `page` for a page that nobody else reads: (page, copy_from).

        copy_from: the page whose content must be copied into the new one before anything is freed;
        None if `page` itself may be written, in which case it is no longer findable.
        """
        self._check_in_use([page])
        if self._counts[page] == 1:
            self._unpublish(page)
            return page, None
        (copy,) = self.allocate(1)
        self._counts[page] -= 1
        return copy, page

    def unpublish_all(self) -> None:
        """Make no page findable any more, as when weights or scales change."""
        self._hash_of.clear()
        self._page_of.clear()
        self._empty.extend(self._cached)
        self._cached.clear()

    def check_invariants(self) -> None:
        """Assert that every page is in exactly one state and that both hash tables agree."""
        in_use = [page for page, count in enumerate(self._counts) if count > 0]
        assert min(self._counts, default=0) >= 0
        assert sorted([*in_use, *self._cached, *self._empty]) == list(range(self.num_pages))
        assert self._page_of == {page_hash: page for page, page_hash in self._hash_of.items()}
        assert len(self._page_of) == len(self._hash_of)
        assert self._cached.keys() <= self._hash_of.keys()
        assert self._hash_of.keys().isdisjoint(self._empty)

    def _take_free(self) -> int:
        if self._empty:
            return self._empty.popleft()
        page, _ = self._cached.popitem(last=False)
        self._unpublish(page)
        return page

    def _unpublish(self, page: int) -> None:
        page_hash = self._hash_of.pop(page, None)
        if page_hash is not None:
            del self._page_of[page_hash]

    def _check_id(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ConfigError(f"expected a page id below {self.num_pages}, got {page}")

    def _check_in_use(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._check_id(page)
            if self._counts[page] == 0:
                raise ConfigError(f"expected pages in use, got page {page}, which is free")
        if len(set(pages)) < len(pages):
            repeated = sorted(page for page, times in Counter(pages).items() if times > 1)
            raise ConfigError(f"expected each page once in a call, got {repeated} more than once")
