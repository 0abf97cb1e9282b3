"""pplx-embed: a Qwen3 that sees both ways, the mean over the tokens, and codes of tanh."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, AutoTokenizer

from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.models.output import finish
from rose.runtime.options import EmbedOptions
from tests import tiny
from tests.batches import ragged


def save_pplx(target: Path, **overrides: object) -> Path:
    """Write the shape of pplx-embed; the folder's own code is not needed."""
    path = tiny.save_decoder(target.parent / "core", "qwen3", head=False, end=True, **overrides)
    modules = [st.Transformer(str(path)), st.Pooling(32, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(target), create_model_card=False)
    entries = json.loads((target / "modules.json").read_text())
    quantizer = {"path": "", "type": "st_quantize.FlexibleQuantizer", "kwargs": ["quantization"]}
    (target / "modules.json").write_text(
        json.dumps([*entries, {"idx": 2, "name": "2", **quantizer}])
    )
    names = {"architectures": ["PPLXQwen3Model"], "auto_map": {"AutoModel": "modeling.X"}}
    tiny.edit_json(target / "config.json", model_type="bidirectional_pplx_qwen3", **names)
    return target


def pooled_by_definition(path: Path, texts: list[str]) -> np.ndarray:
    """The mean over the tokens of a Qwen3 without a causal mask."""
    config = AutoConfig.from_pretrained(path)
    config.is_causal = False
    model = AutoModel.from_pretrained(path, config=config, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [torch.tensor([tokenizer(text).input_ids]) for text in texts]
    return torch.stack([model(ids).last_hidden_state[0].mean(0) for ids in rows]).numpy()


def test_pplx(tmp_path):
    texts = ["kite over sea", "a", "Longer words 3"]
    model = load(save_pplx(tmp_path / "pplx"))
    card = model.card.embedding
    assert not model.backbone.attention_specs[0].causal
    assert (card.pooling, card.normalize, card.quantizer) == ("mean", False, "tanh")
    assert model.warnings == []
    pooled = pooled_by_definition(tmp_path / "core", texts)
    codes = np.clip(np.round(np.tanh(pooled) * 127), -128, 127)

    def finished(**options: object) -> np.ndarray:
        tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
        batch, cu = ragged([tokenizer.encode(text).ids for text in texts])
        vectors = model.embedding(batch, cu)
        return finish(vectors, EmbedOptions(**options), card.normalize, card.quantizer)

    int8 = finished(output_dtype="int8")
    assert int8.dtype == np.int8
    assert np.abs(int8 - codes).max() <= 1
    assert (int8 != codes).mean() < 0.05
    np.testing.assert_array_equal(finished(), int8.astype(np.float32))
    np.testing.assert_array_equal(finished(output_dtype="uint8"), int8.astype(np.int16) + 128)
    sure = np.abs(pooled) > 1e-4
    bits = np.unpackbits(finished(output_dtype="ubinary"), axis=-1)
    assert ((bits == (pooled >= 0)) | ~sure).all()
    signed = finished(output_dtype="binary").astype(np.int16) + 128
    np.testing.assert_array_equal(signed, finished(output_dtype="ubinary"))
    short = finished(output_dtype="ubinary", dimensions=12)
    np.testing.assert_array_equal(np.unpackbits(short, axis=-1)[:, :12], bits[:, :12])
    length = np.linalg.norm(finished(normalize=True), axis=1)
    np.testing.assert_allclose(length, 1, atol=1e-6)
    with pytest.raises(ValueError, match="normalize: int8"):
        finished(output_dtype="int8", normalize=True)


@pytest.mark.parametrize(
    "entries",
    [
        ["Transformer", "Pooling", "st_quantize.FlexibleQuantizer", "Normalize"],
        ["Transformer", "Pooling", "Normalize", "st_quantize.FlexibleQuantizer"],
        ["Transformer", "st_quantize.FlexibleQuantizer"],
        ["Transformer", "Pooling", "FlexibleQuantizer"],
        ["Transformer", "Pooling", "other.FlexibleQuantizer"],
        ["Transformer", "Pooling", "LogitScore"],
    ],
    ids=str,
)
def test_quantizers_and_scores_stand_where_they_are_understood(tmp_path, entries):
    save_pplx(tmp_path / "pplx")
    modules = [
        {"path": "", "type": e if "." in e else f"sentence_transformers.models.{e}"}
        for e in entries
    ]
    (tmp_path / "pplx" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        load(tmp_path / "pplx", tasks=("embed",))
