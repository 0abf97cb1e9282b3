"""A Llama with its channels in another order computes the same."""

import pytest
import torch
from safetensors.torch import load_file

from rose.models.loader import load
from rose.models.sample_texts import pack
from tests import tiny
from tools.shuffled import FILE, shuffle_channels


@torch.inference_mode()
def logits(path):
    model = load(path, tasks=("generate",)).lm
    batch, _ = pack(model.backbone, [[5, 6, 7, 8], [9, 10, 11]])
    return model.lm_head(model.backbone(batch))


@pytest.mark.parametrize("tied", [True, False])
def test_the_order_of_channels_does_not_matter(tmp_path, tied):
    plain = tiny.save_decoder(tmp_path / "plain", "llama", tie_word_embeddings=tied)
    shuffled = shuffle_channels(plain, tmp_path / "shuffled", seed=3)
    torch.testing.assert_close(logits(shuffled), logits(plain), atol=1e-4, rtol=1e-4)
    before, after = (load_file(path / FILE) for path in (plain, shuffled))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(before)


def test_other_models_are_refused(tmp_path):
    path = tiny.save_decoder(tmp_path / "plain", "qwen3")
    with pytest.raises(ValueError, match="'qwen3': llama is expected"):
        shuffle_channels(path, tmp_path / "shuffled")
