"""Spans of packed texts: joined, cut, ordered, and as segments for pooling."""

import numpy as np
import pytest
import torch

from rose.kernels.pooling import POOLINGS
from rose.runtime.spans import Spans, gather

LENGTHS = np.array([6, 2, 9], np.int32)
BOUNDS = [[(1, 3), (4, 6)], [(0, 1)], [(0, 2), (2, 3), (5, 8)]]


def spans(groups=BOUNDS):
    counts = np.array([len(group) for group in groups], np.int32)
    return Spans(counts, np.array([pair for group in groups for pair in group], np.int32))


def grouped(found):
    return [
        [tuple(pair) for pair in part]
        for part in np.split(found.bounds, found.counts.cumsum()[:-1])
    ]


@pytest.mark.parametrize("mode", ["mean", "max", "last", "mean_sqrt_len", "cls"])
def test_segments_pool_each_span_alone(mode):
    x = torch.randn(int(LENGTHS.sum()), 5, generator=torch.Generator().manual_seed(0))
    cu, starts = spans().segments(LENGTHS)
    pooled = POOLINGS[mode](x[: cu[-1]], torch.from_numpy(cu), torch.from_numpy(starts))
    expected, offset = [], 0
    for length, group in zip(LENGTHS, BOUNDS, strict=True):
        for first, last in group:
            part = x[offset + first : offset + last]
            expected.append(POOLINGS[mode](part, torch.tensor([0, len(part)]), None)[0])
        offset += int(length)
    torch.testing.assert_close(pooled, torch.stack(expected), atol=1e-6, rtol=1e-6)


def test_texts_are_taken_with_their_spans():
    whole = spans()
    assert grouped(whole.part(1, 3)) == BOUNDS[1:]
    assert grouped(Spans.join([whole.part(0, 1), whole.part(1, 3)])) == BOUNDS
    order = np.array([2, 0, 1])
    assert grouped(whole.take(order)) == [BOUNDS[2], BOUNDS[0], BOUNDS[1]]
    back = gather(whole.counts[order], np.argsort(order))
    np.testing.assert_array_equal(whole.take(order).bounds[back], whole.bounds)


def test_good_spans_pass():
    spans().check(LENGTHS)


@pytest.mark.parametrize(
    "groups",
    [
        [[(1, 3), (2, 6)], [(0, 1)], [(0, 1)]],  # they overlap
        [[(4, 6), (1, 3)], [(0, 1)], [(0, 1)]],  # out of order
        [[(1, 1)], [(0, 1)], [(0, 1)]],  # empty
        [[(-1, 1)], [(0, 1)], [(0, 1)]],
        [[(1, 3)], [(0, 3)], [(0, 1)]],  # beyond the text
        [[(1, 3)], [(0, 1)]],  # a text without
    ],
)
def test_bad_spans_are_refused(groups):
    with pytest.raises(ValueError, match="span"):
        spans(groups).check(LENGTHS)


def test_counts_have_to_fit_the_bounds():
    bad = Spans(np.array([1, 0, 2], np.int32), np.zeros((3, 2), np.int32))
    with pytest.raises(ValueError, match="at least one span"):
        bad.check(LENGTHS)
    with pytest.raises(ValueError, match="as many as are counted"):
        Spans(np.array([1, 1, 2], np.int32), np.zeros((3, 2), np.int32)).check(LENGTHS)
