"""/embed_all over the whole way: the hidden states of transformers, token by token."""

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from transformers import AutoModel, AutoTokenizer

from tests import tiny
from tests.parity.served import post

TEXTS = ["red kite over sea", "a", "the green tea", "short text longer words"]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_every_token_has_its_hidden_state(tmp_path, kind):
    if kind == "bert":
        core = tiny.save_bert(tmp_path / "core")
    else:
        core = tiny.save_decoder(tmp_path / "core", kind, head=False)
    torch.manual_seed(0)
    modules = [st.Transformer(str(core)), st.Pooling(32, "mean"), st.Dense(32, 8), st.Normalize()]
    folder = tmp_path / "model"
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    tokens, vectors, deterministic = (
        post(folder, *requests, deterministic=how)
        for requests, how in (
            ([("/embed_all", {"inputs": TEXTS})], False),
            ([("/embed", {"inputs": TEXTS}), ("/embed_all", {"inputs": TEXTS})], False),
            ([("/embed_all", {"inputs": TEXTS})], True),
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(core)
    model = AutoModel.from_pretrained(core, attn_implementation="eager").eval()
    assert np.shape(vectors[0].json()) == (len(TEXTS), 8)
    for response in (tokens[0], vectors[1], deterministic[0]):
        assert response.status_code == 200, response.text
        for text, rows in zip(TEXTS, response.json(), strict=True):
            with torch.no_grad():
                wanted = model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0]
            assert np.shape(rows) == tuple(wanted.shape)
            np.testing.assert_allclose(rows, wanted, atol=5e-5, rtol=1e-5)
