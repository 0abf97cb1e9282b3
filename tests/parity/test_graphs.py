"""Real architectures in padded buckets: the same vectors and tokens as eagerly."""

import numpy as np
import pytest
import torch

from rose.kernels.pooling import POOLINGS
from rose.models.embedding import EmbeddingModel
from rose.models.loader import load
from rose.models.modules import Pooler
from rose.models.recipe_modules import PoolingModule
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.graphs import GraphPolicy
from rose.runtime.options import SamplingParams
from rose.runtime.worker import DeviceWorker
from tests.generation_rig import Rig
from tests.graph_rig import CallCapturer, FixedSdpaBackend
from tests.parity.stand_ins.backends import STAND_INS
from tests.tiny import save_bert, save_decoder


@pytest.fixture(scope="module")
def worker():
    worker = DeviceWorker()
    yield worker
    worker.close()


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_vectors_of_padded_batches_equal_eager_ones(kind, worker, tmp_path):
    """All poolings at once: their vectors side by side."""
    folder = save_bert(tmp_path) if kind == "bert" else save_decoder(tmp_path, kind)
    backbone = load(folder, dtype="float32").backbone
    pooler = Pooler(PoolingModule(tuple(POOLINGS)))
    model = EmbeddingModel(backbone, pooler, [], len(POOLINGS) * backbone.hidden_size)
    eager = EmbeddingRuntime(model, FixedSdpaBackend(), worker)
    graphs = EmbeddingRuntime(model, FixedSdpaBackend(), worker)
    graphs.use_graphs(CallCapturer(), GraphPolicy(max_tokens=300, capture_share=1))
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 7) * 5:
        lengths = rng.integers(4, 38, count).astype(np.int32)
        ids = rng.integers(3, 60, lengths.sum(), dtype=np.int32)
        batch = EmbedBatch(ids, lengths, np.full(count, count % 3, np.int32))
        expected = eager.step(batch).result(30)
        torch.testing.assert_close(graphs.step(batch).result(30), expected, rtol=1e-5, atol=1e-5)
    assert graphs.graphs.counters.failures == 0
    assert graphs.graphs.counters.hits >= 5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tokens_of_padded_steps_equal_eager_ones(kind, worker, tmp_path):
    model = load(save_decoder(tmp_path, kind), dtype="float32").lm
    rng = np.random.default_rng(0)
    requests = [
        (rng.integers(3, 70, rng.integers(1, 30)).tolist(), params)
        for params in (
            SamplingParams(temperature=0, max_tokens=20),
            SamplingParams(temperature=1, seed=3, max_tokens=17, logprobs=2),
            SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3),
        )
        for _ in range(3)
    ]
    eager = Rig(model, worker).run(requests)
    rig = Rig(model, worker, backend=FixedSdpaBackend())
    rig.runtime.use_graphs(CallCapturer(), GraphPolicy(max_tokens=16, capture_share=1), max_len=128)
    rig.runtime.warm_up([8])
    outputs = rig.run(requests)
    assert [output.tokens for output in outputs] == [output.tokens for output in eager]
    counters = rig.runtime.graphs.counters
    assert counters.failures == 0
    assert counters.hits >= 15
    assert counters.padding_tokens > 0


def half(folder):
    """A decoder in float16 with heads of a size, both of which every library knows."""
    return load(save_decoder(folder, "qwen3", head_dim=64), dtype="float16")


@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins_for_the_gpu_libraries_serve_padded_batches(name, worker, tmp_path):
    """They check shapes and the order of calls; what they compute is torch's."""
    backbone = half(tmp_path).backbone
    model = EmbeddingModel(backbone, Pooler(PoolingModule(("mean",))), [], backbone.hidden_size)
    eager = EmbeddingRuntime(model, STAND_INS[name](), worker)
    graphs = EmbeddingRuntime(model, STAND_INS[name](), worker)
    graphs.use_graphs(CallCapturer(), GraphPolicy(max_tokens=300, capture_share=1))
    rng = np.random.default_rng(0)
    for count in (1, 3) * 4:
        lengths = rng.integers(4, 20, count).astype(np.int32)
        ids = rng.integers(3, 60, lengths.sum(), dtype=np.int32)
        batch = EmbedBatch(ids, lengths, np.zeros(count, np.int32))
        expected = eager.step(batch).result(30)
        found = graphs.step(batch).result(30)
        assert torch.cosine_similarity(found, expected).min() > 0.9999
    assert graphs.graphs.counters.failures == 0
    assert graphs.graphs.counters.hits >= 4


@pytest.mark.parametrize(
    "name", ["flash-attn-3", "flash-attn-4", "flashinfer-fa2", "flashinfer-fa3"]
)
def test_stand_ins_for_the_gpu_libraries_serve_padded_steps(name, worker, tmp_path):
    model = half(tmp_path).lm
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=8)
    requests = [(rng.integers(3, 70, rng.integers(1, 20)).tolist(), params) for _ in range(5)]

    def make():
        return Rig(model, worker, backend=STAND_INS[name](), dtype=torch.float16)

    eager, rig = make().run(requests), make()
    policy = GraphPolicy(max_tokens=16, capture_share=1)
    rig.runtime.use_graphs(CallCapturer(), policy, max_len=128)
    outputs = rig.run(requests)
    same = [o.tokens == e.tokens for o, e in zip(outputs, eager, strict=True)]
    assert sum(same) >= 4  # in float16 a padded product may round another way
    assert rig.runtime.graphs.counters.failures == 0
    assert rig.runtime.graphs.counters.hits >= 4
