"""Tiny late-interaction checkpoints in the forms that there are."""

import json

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer import modules as st
from transformers import AutoTokenizer

from tests import tiny

WIDTH = 12
MORE = (".", ",", "[Q] ", "[D] ", "[unused0]", "[unused1]")
VOCABULARY = len(tiny.bert_vocabulary()) + len(MORE)


def save_core(target, kind, **settings):
    """An encoder whose tokenizer knows punctuation and markers."""
    positions = 140 if kind == "mpnet" else 64
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": positions, **settings}
    tiny.save_encoder(target, kind, **settings)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.add_tokens(list(MORE)) == len(MORE)
    tokenizer.save_pretrained(target)
    return target


def save_pylate(target, kind, **settings):
    """As PyLate's ColBERT.save writes it: 1_Dense, and what texts begin with."""
    save_core(target, kind)
    linear = target / "1_Dense"
    linear.mkdir()
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(WIDTH, 32, generator=generator)
    save_file({"linear.weight": weight}, linear / "model.safetensors")
    dense = {
        "in_features": 32,
        "out_features": WIDTH,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": False,
    }
    (linear / "config.json").write_text(json.dumps(dense))
    _write_modules(
        target,
        ("", "sentence_transformers.models.Transformer"),
        ("1_Dense", "pylate.models.Dense.Dense"),
    )
    stated = {
        "model_type": "ColBERT",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 16,
        "document_length": 20,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [".", ","],
        "do_query_expansion": True,
    }
    (target / "config_sentence_transformers.json").write_text(json.dumps(stated | settings))
    # What PyLate leaves there says nothing: it is the length of the last batch.
    (target / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    return target


def save_stanford(target, kind="bert", **metadata):
    """As stanford-nlp's ColBERT saves it: the projection beside the encoder's tensors."""
    save_core(target, kind)
    tensors = load_file(target / "model.safetensors")
    named = {f"{kind}.{name}": tensor for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(8)
    named["linear.weight"] = torch.randn(WIDTH, 32, generator=generator)
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})
    tiny.edit_json(target / "config.json", architectures=["HF_ColBERT"])
    stated = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 16,
        "doc_maxlen": 20,
        "dim": WIDTH,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "similarity": "cosine",
    }
    (target / "artifact.metadata").write_text(json.dumps(stated | metadata))
    return target


def save_library(target, kind, *, mask=None, similarity="maxsim", **settings):
    """As sentence-transformers' MultiVectorEncoder saves its own."""
    core = save_core(target.parent / f"{target.name}-core", kind)
    torch.manual_seed(9)
    identity = torch.nn.Identity()
    linear = Dense(
        32, WIDTH, bias=False, activation_function=identity, module_input_name="token_embeddings"
    )
    modules = [
        st.Transformer(str(core), **settings),
        linear,
        MultiVectorMask(**(mask or {"skiplist_words": [".", ","]})),
        st.Normalize(module_input_name="token_embeddings"),
    ]
    encoder = MultiVectorEncoder(
        modules=modules,
        device="cpu",
        prompts={"query": "red ", "document": "green "},
        similarity_fn_name=similarity,
    )
    encoder.save(str(target), create_model_card=False)
    return target


def reference(folder):
    """sentence-transformers' own model of a folder, of whichever form, in float32."""
    return MultiVectorEncoder(str(folder), device="cpu").eval()


def _write_modules(target, *modules):
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules)
    ]
    (target / "modules.json").write_text(json.dumps(entries))
