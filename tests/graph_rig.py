"""Stands in for what captures graphs, so that the graph cache runs on a CPU."""

import itertools

from rose.kernels.attention.base import GraphSupport
from rose.kernels.attention.torch_sdpa import TorchSdpaBackend


class CallGraph:
    """A graph that calls the captured function again."""

    def __init__(self, function, num_bytes=1):
        self.function, self.num_bytes, self.released = function, num_bytes, False

    def replay(self):
        assert not self.released, "a graph is replayed after its release"
        self.function()

    def release(self):
        assert not self.released, "a graph is released twice"
        self.released = True


class CallCapturer:
    """Captures functions. `fail` names the next call that goes wrong: "warm" or "capture"."""

    def __init__(self):
        self.graphs, self.warmed, self.fail = [], 0, None

    def warm(self, function):
        self._maybe_fail("warm")
        self.warmed += 1
        function()

    def capture(self, function):
        self._maybe_fail("capture")
        self.graphs.append(CallGraph(function))
        return self.graphs[-1]

    def _maybe_fail(self, what):
        if self.fail == what:
            self.fail = None
            raise RuntimeError(f"{what} failed")


class FixedSdpaBackend(TorchSdpaBackend):
    """Plans batches of one size by planning each anew, and checks that sizes stay."""

    graph_support = GraphSupport.ALL

    def fix_ragged(self, layout, max_seqlen):
        return FixedRagged(self, layout, max_seqlen)

    def fix_paged(self, layout, pages, max_kv_len):
        return FixedPaged(self, layout, pages, max_kv_len)


class FixedRagged:
    def __init__(self, backend, layout, max_seqlen):
        self.backend, self.first, self.max_seqlen = backend, layout, max_seqlen
        self.update(layout)

    def update(self, layout):
        assert layout.cu_seqlens is self.first.cu_seqlens
        assert len(layout.lengths) == len(self.first.lengths)
        assert sum(layout.lengths) == sum(self.first.lengths)
        assert layout.max_seqlen <= self.max_seqlen
        ends = layout.cu_seqlens.tolist()
        assert [b - a for a, b in itertools.pairwise(ends)] == list(layout.lengths)
        self.batch = self.backend.plan_ragged(layout)

    def attend(self, *arguments):
        return self.batch.attend(*arguments)


class FixedPaged:
    def __init__(self, backend, layout, pages, max_kv_len):
        self.backend, self.first, self.pages = backend, layout, pages
        self.max_kv_len = max_kv_len
        self.update(layout)

    def update(self, layout):
        for name in ("cu_seqlens_q", "block_table", "slot_mapping"):
            assert getattr(layout, name) is getattr(self.first, name)
        assert set(layout.query_lens) == {1}
        assert len(layout.kv_lens) == len(layout.query_lens) == len(self.first.query_lens)
        assert layout.max_kv_len <= self.max_kv_len
        self.batch = self.backend.plan_paged(layout, self.pages)

    def attend(self, *arguments):
        return self.batch.attend(*arguments)
