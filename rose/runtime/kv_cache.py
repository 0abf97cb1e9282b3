"""The page pool of the KV cache: who holds which page, and which full pages can be found again.

Plain Python: this is the book-keeping, the tensors are elsewhere. Page 0 is reserved for padding
and never handed out. Every other page is in one of three states:

- held: one or more sequences use it, counted by reference;
- idle: nobody uses it, but its contents can be found again; the least recently used goes first;
- free: nobody uses it and its contents mean nothing.

The prefix cache is a tree. A full page is keyed by its parent and its own token ids, compared as
they are, so no hash has to be trusted: a collision costs time, never a wrong page. The parent is
the serial number of the page before (given at registration, never used twice), or the salt of the
request for a first page. The same tokens after another prefix, or with another salt, are another
page; a pool belongs to one model, so models cannot meet in it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

Parent = int | str
"""The serial number of the page before, or the salt where there is none."""

PADDING_PAGE = 0


class PageKey(NamedTuple):
    """What identifies the contents of a full page."""

    parent: Parent
    tokens: tuple[int, ...]


class CachedPage(NamedTuple):
    """A page that can be found: by what, and the serial number that its children have as parent."""

    key: PageKey
    serial: int


class CachedPrefix(NamedTuple):
    """Pages that hold the head of a prompt, and the parent of the page that comes next."""

    pages: list[int]
    parent: Parent


class PagePool:
    """Hands out pages, counts references, and finds full pages again."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        """Manage `num_pages` pages (the reserved one included) of `page_size` tokens.

        Raises:
            ValueError: there is no page left to hand out, or pages hold nothing.
        """
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"num_pages is {num_pages} and page_size {page_size}: a pool needs the reserved "
                "page and one more, and a page at least one token"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.caching = prefix_caching
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[PageKey, int] = {}
        self._cached: dict[int, CachedPage] = {}
        self._serials = count(1)
        self._live_serials: set[int] = set()

    @property
    def usable_pages(self) -> int:
        """Pages that sequences can have, the reserved one left out."""
        return self.num_pages - 1

    @property
    def capacity(self) -> int:
        """Tokens that fit into the usable pages."""
        return self.usable_pages * self.page_size

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.usable_pages - self.available

    def is_free(self, page: int) -> bool:
        """Whether nobody holds a page and nobody can find it."""
        return self._refs[page] == 0 and page not in self._idle

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Hand out pages, each held once; all of them or, if there are too few, None."""
        if num_pages > self.available:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(num_pages)]
        for page in pages:
            assert self._refs[page] == 0, f"page {page} was handed out while held"
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that `find` returned once more."""
        for page in pages:
            assert self._refs[page] or page in self._idle, f"page {page} holds nothing to share"
            self._idle.pop(page, None)
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Give up one hold on each page, and return those that nobody holds any more.

        The last page of a sequence becomes idle first, so that it is evicted before the pages that
        lead to it.
        """
        freed = []
        for page in reversed(pages):
            assert self._refs[page] > 0, f"page {page} was released more often than held"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                freed.append(page)
                self._retire(page)
        return freed

    def count_idle(self, pages: Iterable[int]) -> int:
        """Return how many of `pages` nobody holds: sharing them takes that many from the rest."""
        return sum(page in self._idle for page in pages)

    def find(self, token_ids: Sequence[int], salt: str, max_tokens: int) -> CachedPrefix:
        """Return the longest run of cached pages at the head of `token_ids`.

        It covers `max_tokens` tokens at most, and ends at the first page that is missing. The
        caller holds the pages by `share` before it allocates others.
        """
        pages: list[int] = []
        parent: Parent = salt
        for end in range(self.page_size, max_tokens + 1, self.page_size):
            page = self._page_of.get(PageKey(parent, tuple(token_ids[end - self.page_size : end])))
            if page is None:
                break
            pages.append(page)
            parent = self._cached[page].serial
        return CachedPrefix(pages, parent)

    def register(self, page: int, parent: Parent, tokens: Sequence[int]) -> Parent:
        """Let `page`, which is held and full, be found again; return the parent of the next page.

        If another page with the same contents is known, that one stays the one to be found. A page
        whose parent is gone cannot be found, so it is not registered.
        """
        assert self._refs[page] > 0, f"page {page} was registered while nobody holds it"
        assert len(tokens) == self.page_size, (
            f"page {page} was registered with {len(tokens)} tokens"
        )
        orphan = isinstance(parent, int) and parent not in self._live_serials
        if not self.caching or orphan:
            return parent
        key = PageKey(parent, tuple(tokens))
        if key not in self._page_of:
            assert page not in self._cached, f"page {page} was registered twice"
            self._page_of[key] = page
            self._cached[page] = CachedPage(key, next(self._serials))
            self._live_serials.add(self._cached[page].serial)
        return self._cached[self._page_of[key]].serial

    def forget(self, pages: Iterable[int]) -> None:
        """Make sure that `pages`, which are held, are not found again."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} was forgotten while nobody holds it"
            self._unregister(page)

    def check(self, held: Iterable[int] = ()) -> None:
        """Assert every invariant; `held` names each page as often as sequences hold it."""
        referenced = {page for page, refs in enumerate(self._refs) if refs}
        states = [*self._free, *self._idle, *referenced]
        assert sorted(states) == list(range(1, self.num_pages)), "a page is lost or in two states"
        assert min(self._refs) >= 0, "a reference count is negative"
        assert Counter(held) == {p: n for p, n in enumerate(self._refs) if n}, "counts are wrong"
        assert self._page_of == {entry.key: page for page, entry in self._cached.items()}
        assert self._live_serials == {entry.serial for entry in self._cached.values()}
        assert len(self._live_serials) == len(self._cached), "a serial number is used twice"
        assert self._idle.keys() <= self._cached.keys(), "an idle page cannot be found"
        assert not self._cached.keys() & set(self._free), "a free page can be found"

    def _retire(self, page: int) -> None:
        if page in self._cached:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._unregister(page)
        return page

    def _unregister(self, page: int) -> None:
        entry = self._cached.pop(page, None)
        if entry is not None:
            del self._page_of[entry.key]
            self._live_serials.remove(entry.serial)
