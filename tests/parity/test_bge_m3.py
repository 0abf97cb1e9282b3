"""BGE-M3: a dense vector, a weight and a vector for each token, all from one pass."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

from rose.models.errors import CheckpointError
from rose.models.loader import load
from tests import tiny
from tests.batches import ragged
from tests.parity.served import post

TEXTS = ["red kite over the sea", "a", "green tea the green tea"]


def save_m3(target, *, width=20):
    """XLM-RoBERTa with the two heads that BGE-M3 has in files of their own."""
    core = tiny.save_encoder(target.parent / "core", "xlm-roberta")
    modules = [st.Transformer(str(core)), st.Pooling(32, "cls"), st.Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(target), create_model_card=False)
    generator = torch.Generator().manual_seed(1)
    for name, outputs in (("colbert_linear.pt", width), ("sparse_linear.pt", 1)):
        weights = {
            "weight": torch.randn(outputs, 32, generator=generator),
            "bias": torch.randn(outputs, generator=generator),
        }
        torch.save(weights, target / name)
    return target


def reference(folder, text):
    """The three by their definitions: BGE-M3's report, section 3.2."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = tokenizer(text).input_ids
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    colbert, sparse = (torch.load(folder / f"{n}_linear.pt") for n in ("colbert", "sparse"))
    dense = torch.nn.functional.normalize(hidden[0], dim=0)
    weights = torch.relu(hidden @ sparse["weight"].T + sparse["bias"])
    vectors = torch.nn.functional.normalize(hidden @ colbert["weight"].T + colbert["bias"], dim=1)
    return ids, dense, weights, vectors


def test_three_outputs_of_one_pass(tmp_path):
    folder = save_m3(tmp_path / "m3")
    model = load(folder)
    assert model.card.embedding.outputs == ("dense", "sparse", "multi_vector")
    assert model.embedding.token_vectors.dimensions == 20
    sources = {setting.name: setting.source for setting in model.settings}
    assert sources["weights of tokens"] == "sparse_linear.pt"
    assert sources["vectors of tokens"] == "colbert_linear.pt"
    tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
    batch, cu = ragged([tokenizer.encode(text).ids for text in TEXTS])
    hidden = model.backbone(batch)
    dense = torch.nn.functional.normalize(model.embedding.pool(hidden, cu), dim=1)
    lengths = cu.diff().tolist()
    weights, vectors = (
        model.embedding.token_rows(hidden, output).split(lengths)
        for output in ("token_weights", "multi_vector")
    )
    for i, text in enumerate(TEXTS):
        _, *expected = reference(folder, text)
        for found, wanted in zip((dense[i], weights[i], vectors[i]), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


def test_half_precision_weights_make_heads_in_float32(tmp_path):
    model = load(save_m3(tmp_path / "m3"), dtype="bfloat16")
    batch, _ = ragged([[0, 5, 6, 2]])
    for output in ("token_weights", "multi_vector", "hidden_states"):
        assert model.embedding.token_rows(model.backbone(batch), output).dtype == torch.float32


def test_a_damaged_head_is_refused(tmp_path):
    folder = save_m3(tmp_path / "m3")
    torch.save({"weight": torch.zeros(1, 31), "bias": torch.zeros(1)}, folder / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match=r"\[1, 31\], the config asks for \[1, 32\]"):
        load(folder)
    torch.save({"weight": torch.zeros(1, 32)}, folder / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match=r"sparse_linear\.pt: weight and bias are expected"):
        load(folder)
    (folder / "sparse_linear.pt").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(CheckpointError, match=r"sparse_linear\.pt"):
        load(folder)
    (folder / "sparse_linear.pt").unlink()
    assert load(folder).card.embedding.outputs == ("dense", "multi_vector")


def test_all_three_over_http(tmp_path):
    folder = save_m3(tmp_path / "m3")
    paths = ("/embed_sparse", "/embed", "/embed_all")
    answers = post(folder, *((path, {"inputs": TEXTS, "output": "multi_vector"}) for path in paths))
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    bodies = [answer.json() for answer in answers]
    for text, found, vector, tokens in zip(TEXTS, *bodies, strict=True):
        ids, dense, weights, vectors = reference(folder, text)
        expected: dict[int, float] = {}
        for token, weight in zip(ids, weights[:, 0].tolist(), strict=True):
            if weight > 0 and token not in (0, 1, 2, 3):  # <s>, <pad>, </s>, <unk>
                expected[token] = max(weight, expected.get(token, 0.0))
        assert {item["index"]: item["value"] for item in found} == pytest.approx(expected, abs=2e-5)
        torch.testing.assert_close(torch.tensor(vector), dense, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(tokens), vectors, atol=2e-5, rtol=1e-5)
