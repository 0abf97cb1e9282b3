"""Checkpoints of random weights in the shapes of real models, made on the spot.

`qwen3` has the shape of Qwen3 0.6B, as an LLM and as an embedder of its last token; `minilm` that
of all-MiniLM-L6-v2. A word of their tokenizers is one token, so a text of n words has n tokens.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
MINILM: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
TINY_QWEN3 = QWEN3 | {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TINY_MINILM = MINILM | {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def make(folder: Path, *, dry: bool) -> None:
    """Write both checkpoints into `folder`, unless they are there."""
    device = "cpu" if dry else "cuda"
    if (folder / "done").exists():
        return
    torch.manual_seed(0)
    with torch.device(device):
        qwen3 = Qwen3ForCausalLM(Qwen3Config(**(TINY_QWEN3 if dry else QWEN3)))
        minilm = BertModel(BertConfig(**(TINY_MINILM if dry else MINILM)), add_pooling_layer=False)
    for name, model, mode in (("qwen3", qwen3, "lasttoken"), ("minilm", minilm, "mean")):
        model.to(torch.float32 if dry else torch.bfloat16).save_pretrained(folder / name)
        _write_tokenizer(folder / name, model.config.vocab_size)
        _write_modules(folder / name, model.config.hidden_size, mode)
    (folder / "done").touch()


def words(count: int, seed: int = 0) -> str:
    """A text of `count` words, each of which is a token of both models."""
    return " ".join(f"w{(7 * i + 13 * seed) % 290}" for i in range(count))


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    vocabulary = {"[UNK]": 0, "[PAD]": 1} | {f"w{i}": i + 2 for i in range(vocab_size - 2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)


def _write_modules(folder: Path, width: int, mode: str) -> None:
    """The files that tell sentence-transformers, and ROSE, how to pool."""
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": width, f"pooling_mode_{_FLAGS[mode]}": True}
    for index, config in ((1, pooling), (2, {})):
        place = folder / f"{index}_{kinds[index]}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 4096}))


_FLAGS = {"lasttoken": "lasttoken", "mean": "mean_tokens"}
