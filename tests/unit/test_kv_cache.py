"""The page pool: reference counts, the prefix cache, and that neither ever leaks or mixes up pages."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.runtime.kv_cache import PADDING_PAGE, PageKey, PagePool


def fill(pool, tokens, salt=""):
    """Hold pages for `tokens` and register the full ones, as a sequence does."""
    pages = pool.allocate(pool.pages_for(len(tokens)))
    parent, size = salt, pool.page_size
    for index in range(len(tokens) // size):
        parent = pool.register(pages[index], parent, tokens[index * size : (index + 1) * size])
    return pages


def test_a_pool_needs_a_page_beside_the_reserved_one():
    with pytest.raises(ValueError, match="num_pages is 1"):
        PagePool(1, 16)


def test_the_reserved_page_is_never_handed_out():
    pool = PagePool(9, 16)
    pages = pool.allocate(8)
    assert sorted(pages) == list(range(1, 9))
    assert PADDING_PAGE not in pages
    assert pool.capacity == 8 * 16
    assert pool.available == 0


def test_allocation_is_all_or_nothing():
    pool = PagePool(5, 4)
    held = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.available == 1
    pool.check(held)
    assert pool.allocate(0) == []


@pytest.mark.parametrize("length", range(1, 18))
def test_a_hit_covers_the_full_pages_and_leaves_what_the_caller_says(length):
    pool = PagePool(10, 4)
    tokens = list(range(100, 100 + length))
    pages = fill(pool, tokens)
    pool.release(pages)
    assert pool.find(tokens, "", length - 1).pages == pages[: (length - 1) // 4]
    assert pool.find(tokens, "", length).pages == pages[: length // 4]
    assert pool.find([*tokens, 7], "", length).pages == pages[: length // 4]
    assert pool.find(tokens[:-1], "", length - 1).pages == pages[: (length - 1) // 4]


def test_a_hit_stops_at_the_first_missing_page():
    pool = PagePool(10, 4)
    tokens = list(range(12))
    pages = fill(pool, tokens)
    pool.forget(pages[:1])
    assert pool.find(tokens, "", 12).pages == []
    pool.release(pages)
    pool.check()


def test_the_tail_of_a_prompt_is_evicted_before_its_head():
    pool = PagePool(5, 4)
    tokens = list(range(12))
    pages = fill(pool, tokens)
    pool.release(pages)
    pool.allocate(2)  # the page that is free, and one more
    assert pool.find(tokens, "", 12).pages == pages[:2]


def test_the_least_recently_used_prompt_is_evicted_first():
    pool = PagePool(4, 4)
    first, second = [1] * 4, [2] * 4
    pool.release(fill(pool, first))
    pool.release(fill(pool, second))
    hit = pool.find(first, "", 4).pages
    pool.share(hit)
    pool.release(hit)
    pool.allocate(2)
    assert pool.find(first, "", 4).pages == hit
    assert pool.find(second, "", 4).pages == []


def test_salt_and_prefix_are_part_of_the_key():
    pool = PagePool(10, 4)
    a, b = [1, 2, 3, 4], [5, 6, 7, 8]
    fill(pool, a + b, salt="one")
    assert len(pool.find(a + b, "one", 8).pages) == 2
    assert pool.find(a + b, "two", 8).pages == []
    assert pool.find(b, "one", 8).pages == []
    assert len(pool.find(a + a, "one", 8).pages) == 1


def test_equal_pages_are_kept_apart_and_one_is_found():
    pool = PagePool(10, 4)
    tokens = list(range(8))
    first, second = fill(pool, tokens), fill(pool, tokens)
    assert not set(first) & set(second)
    assert pool.find(tokens, "", 8).pages == first
    pool.release(second)
    assert pool.find(tokens, "", 8).pages == first
    pool.check(first)


def test_a_page_behind_an_evicted_one_is_not_registered():
    pool = PagePool(10, 4)
    first, second = fill(pool, [1] * 4), pool.allocate(2)
    parent = pool.register(second[0], "", [1] * 4)  # known already: `first` is the one found
    pool.forget(first)
    assert pool.register(second[1], parent, [2] * 4) == parent
    assert pool.find([1] * 4 + [2] * 4, "", 8).pages == []
    pool.check(first + second)


def test_without_prefix_caching_nothing_is_found():
    pool = PagePool(10, 4, prefix_caching=False)
    pages = fill(pool, list(range(8)))
    assert pool.find(list(range(8)), "", 8).pages == []
    assert pool.release(pages) == pages[::-1]
    assert pool.available == 9


def test_misuse_is_caught():
    pool = PagePool(4, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="nothing to share"):
        pool.share(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.register(pages[0], "", [1] * 4)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go in a tiny pool. `contents` is what each page's memory would hold."""

    SIZE = 2

    def __init__(self):
        super().__init__()
        self.pool = PagePool(7, self.SIZE)
        self.held = []
        self.contents = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from("ab"))
    def admit(self, tokens, salt):
        prefix = self.pool.find(tokens, salt, len(tokens) - 1)
        for index, page in enumerate(prefix.pages):
            assert self.contents[page] == (salt, tokens[: (index + 1) * self.SIZE])
        self.pool.share(prefix.pages)
        before = self.pool.available
        fresh = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(prefix.pages))
        if fresh is None:
            assert self.pool.available == before
            self.pool.release(prefix.pages)
            return
        held = {page for _, pages, _, _ in self.held for page in pages}
        assert not held & set(fresh), "a page was handed out while held"
        for index, page in enumerate(fresh, len(prefix.pages)):
            self.contents[page] = (salt, tokens[: (index + 1) * self.SIZE])
        self.held.append([tokens, prefix.pages + fresh, len(prefix.pages), prefix.parent])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register_next(self, data):
        entry = data.draw(st.sampled_from(self.held))
        tokens, pages, index, parent = entry
        full = tokens[index * self.SIZE : (index + 1) * self.SIZE]
        if len(full) == self.SIZE:
            entry[2:] = index + 1, self.pool.register(pages[index], parent, full)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), forget=st.booleans())
    def leave(self, data, forget):
        entry = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if forget:
            self.pool.forget(entry[1])
        freed = self.pool.release(entry[1])
        assert not set(freed) & {page for _, pages, _, _ in self.held for page in pages}

    @invariant()
    def pool_is_sound(self):
        self.pool.check(page for _, pages, _, _ in self.held for page in pages)
        assert self.pool.used == len(Counter(p for _, pages, _, _ in self.held for p in pages))


class CollidingPoolMachine(PoolMachine):
    """The same with a hash of page keys that nearly always collides."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(PageKey, "__hash__", lambda key: sum(key.tokens) % 2)

    def teardown(self):
        self.patch.undo()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
