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

A model whose layers carry a state goes on from cached pages only where the state at their end was
kept, see `rose.runtime.snapshots`. A snapshot belongs to a page and goes with it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from rose.runtime.snapshots import Snapshots

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
    """Pages that hold the head of a prompt, and the parent of the page that comes next.

    `snapshot` is the row of the state at their end, where the model needs one. `known` counts the
    pages that are cached: more than `pages` where no state was kept at the end of the others.
    """

    pages: list[int]
    parent: Parent
    snapshot: int | None
    known: int


class PagePool:
    """Hands out pages, counts references, and finds full pages again."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Manage `num_pages` pages (the reserved one included) of `page_size` tokens.

        `snapshots` are the states of a model that cannot go on from pages alone.

        Raises:
            ValueError: there is no page left to hand out, pages hold nothing, or snapshots would
                not lie at their ends.
        """
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"num_pages is {num_pages} and page_size {page_size}: a pool needs the reserved "
                "page and one more, and a page at least one token"
            )
        if snapshots is not None and snapshots.interval(0) % snapshots.unit(page_size):
            raise ValueError(
                f"page_size is {page_size}: snapshots lie at ends of pages, and of chunks of "
                f"{snapshots.grid} tokens"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.caching = prefix_caching
        self.snapshots = snapshots
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

        It covers `max_tokens` tokens at most, and ends at the first page that is missing, or at the
        last that has a snapshot where the model needs one. The caller holds the pages by `share`
        before it allocates others.
        """
        pages: list[int] = []
        parents: list[Parent] = [salt]
        for end in range(self.page_size, max_tokens + 1, self.page_size):
            tokens = tuple(token_ids[end - self.page_size : end])
            page = self._page_of.get(PageKey(parents[-1], tokens))
            if page is None:
                break
            pages.append(page)
            parents.append(self._cached[page].serial)
        if self.snapshots is None:
            return CachedPrefix(pages, parents[-1], None, len(pages))
        for end, page in reversed(list(enumerate(pages, 1))):
            if (row := self.snapshots.find(self._cached[page].serial)) is not None:
                return CachedPrefix(pages[:end], parents[end], row, len(pages))
        return CachedPrefix([], salt, None, len(pages))

    def register(
        self, page: int, parent: Parent, tokens: Sequence[int], snapshot: int | None = None
    ) -> Parent:
        """Let `page`, which is held and full, be found again; return the parent of the next page.

        If another page with the same contents is known, that one stays the one to be found, unless
        nobody holds it: then `page` takes its place. A page whose parent is gone cannot be found,
        so it is not registered. `snapshot` is a reserved row with the state at the end of the page.
        """
        assert self._refs[page] > 0, f"page {page} was registered while nobody holds it"
        assert len(tokens) == self.page_size, (
            f"page {page} was registered with {len(tokens)} tokens"
        )
        orphan = isinstance(parent, int) and parent not in self._live_serials
        if not self.caching or orphan:
            return parent
        key = PageKey(parent, tuple(tokens))
        known = self._page_of.get(key)
        if known is None:
            self._enter(page, CachedPage(key, next(self._serials)))
        elif known in self._idle:
            del self._idle[known]
            self._free.append(known)
            self._enter(page, self._cached.pop(known))
        serial = self._cached[self._page_of[key]].serial
        if self.snapshots is not None and snapshot is not None:
            self.snapshots.keep(snapshot, serial)
        return serial

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
        if self.snapshots is not None:
            self.snapshots.check(self._live_serials)

    def _enter(self, page: int, entry: CachedPage) -> None:
        assert page not in self._cached, f"page {page} was registered twice"
        self._page_of[entry.key] = page
        self._cached[page] = entry
        self._live_serials.add(entry.serial)

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
            if self.snapshots is not None:
                self.snapshots.drop(entry.serial)
