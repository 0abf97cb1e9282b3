"""The experts of a mixture are rounded as the other weights are."""

import pytest
import torch

from rose.kernels.cpu import load_library
from rose.kernels.cpu.gemm import PackedMatrix, Storage
from rose.models.experts import SparseMLP
from rose.models.loader import load
from rose.models.quantizing import prepare_loaded
from rose.models.sample_texts import pack
from tests import tiny


@pytest.mark.parametrize(("kind", "storage"), [("int8", Storage.BYTES), ("int4", Storage.NIBBLES)])
def test_experts_are_rounded(tmp_path, kind, storage):
    if load_library() is None:
        pytest.skip("there are no CPU kernels here")
    path = tiny.save_decoder(tmp_path, "qwen3_moe")
    rounded = load(path, tasks=("generate",), quantization=kind)
    prepare_loaded(rounded)
    plain = load(path, tasks=("generate",))
    prepare_loaded(plain)
    mixtures = [m for m in rounded.backbone.modules() if isinstance(m, SparseMLP)]
    experts = [expert for mixture in mixtures for expert in mixture.experts]
    assert experts
    for expert in experts:
        for layer in (expert.gate_up, expert.down):
            assert isinstance(layer.op, PackedMatrix)
            assert layer.op.storage == storage
    states = []
    with torch.inference_mode():
        for model in (plain, rounded):
            batch, _ = pack(model.backbone, [[5, 6, 7, 8], [9, 10, 11]])
            states.append(model.backbone(batch))
    near = torch.cosine_similarity(*states)
    assert 0.9 < near.mean() < 1
