"""Tokens that see the others but are not seen: against attention written out."""

import pytest
import torch

from rose.kernels.attention.base import AttentionSpec
from rose.kernels.attention.expanded import ExpandedBatch

LENGTHS, UNSEEN = (6, 6, 6, 9), (0, 2, 5, 4)


def spec(**facts):
    common = {
        "layer": 0,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "scale": 0.4,
        "causal": False,
    }
    return AttentionSpec(**common | facts)


def one_query(q_D, k_MD, v_MD, facts, distances, bias):
    """Softmax over the keys that are seen; none: zeros."""
    if not len(k_MD):
        return torch.zeros_like(q_D)
    scores = k_MD @ q_D * facts.scale
    if facts.soft_cap is not None:
        scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
    if bias is not None:
        scores = scores + bias(distances)
    return scores.softmax(0) @ v_MD


def reference(q_THD, k_TKD, v_TKD, facts):
    out_THD = torch.zeros_like(q_THD)
    left, right = facts.window
    start = 0
    for length, unseen in zip(LENGTHS, UNSEEN, strict=True):
        for i in range(length):
            last = i if facts.causal else length
            keys = [
                j
                for j in range(length - unseen)
                if j <= last
                and (left is None or i - j <= left)
                and (right is None or j - i <= right)
            ]
            distances = torch.tensor([j - i for j in keys])
            rows = torch.tensor([start + j for j in keys], dtype=torch.int64)
            for head in range(facts.num_heads):
                kv = head // (facts.num_heads // facts.num_kv_heads)
                bias = None if facts.bias is None else lambda d, h=head: facts.bias(d)[h]
                q_D = q_THD[start + i, head]
                out_THD[start + i, head] = one_query(
                    q_D, k_TKD[rows, kv], v_TKD[rows, kv], facts, distances, bias
                )
        start += length
    return out_THD


def by_distance(distance):
    """A bias of each head, as MPNet has one."""
    slopes = torch.tensor([0.1, -0.2, 0.3, 0.0])
    return slopes.reshape(-1, *[1] * distance.ndim) * distance


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"window": (2, 2)},
        {"window": (0, 0)},
        {"causal": True},
        {"causal": True, "window": (3, None)},
        {"soft_cap": 1.5},
        {"soft_cap": 1.5, "window": (1, 1)},
        {"bias": by_distance},
        {"num_kv_heads": 4},
    ],
    ids=lambda spec: ", ".join(
        f"{key} {getattr(value, '__name__', value)}" for key, value in spec.items()
    ),
)
def test_it_is_attention_written_out(facts):
    facts = spec(**facts)
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q_THD = torch.randn(total, facts.num_heads, 8)
    k_TKD, v_TKD = (torch.randn(total, facts.num_kv_heads, 8) for _ in range(2))
    batch = ExpandedBatch(LENGTHS, UNSEEN, torch.device("cpu"))
    for _ in range(2):  # the second layer of a kind finds its mask
        found = batch.attend(q_THD, k_TKD, v_TKD, facts)
        torch.testing.assert_close(found, reference(q_THD, k_TKD, v_TKD, facts))


def test_a_sequence_has_a_token_that_is_seen():
    with pytest.raises(AssertionError):
        ExpandedBatch((3,), (3,), torch.device("cpu"))
