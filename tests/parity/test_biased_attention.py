"""Attention with a bias by distance over more pairs of tokens than are held at once."""

import pytest
import torch
from torch import Tensor

from rose.kernels.attention import BACKENDS, torch_sdpa
from rose.kernels.attention.base import AttentionSpec, RaggedLayout
from rose.kernels.attention.dense import SCORE_ELEMENTS
from rose.models.jina import LinearBias
from rose.models.jina_config import alibi_slopes
from tests.batches import cumulative
from tests.parity.test_attention_backends import (
    BIASED,
    LENGTHS,
    TOLERANCE,
    Subject,
    assert_near,
    make_qkv,
    reference,
)

FLOAT = torch.float32


@pytest.mark.parametrize("limit", [1, 300, 2000])
@pytest.mark.parametrize("spec", BIASED)
@pytest.mark.parametrize("lengths", [LENGTHS, (40, 40, 40)])
def test_blocks_of_queries(spec: AttentionSpec, limit: int, lengths, monkeypatch):
    """Whatever their size, for texts alike and unlike, within a window and without."""
    monkeypatch.setattr(torch_sdpa, "SCORE_ELEMENTS", limit)
    subject = Subject(BACKENDS.load("torch_sdpa")())
    out = subject.ragged(lengths).attend(*make_qkv(sum(lengths), spec, FLOAT), spec)
    assert_near(out, reference(lengths, spec, FLOAT), TOLERANCE[FLOAT])


class Counted(LinearBias):
    """Notes how many numbers it makes at once."""

    most = 0

    def forward(self, distance: Tensor) -> Tensor:
        bias = super().forward(distance)
        self.most = max(self.most, bias.numel())
        return bias


@pytest.mark.parametrize("backend", ["cpu", "torch_sdpa"])
def test_memory_does_not_grow_with_pairs_of_tokens(backend):
    """The bias alone would have 12 x 2048 x 2048 numbers; CPU kernels need some for each token."""
    heads, length = 12, 2048
    bias = Counted(alibi_slopes(heads))
    spec = AttentionSpec(0, heads, heads, 8, 8**-0.5, causal=False, bias=bias)
    chosen = BACKENDS.load(backend)()
    if chosen.unsupported(spec, FLOAT, torch.device("cpu")):
        pytest.skip("there are no CPU kernels here")
    q, k, v = torch.randn(3, length, heads, 8, generator=torch.Generator().manual_seed(0))
    layout = RaggedLayout(cumulative([length]), (length,))
    out = chosen.plan_ragged(layout).attend(q, k, v, spec)
    assert 0 < bias.most <= (10 * heads * length if backend == "cpu" else SCORE_ELEMENTS)
    rows = [0, 17, length - 1]
    distance = torch.arange(length) - torch.tensor(rows)[:, None]
    scores = torch.einsum("rhd,mhd->hrm", q[rows], k) * spec.scale
    scores = scores - torch.tensor(alibi_slopes(heads))[:, None, None] * distance.abs()
    wanted = torch.einsum("hrm,mhd->rhd", scores.softmax(-1), v)
    torch.testing.assert_close(out[rows], wanted, atol=1e-5, rtol=1e-4)
