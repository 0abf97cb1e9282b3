"""Strict loading: names, prefixes, ties, shards, and files that cannot be trusted."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rose.models.bert import BertModel
from rose.models.config import CheckpointFolder, ConfigReader
from rose.models.errors import CheckpointError
from rose.models.layers import Part
from rose.models.loader import LoadedModel, default_dtype, load
from rose.models.registry import ARCHITECTURES
from rose.models.tensors import open_tensors
from rose.models.weights import name_tensors
from tests import tiny
from tests.batches import ragged

IDS = [2, 5, 6, 9, 3]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "bert": tiny.save_bert(folder / "bert"),
        "qwen3": tiny.save_decoder(folder / "qwen3", "qwen3", head=False),
        "tied": tiny.save_decoder(folder / "tied", "llama", tie_word_embeddings=True),
        "untied": tiny.save_decoder(folder / "untied", "llama"),
    }


@pytest.fixture(params=["bert", "qwen3"])
def model_folder(request, checkpoints, tmp_path) -> Path:
    return tiny.copy(checkpoints[request.param], tmp_path / "model")


@torch.inference_mode()
def states(path: Path) -> torch.Tensor:
    return load(path).backbone(ragged([IDS])[0])


@torch.inference_mode()
def logits(model: LoadedModel) -> torch.Tensor:
    assert model.lm is not None
    return model.lm.logits(model.lm(ragged([IDS])[0]))


def renamed(rename):
    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


def added(**extra):
    return lambda tensors: tensors | {n.replace("__", "."): t for n, t in extra.items()}


PREFIXES = [
    "model.",
    "bert.",
    "auto_model.",
    "module.",
    "encoder.",
    "module.model.",
    "0.auto_model.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(model_folder, prefix):
    wanted = states(model_folder)
    bare = renamed(lambda name: name.removeprefix("model."))
    tiny.edit_tensors(model_folder, lambda t: renamed(lambda n: prefix + n)(bare(t)))
    torch.testing.assert_close(states(model_folder), wanted, atol=0, rtol=0)


def test_unknown_prefix_is_refused(model_folder):
    tiny.edit_tensors(model_folder, renamed(lambda name: f"student.{name}"))
    with pytest.raises(CheckpointError, match=r"missing.*model\.safetensors"):
        load(model_folder)


def test_two_prefixes_are_refused(model_folder):
    tiny.edit_tensors(model_folder, lambda t: t | renamed(lambda n: f"module.{n}")(t))
    with pytest.raises(CheckpointError, match="twice"):
        load(model_folder)


def test_one_tensor_under_two_names_is_refused(model_folder):
    tiny.edit_tensors(model_folder, renamed(lambda name: f"model.{name}"))
    first = next(iter(load_file(model_folder / "model.safetensors"))).removeprefix("model.")
    tiny.edit_tensors(model_folder, lambda t: t | {first: t[f"model.{first}"]})
    with pytest.raises(CheckpointError, match=first):
        load(model_folder)


def test_old_norm_names(checkpoints, tmp_path):
    path = tiny.copy(checkpoints["bert"], tmp_path / "old")
    wanted = states(path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def rename(name: str) -> str:
        for new, older in old.items():
            name = name.replace(new, older)
        return name

    tiny.edit_tensors(path, renamed(rename))
    assert any(name.endswith("gamma") for name in load_file(path / "model.safetensors"))
    torch.testing.assert_close(states(path), wanted, atol=0, rtol=0)
    tiny.edit_tensors(path, lambda t: t | {"embeddings.LayerNorm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match="LayerNorm"):
        load(path)


IGNORED = {
    "bert": [
        "embeddings.position_ids",
        "pooler.dense.weight",
        "cls.predictions.bias",
        "cls.predictions.transform.dense.weight",
        "cls.seq_relationship.weight",
    ],
    "qwen3": [
        "layers.0.self_attn.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
        "lm_head.weight",
    ],
}


@pytest.mark.parametrize("kind", IGNORED)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_known_extras_are_ignored(checkpoints, tmp_path, kind, prefix):
    path = tiny.copy(checkpoints[kind], tmp_path / "extra")
    wanted = states(path)
    tiny.edit_tensors(path, renamed(lambda name: prefix + name))
    extra = {
        (name if name.startswith(("cls", "lm_head")) else prefix + name): torch.ones(2)
        for name in IGNORED[kind]
    }
    tiny.edit_tensors(path, lambda tensors: tensors | extra)
    torch.testing.assert_close(states(path), wanted, atol=0, rtol=0)


def test_masked_lm_checkpoints_embed(tmp_path):
    path = tiny.save_bert(tmp_path / "mlm", masked_lm=True)
    assert any(name.startswith("bert.") for name in load_file(path / "model.safetensors"))
    assert load(path).card.tasks == ("embed",)


def test_unknown_tensors_are_refused_by_name(model_folder):
    tiny.edit_tensors(model_folder, lambda t: t | {"adapter.weight": torch.ones(2, 32)})
    with pytest.raises(CheckpointError, match=r"'adapter\.weight' of .*model\.safetensors"):
        load(model_folder)


def test_every_single_missing_tensor_is_named(model_folder):
    original = load_file(model_folder / "model.safetensors")
    load(model_folder)
    needed = [name for name in original if not name.startswith("pooler")]
    for gone in needed:
        left = {name: tensor for name, tensor in original.items() if name != gone}
        save_file(left, model_folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{gone}' is missing"):
            load(model_folder)


@pytest.mark.parametrize("change", ["rows", "columns", "dimensions"])
def test_every_shape_is_checked(model_folder, change):
    original = load_file(model_folder / "model.safetensors")
    for bad in [name for name in original if not name.startswith("pooler")]:
        tensor = original[bad]
        wrong = {
            "rows": lambda t: t[:-1],
            "columns": lambda t: t[..., :-1],
            "dimensions": lambda t: t.unsqueeze(0),
        }[change](tensor)
        save_file(original | {bad: wrong.contiguous()}, model_folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{bad}.*shape"):
            load(model_folder)


def test_config_and_weights_that_disagree(model_folder):
    tiny.edit_json(model_folder / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="no use for"):
        load(model_folder)
    changes = {"num_hidden_layers": 9, "layer_types": ...}
    tiny.edit_json(model_folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match="missing"):
        load(model_folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_unsupported_dtypes_are_refused(model_folder, dtype):
    tiny.edit_tensors(model_folder, lambda t: {n: x.to(dtype) for n, x in t.items()})
    with pytest.raises(CheckpointError, match="dtype"):
        load(model_folder)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_stored_dtypes_are_converted(model_folder, dtype):
    wanted = states(model_folder)
    tiny.edit_tensors(
        model_folder, lambda t: {n: x.to(getattr(torch, dtype)) for n, x in t.items()}
    )
    model = load(model_folder)
    assert model.dtype == torch.float32
    assert model.card.dtype == "float32"
    torch.testing.assert_close(states(model_folder), wanted, atol=0.5, rtol=0.1)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_files_are_named(model_folder, size):
    file = model_folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(model_folder)


def test_no_second_copy_of_what_is_not_fused(checkpoints):
    """Tensors of one part are the mapped file: they take no memory of their own."""
    backbone = load(checkpoints["bert"]).backbone
    assert isinstance(backbone, nn.Module)
    table = backbone.embeddings.words.weight
    stored = os.path.getsize(checkpoints["bert"] / "model.safetensors")
    assert table.untyped_storage().nbytes() <= stored
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split("-", 1) for line in maps if "bert/model.safetensors" in line]
    spans = [(int(start, 16), int(rest.split()[0], 16)) for start, rest in ranges]
    assert any(start <= table.data_ptr() < end for start, end in spans)


def shards(path: Path, suffix: str, save) -> None:
    """Split a folder's tensors over two files with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-0000{number}-of-00002.{suffix}"
        save({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("suffix", "save"), [("safetensors", save_file), ("bin", torch.save)])
def test_shards(model_folder, suffix, save):
    wanted = states(model_folder)
    shards(model_folder, suffix, save)
    torch.testing.assert_close(states(model_folder), wanted, atol=0, rtol=0)
    file = next(model_folder.glob("*.index.json"))
    index = json.loads(file.read_text())
    name, shard = next(iter(index["weight_map"].items()))
    (model_folder / shard).rename(model_folder / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{shard} is missing"):
        load(model_folder)
    (model_folder / "elsewhere").rename(model_folder / shard)
    other = next(s for s in index["weight_map"].values() if s != shard)
    index["weight_map"][name] = other
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{name}' is not in .*{other}"):
        load(model_folder)
    for bad in ("../secret", "/etc/passwd", 3, None):
        index["weight_map"][name] = bad
        file.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="name of a file"):
            load(model_folder)
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        load(model_folder)


def as_bin(path: Path, **options: object) -> None:
    tensors = load_file(path / "model.safetensors")
    torch.save(tensors, path / "pytorch_model.bin", **options)
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_files(model_folder, zipped):
    wanted = states(model_folder)
    as_bin(model_folder, _use_new_zipfile_serialization=zipped)
    torch.testing.assert_close(states(model_folder), wanted, atol=0, rtol=0)


def test_pytorch_files_with_shared_storage(checkpoints, tmp_path):
    path = tiny.copy(checkpoints["tied"], tmp_path / "shared")
    wanted = logits(load(path))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    model = load(path)
    assert model.warnings == []
    torch.testing.assert_close(logits(model), wanted, atol=0, rtol=0)


def test_safetensors_win_over_pytorch_files(model_folder):
    wanted = states(model_folder)
    tensors = load_file(model_folder / "model.safetensors")
    torch.save({n: t + 1 for n, t in tensors.items()}, model_folder / "pytorch_model.bin")
    torch.testing.assert_close(states(model_folder), wanted, atol=0, rtol=0)


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


@pytest.mark.parametrize("how", ["zip", "legacy", "plain", "nested"])
def test_malicious_pickles_are_refused(model_folder, tmp_path, how):
    marker = tmp_path / "marker"
    tensors = load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").unlink()
    file = model_folder / "pytorch_model.bin"
    poisoned = {**tensors, "x": Payload(marker)}
    if how == "plain":
        file.write_bytes(pickle.dumps(poisoned))
    elif how == "nested":
        torch.save({"state_dict": poisoned}, file)
    else:
        torch.save(poisoned, file, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: refused"):
        load(model_folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"not a pickle at all", b"\x80\x02]q\x00."]
)
def test_damaged_pytorch_files(model_folder, content):
    (model_folder / "model.safetensors").unlink()
    (model_folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(model_folder)


def test_pytorch_files_that_hold_other_things(model_folder):
    tensors = load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").unlink()
    torch.save({"state_dict": tensors, "epoch": 3}, model_folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"state_dict.*no tensor"):
        load(model_folder)


@pytest.mark.parametrize(
    "kind", ["sparse_coo", pytest.param("quantized", marks=pytest.mark.filterwarnings("ignore"))]
)
def test_only_plain_tensors_are_loaded(checkpoints, tmp_path, kind):
    path = tiny.copy(checkpoints["bert"], tmp_path / "model")
    values = load_file(path / "model.safetensors")
    name = next(name for name in values if name.endswith("query.weight"))
    plain = values[name]
    if kind == "quantized":
        values[name] = torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
    else:
        values[name] = plain.to_sparse()
    (path / "model.safetensors").unlink()
    torch.save(values, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"{name}.*pytorch_model\.bin is .*{kind}"):
        load(path)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size"])
def test_shapes_that_no_tensor_can_have_are_refused(key):
    config = ARCHITECTURES.load("bert").read_config(ConfigReader({}, "config.json", "bert"))
    facts = replace(config, **{key: 2**62})
    with pytest.raises(CheckpointError, match=r"tensor '.*weight'.*which no tensor can have"):
        BertModel(facts)


def test_no_weights(model_folder):
    (model_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights.*model\.safetensors.*config\.json"):
        load(model_folder)


# --- tied embeddings -------------------------------------------------------------------------


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_tied_without_a_stored_head(checkpoints):
    model = load(checkpoints["tied"])
    assert HEAD not in load_file(checkpoints["tied"] / "model.safetensors")
    assert model.warnings == []
    assert model.lm.lm_head.weight.data_ptr() == model.backbone.embedding.weight.data_ptr()


def test_tied_with_an_equal_head(checkpoints, tmp_path):
    path = tiny.copy(checkpoints["tied"], tmp_path / "equal")
    wanted = logits(load(path))
    tiny.edit_tensors(path, lambda t: t | {HEAD: t[EMBEDDING]})
    model = load(path)
    assert model.warnings == []
    assert model.lm.lm_head.weight.data_ptr() == model.backbone.embedding.weight.data_ptr()
    torch.testing.assert_close(logits(model), wanted, atol=0, rtol=0)


def test_tied_with_another_head_is_not_tied(checkpoints, tmp_path):
    path = tiny.copy(checkpoints["tied"], tmp_path / "other")
    tiny.edit_tensors(path, lambda t: t | {HEAD: t[EMBEDDING].flip(0)})
    model = load(path)
    assert "differs" in model.warnings[0]
    plain = logits(load(checkpoints["tied"]))
    torch.testing.assert_close(logits(model), plain.flip(-1), atol=1e-5, rtol=1e-5)


def test_tied_with_the_head_alone(checkpoints, tmp_path):
    path = tiny.copy(checkpoints["tied"], tmp_path / "head")
    wanted = logits(load(path))
    rename = {EMBEDDING: HEAD}
    tiny.edit_tensors(path, renamed(lambda name: rename.get(name, name)))
    torch.testing.assert_close(logits(load(path)), wanted, atol=0, rtol=0)
    assert load(path, tasks=("embed",)).lm is None


def test_untied(checkpoints, tmp_path):
    path = tiny.copy(checkpoints["untied"], tmp_path / "untied")
    model = load(path)
    tensors = load_file(path / "model.safetensors")
    assert torch.equal(model.lm.lm_head.weight, tensors[HEAD])
    assert torch.equal(model.backbone.embedding.weight, tensors[EMBEDDING])
    assert model.lm.lm_head.weight.data_ptr() != model.backbone.embedding.weight.data_ptr()


@pytest.mark.parametrize("key", [False, ..., None])
def test_untied_without_a_head_is_refused(checkpoints, tmp_path, key):
    path = tiny.copy(checkpoints["tied"], tmp_path / "headless")
    tiny.edit_json(path / "config.json", tie_word_embeddings=key)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing"):
        load(path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing"):
        load(path, tasks=("embed", "generate"))
    assert load(path, tasks=("embed",)).card.tasks == ("embed",)


def test_untied_without_an_embedding_is_refused(checkpoints, tmp_path):
    path = tiny.copy(checkpoints["untied"], tmp_path / "blind")
    tiny.edit_tensors(path, lambda t: {n: x for n, x in t.items() if n != EMBEDDING})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight' is missing"):
        load(path)


def test_no_parameter_is_left_unfilled(checkpoints, monkeypatch):
    """Memory that loading allocates is NaN first; none may be left."""
    real = torch.empty

    def poisoned(*size, **options):
        made = real(*size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() and not made.is_meta else made

    monkeypatch.setattr(torch, "empty", poisoned)
    for path in checkpoints.values():
        model = load(path)
        root = model.lm if model.lm is not None else model.backbone
        for name, parameter in root.named_parameters():
            assert not parameter.is_meta, name
            assert parameter.isfinite().all(), name


def test_half_precision_loads_once(checkpoints):
    model = load(checkpoints["tied"], dtype="bfloat16")
    assert {p.dtype for p in model.lm.parameters()} == {torch.bfloat16}
    assert logits(model).dtype == torch.float32
    with pytest.raises(CheckpointError, match="int4"):
        load(checkpoints["tied"], dtype="int4")


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_automatic_dtype(checkpoints, tmp_path, stored):
    """The checkpoint's own off the CPU, float32 on it."""
    path = tiny.copy(checkpoints["tied"], tmp_path / "stored")
    dtype = getattr(torch, stored)
    tiny.edit_tensors(path, lambda t: {n: x.to(dtype) for n, x in t.items()})
    tensors = open_tensors(CheckpointFolder(path))
    named = name_tensors(tensors, [Part(name.removeprefix("model."), (1,)) for name in tensors])
    assert default_dtype(torch.device("cuda"), named)[0] == dtype
    assert default_dtype(torch.device("cpu"), named)[0] == torch.float32
    loaded = load(path)
    assert [s.source for s in loaded.settings if s.name == "dtype"] == ["default on a CPU"]


def test_what_a_user_should_know_is_logged_once(checkpoints, caplog):
    plain = load(checkpoints["bert"]).warnings
    assert ["no modules.json" in text for text in plain] == [True]
    assert [plain[0] in record.getMessage() for record in caplog.records] == [True]
