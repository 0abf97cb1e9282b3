"""The embedding queue: order, budgets, cancellation."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rose.runtime.queue import EmbedJob, EmbedQueue


def make_job(lengths, first_id=0, priority="online"):
    total = sum(lengths)
    ids = np.arange(first_id, first_id + total, dtype=np.int32)
    return EmbedJob(ids, np.array(lengths, np.int32), priority=priority)


def test_takes_from_the_head_up_to_the_budget():
    queue = EmbedQueue()
    a, b = make_job([10, 20, 30]), make_job([5, 100])
    queue.add(a)
    queue.add(b)
    assert queue.tokens == 165
    assert queue.take(65, 100) == [(a, 0, 3), (b, 0, 1)]
    assert queue.take(65, 100) == [(b, 1, 2)], "a text above the budget runs alone"
    assert (len(queue), queue.tokens) == (0, 0)
    assert queue.take(65, 100) == []


def test_never_overtakes_a_text_that_does_not_fit():
    queue = EmbedQueue()
    a, b, c = make_job([60]), make_job([60]), make_job([1])
    for job in (a, b, c):
        queue.add(job)
    assert queue.take(100, 10) == [(a, 0, 1)]
    assert queue.take(100, 10) == [(b, 0, 1), (c, 0, 1)]


def test_cancel_frees_the_place():
    queue = EmbedQueue()
    a, b = make_job([10, 10]), make_job([7])
    queue.add(a)
    queue.add(b)
    queue.take(10, 10)
    queue.cancel(a)
    queue.cancel(a)
    assert queue.tokens == 7
    assert queue.take(100, 10) == [(b, 0, 1)]


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=8), max_size=8),
    st.integers(1, 80),
    st.integers(1, 5),
)
def test_every_text_is_taken_once_and_in_order(jobs, max_tokens, max_texts):
    queue = EmbedQueue()
    jobs = [make_job(lengths) for lengths in jobs]
    for job in jobs:
        queue.add(job)
    seen = []
    while slices := queue.take(max_tokens, max_texts):
        lengths = np.concatenate([piece.lengths for piece in slices])
        assert len(lengths) <= max_texts
        assert len(lengths) == 1 or lengths.sum() <= max_tokens
        for piece in slices:
            assert np.array_equal(piece.lengths, piece.job.lengths[piece.first : piece.last])
            assert len(piece.ids) == piece.lengths.sum()
        seen += [(id(p.job), i) for p in slices for i in range(p.first, p.last)]
    assert seen == [(id(job), i) for job in jobs for i in range(len(job))]
    assert queue.tokens == 0


def test_online_goes_before_bulk_and_bulk_is_not_starved():
    queue = EmbedQueue()
    bulk = make_job([10] * 100, priority="bulk")
    queue.add(bulk)
    began_with_bulk = 0
    for _ in range(40):
        queue.add(make_job([10]))
        first = queue.take(10, 10)[0]
        began_with_bulk += first.job is bulk
    assert began_with_bulk == 10
    assert queue.tokens == 10 * (100 - 10 + 40 - 30)


def test_bulk_never_overtakes_online_that_came_before():
    queue = EmbedQueue()
    for _ in range(12):
        queue.add(make_job([10]))
    queue.add(make_job([10], priority="bulk"))
    order = [queue.take(10, 10)[0].job.priority for _ in range(13)]
    assert order == ["online"] * 12 + ["bulk"]


def test_a_job_is_untouched_until_a_batch_takes_of_it():
    queue = EmbedQueue()
    for job in (make_job([10, 10]), make_job([10]), make_job([10, 10], priority="bulk")):
        queue.add(job)
    assert (len(queue), queue.untouched) == (3, 3)
    queue.take(10, 10)
    assert (len(queue), queue.untouched) == (3, 2)
    queue.take(30, 10)
    assert (len(queue), queue.untouched) == (1, 0)


def test_what_online_leaves_of_a_batch_is_for_bulk():
    queue = EmbedQueue()
    bulk, online = make_job([10] * 5, priority="bulk"), make_job([10])
    queue.add(bulk)
    queue.add(online)
    assert queue.take(30, 10) == [(online, 0, 1), (bulk, 0, 2)]
    assert queue.take(30, 10) == [(bulk, 2, 5)]
