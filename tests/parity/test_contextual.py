"""Contextual embeddings: equal to pooling, by hand, the hidden states of whole documents."""

import base64
import json
import shutil

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from transformers import AutoConfig, AutoModel, AutoTokenizer

from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.models.plan import plan_checkpoint
from tests import tiny
from tests.parity.served import post

PATH = "/v1/contextualizedembeddings"
DOCUMENTS = [
    ["red kite over sea", "the green tea", "a"],
    ["short text"],
    ["longer words", "kite kite kite kite kite kite", "over", "the sea"],
]


def vectors_of(response):
    assert response.status_code == 200, response.text
    return [
        [np.asarray(item["embedding"]) for item in document["data"]]
        for document in response.json()["data"]
    ]


def in_codes(response, dtype):
    assert response.status_code == 200, response.text
    return [
        np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype) for item in d["data"]])
        for d in response.json()["data"]
    ]


def hidden_states(path, ids, **changes):
    config = AutoConfig.from_pretrained(path)
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModel.from_pretrained(path, config=config, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def save_st(folder, core, *modules):
    SentenceTransformer(modules=[st.Transformer(str(core)), *modules], device="cpu").save(
        str(folder), create_model_card=False
    )
    return folder


def pooled(states, mode):
    return {"mean": states.mean(0), "max": states.max(0).values, "lasttoken": states[-1]}[mode]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("bert", "mean"), ("bert", "max"), ("modernbert", "mean"), ("llama", "lasttoken")],
)
def test_each_chunk_is_pooled_over_its_own_tokens_in_the_document(tmp_path, kind, mode):
    if kind == "llama":
        core = tiny.save_decoder(tmp_path / "core", kind, head=False, end=True)
    else:
        core = tiny.save_encoder(tmp_path / "core", kind)
    model = save_st(tmp_path / "model", core, st.Pooling(32, mode), st.Normalize())
    tokenizer = AutoTokenizer.from_pretrained(core)
    (response,) = post(
        model, (PATH, {"input": DOCUMENTS}), max_model_len=40 + 60 * (kind == "llama")
    )
    tokens = 0
    for document, found in zip(DOCUMENTS, vectors_of(response), strict=True):
        chunks = [tokenizer(chunk, add_special_tokens=False).input_ids for chunk in document]
        head, tail = ([], [0]) if kind == "llama" else ([2], [3])
        ids = [*head, *(i for chunk in chunks for i in chunk), *tail]
        tokens += len(ids)
        states, at = hidden_states(core, ids), len(head)
        assert len(found) == len(chunks)
        for chunk, vector in zip(chunks, found, strict=True):
            wanted = torch.nn.functional.normalize(
                pooled(states[at : at + len(chunk)], mode), dim=0
            )
            np.testing.assert_allclose(vector, wanted, atol=2e-5)
            at += len(chunk)
    assert response.json()["usage"]["prompt_tokens"] == tokens


def test_modules_and_widths_apply_to_chunks(tmp_path):
    core = tiny.save_bert(tmp_path / "core")
    torch.manual_seed(0)
    dense = st.Dense(32, 24, activation_function=torch.nn.Tanh())
    model = save_st(tmp_path / "model", core, st.Pooling(32, "mean"), dense, st.Normalize())
    request = {"input": DOCUMENTS[:1], "dimensions": 8}
    deterministic, ordinary = (
        vectors_of(post(model, (PATH, request), deterministic=value)[0]) for value in (True, False)
    )
    tokenizer = AutoTokenizer.from_pretrained(core)
    chunks = [tokenizer(chunk, add_special_tokens=False).input_ids for chunk in DOCUMENTS[0]]
    states = hidden_states(core, [2, *(i for chunk in chunks for i in chunk), 3])
    at = 1
    for chunk, *found in zip(chunks, deterministic[0], ordinary[0], strict=True):
        with torch.no_grad():
            wanted = torch.tanh(dense.linear(states[at : at + len(chunk)].mean(0)))[:8]
        for vector in found:
            np.testing.assert_allclose(vector, wanted / wanted.norm(), atol=2e-5)
        at += len(chunk)


def test_other_requests_share_the_engine(tmp_path):
    core = tiny.save_bert(tmp_path / "core")
    model = save_st(tmp_path / "model", core, st.Pooling(32, "mean"), st.Normalize())
    texts = {"input": ["red kite", "the sea", "a"]}
    alone = post(model, ("/v1/embeddings", texts))[0].json()["data"]
    mixed = post(
        model,
        (PATH, {"input": DOCUMENTS}),
        ("/v1/embeddings", texts),
        (PATH, {"input": DOCUMENTS, "priority": "bulk"}),
        ("/v1/embeddings", texts),
    )
    for answer in (mixed[1], mixed[3]):
        for one, other in zip(alone, answer.json()["data"], strict=True):
            np.testing.assert_allclose(one["embedding"], other["embedding"], atol=1e-6)
    for one, other in zip(vectors_of(mixed[0]), vectors_of(mixed[2]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def save_pplx_context(target, *, modules):
    """The shape of pplx-embed-context, with or without the files of sentence-transformers."""
    core = tiny.save_decoder(target.parent / "core", "qwen3", head=False)
    tokenizer = AutoTokenizer.from_pretrained(core)
    tokenizer.sep_token = "<end>"
    tokenizer.save_pretrained(core)
    names = {
        "model_type": "bidirectional_pplx_qwen3",
        "architectures": ["PPLXQwen3ContextualModel"],
        "auto_map": {"AutoModel": "modeling.PPLXQwen3ContextualModel"},
    }
    shutil.copytree(core, target)
    tiny.edit_json(target / "config.json", **names)
    if modules:
        (target / "1_Pooling").mkdir()
        tiny.edit_json(
            target / "1_Pooling" / "config.json", pooling_mode="mean", embedding_dimension=32
        )
        types = ["models.Transformer", "models.Pooling"]
        paths = ["", "1_Pooling"]
        entries = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
            for i, (path, kind) in enumerate(zip(paths, types, strict=True))
        ]
        quantizer = {"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer"}
        (target / "modules.json").write_text(json.dumps([*entries, quantizer]))
    return target, core


@pytest.mark.parametrize("modules", [True, False])
def test_pplx_context_pools_between_separators_and_makes_its_own_codes(tmp_path, modules):
    model, core = save_pplx_context(tmp_path / "pplx", modules=modules)
    card = load(model).card.embedding
    assert (card.quantizer, card.normalize, card.chunk_separator) == ("tanh", False, 0)
    answers = post(
        model,
        *(
            (PATH, {"input": DOCUMENTS, "encoding_format": form})
            for form in ("base64_int8", "base64_binary")
        ),
        max_model_len=100,
    )
    int8, binary = in_codes(answers[0], np.int8), in_codes(answers[1], np.int8)
    tokenizer = AutoTokenizer.from_pretrained(core)
    for document, codes, bits in zip(DOCUMENTS, int8, binary, strict=True):
        ids = tokenizer("<end>".join(document)).input_ids
        states = hidden_states(core, ids, is_causal=False)
        stops = [i for i, token in enumerate(ids) if token == 0] + [len(ids)]
        starts = [0, *(stop + 1 for stop in stops[:-1])]
        wanted = np.stack([states[a:b].mean(0) for a, b in zip(starts, stops, strict=True)])
        assert codes.shape == wanted.shape == (len(document), 32)
        expected = np.clip(np.round(np.tanh(wanted) * 127), -128, 127)
        assert np.abs(codes - expected).max() <= 1
        assert (codes != expected).mean() < 0.05
        signs = np.unpackbits((bits.astype(np.int16) + 128).astype(np.uint8), axis=1)
        assert ((signs == (wanted >= 0)) | (np.abs(wanted) <= 1e-4)).all()


def test_a_contextual_model_without_its_separator_is_refused(tmp_path):
    model, _ = save_pplx_context(tmp_path / "pplx", modules=False)
    settings = {setting.name: setting for setting in plan_checkpoint(model).settings}
    assert settings["chunk separator"].value == 0
    assert settings["quantizer"].source.startswith("config.json: architectures")
    tiny.edit_json(model / "tokenizer_config.json", sep_token="<other>")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: added_tokens: .*<other>"):
        plan_checkpoint(model)
    tiny.edit_json(model / "tokenizer_config.json", sep_token=...)
    with pytest.raises(CheckpointError, match="sep_token is missing"):
        plan_checkpoint(model)
