"""`rose convert --quantization`: a folder that loads again and answers as the option does."""

import json
import stat

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from rose import Engine, SamplingParams
from rose.kernels.cpu import load_library, replaced
from rose.kernels.quantization import quantize
from rose.models import quantizing
from rose.models.errors import CheckpointError, ConvertError
from rose.models.loader import load
from rose.models.quantizing import prepare_loaded
from rose.models.stored_codes import PowerOfRows, _read, store
from rose.serving import cli
from rose.serving.inspect import inspect_checkpoint
from tests import tiny

TEXTS = ["the green sea", "tea", "short text over longer words"]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    if load_library() is None:
        pytest.skip("there are no CPU kernels here")
    # Random weights on few channels lose more than those of real models.
    monkeypatch.setattr("rose.models.quantizing.LEAST_COSINE", 0.97)


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return caught.value.code


def convert(source, out, kind, *more):
    assert rose("convert", source, out, "--quantization", kind, *more) == 0
    assert rose("inspect", out) == 0
    return out


def vectors(path, quantization=None):
    options = {"device": "cpu", "max_batch_tokens": 256, "tasks": ("embed",)}
    with Engine(path, quantization=quantization, **options) as engine:
        assert engine.card.quantization == "int8"
        return engine.embed(TEXTS, truncate=True)


def tokens(path, quantization=None):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Engine(path, device="cpu", quantization=quantization, tasks=("generate",)) as engine:
        return [out.token_ids for out in engine.generate([[1, 2, 3], [7]], params)]


@pytest.mark.parametrize(
    "kind", ["bert", "modernbert", "nomic_bert", "gte", "jina_bert_code", "roberta"]
)
def test_an_embedder_answers_as_with_the_option(tmp_path, kind):
    source = tiny.save_encoder(tmp_path / "plain", kind)
    out = convert(source, tmp_path / "out", "int8")
    assert np.array_equal(vectors(out), vectors(source, "int8"))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "phi3", "qwen3", "gemma3_text", "qwen3_moe"])
def test_an_llm_answers_as_with_the_option(tmp_path, kind, quantization):
    source = tiny.save_decoder(tmp_path / "plain", kind)
    out = convert(source, tmp_path / "out", quantization)
    assert tokens(out) == tokens(source, quantization)
    assert tokens(out, quantization) == tokens(out)


@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_rounded_and_nothing_else(tmp_path, tied):
    source = tiny.save_decoder(tmp_path / "plain", "llama", tie_word_embeddings=tied)
    out = convert(source, tmp_path / "out", "int4")
    before, after = (load_file(p / "model.safetensors") for p in (source, out))
    for name, tensor in before.items():
        matrix = "proj" in name or name == "lm_head.weight" or (tied and "embed" in name)
        assert (name in after) != matrix
        if matrix:
            rows, columns = tensor.shape
            facts = (rows, -(-columns // 32))
            assert after[f"{name}_scales"].shape == facts
            if "proj" in name:
                assert after[f"{name}_nibbles"].shape == (rows, columns // 2)
                assert after[f"{name}_minima"].shape == facts
            else:  # the LM head keeps 8 bits
                assert after[f"{name}_codes"].shape == (rows, columns)
        else:
            assert torch.equal(after[name], tensor)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path):
    source = tiny.save_decoder(tmp_path / "plain", "llama")
    (source / "config.json").chmod(0o644)
    out = convert(source, tmp_path / "out", "int8")
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == 0o644


def test_odd_matrices_stay_as_they_are():
    weight = torch.randn(4, 33)
    assert list(store("w", weight, "int4")) == ["w"]
    codes = store("w", weight, "int8")
    assert torch.equal(codes["w_codes"], quantize(weight, "int8").codes)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_experts_that_are_stored_as_one_are_rounded_one_by_one(kind):
    weight, power = torch.randn(2, 6, 64), torch.rand(64) ** 4
    parts = store("w", weight, kind, [PowerOfRows(6, 12, power)])
    names = [f"w_{part}" for part in ("codes", "nibbles", "scales", "minima")]
    stored = [name for name in names if name in parts]
    found = _read(tuple(stored), *(parts[name] for name in stored))
    for expert, known in enumerate((None, power)):
        assert torch.equal(found[expert], quantize(weight[expert], kind, known).dequantize())


def test_inspect_shows_what_is_stored(tmp_path, capsys):
    out = convert(tiny.save_decoder(tmp_path / "plain", "llama"), tmp_path / "out", "int4")
    capsys.readouterr()
    assert rose("inspect", out, "--json") == 0
    text = capsys.readouterr().out
    report = json.loads(text[text.index("{") :])
    found = {setting["name"]: setting for setting in report["settings"]}["quantization"]
    assert (found["value"], found["source"]) == ("int4", "config.json: quantization_config")


def spoil(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight_scales"), "'lm_head.weight_scales' is missing"),
        (
            lambda t: t.update({"lm_head.weight_scales": torch.ones(2, 2).bfloat16()}),
            "has shape",
        ),
        (
            lambda t: t.update({"lm_head.weight_codes": t["lm_head.weight_codes"].short()}),
            "rows of int8 or uint8 are expected",
        ),
        (
            lambda t: t.update({"extra_codes": t["lm_head.weight_codes"].clone()}),
            "'extra_scales' is missing",
        ),
    ],
)
def test_damaged_codes_are_refused(tmp_path, change, message):
    source = tiny.save_decoder(tmp_path / "plain", "llama", tie_word_embeddings=False)
    out = convert(source, tmp_path / "out", "int8")
    spoil(out, change)
    with pytest.raises(CheckpointError, match=message) as loading:
        load(out)
    with pytest.raises(CheckpointError) as inspecting:
        inspect_checkpoint(str(out))
    assert str(inspecting.value) == str(loading.value)


def test_nibbles_need_their_minima(tmp_path):
    out = convert(tiny.save_decoder(tmp_path / "plain", "llama"), tmp_path / "out", "int4")
    name = "model.layers.0.mlp.down_proj.weight"
    spoil(out, lambda t: t.pop(f"{name}_minima"))
    with pytest.raises(CheckpointError, match=f"'{name}_minima' is missing"):
        load(out)
    with pytest.raises(CheckpointError, match=f"'{name}_minima' is missing"):
        inspect_checkpoint(str(out))


def first_version(weight):
    """4 bits as the first version stored them: no minima, 8 added to each code."""
    inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -inputs % 32)).unflatten(1, (-1, 32))
    most = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = (most / -8).bfloat16()  # some are negative
    shifted = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(1) + 8
    codes = shifted[:, :inputs].to(torch.uint8)
    meant = (codes.float() - 8) * scales.float().repeat_interleave(32, 1)[:, :inputs]
    return {"_codes": codes[:, ::2] | codes[:, 1::2] << 4, "_scales": scales}, meant


def test_the_first_version_of_int4_is_served_as_it_is_and_says_so(tmp_path, caplog):
    plain = tiny.save_decoder(tmp_path / "plain", "llama", tie_word_embeddings=False)
    old = tiny.save_decoder(tmp_path / "old", "llama", tie_word_embeddings=False)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if "proj" in name]:
        parts, meant = first_version(stored.pop(name))
        tensors[name] = meant
        stored.update({name + suffix: part for suffix, part in parts.items()})
    for folder, content in ((plain, tensors), (old, stored)):
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.edit_json(
        old / "config.json", quantization_config={"quant_method": "rose", "kind": "int4"}
    )
    assert tokens(old) == tokens(plain, "int4")
    assert "stored in the first format of int4" in caplog.text
    for name, tensor in tensors.items():
        if "proj" in name:
            assert torch.equal(quantize(tensor, "int4").dequantize(), tensor)


def test_int4_is_written_for_the_task_that_it_is_for(tmp_path, capsys):
    source = tiny.save_decoder(tmp_path / "plain", "llama")
    words = ("convert", source, tmp_path / "out", "--quantization", "int4", "--task")
    assert rose(*words, "embed,generate") == 1
    assert "use int8, or --task generate" in " ".join(capsys.readouterr().err.split())
    assert rose(*words, "generate") == 0
    assert tokens(tmp_path / "out") == tokens(source, "int4")
    assert rose("convert", tmp_path / "no.gguf", tmp_path / "other", "--task", "embed") == 1
    assert "--task goes with --quantization" in capsys.readouterr().err


def test_vectors_are_compared_when_weights_are_rounded_and_not_again(tmp_path, monkeypatch, caplog):
    compared = []
    monkeypatch.setattr(quantizing, "_compare", lambda *found: compared.append(found))
    source = tiny.save_encoder(tmp_path / "plain", "bert")
    out = convert(source, tmp_path / "out", "int8")
    assert len(compared) == 1
    prepare_loaded(load(out))
    assert len(compared) == 1
    assert "were compared" not in caplog.text


def test_vectors_that_were_never_compared_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(quantizing, "LEAST_COSINE", -1.0)
    source = tiny.save_decoder(tmp_path / "plain", "llama")
    found = {}
    for tasks in ("generate", "embed,generate"):
        out = convert(source, tmp_path / tasks, "int8", "--task", tasks)
        for served in ("generate", "embed"):
            warnings = inspect_checkpoint(str(out), tasks=(served,)).warnings
            found[tasks, served] = any("were compared" in warning for warning in warnings)
    assert [key for key, said in found.items() if said] == [("generate", "embed")]


def test_vectors_that_cannot_be_compared_are_refused_as_by_the_engine(tmp_path, capsys):
    source = tiny.save_encoder(tmp_path / "plain", "bert")
    with replaced(None):
        assert rose("convert", source, tmp_path / "out", "--quantization", "int8") == 1
    assert "needs the compiled CPU kernels" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", [0, 3, "two"])
def test_a_later_version_is_refused(tmp_path, version):
    out = convert(tiny.save_decoder(tmp_path / "plain", "llama"), tmp_path / "out", "int8")
    noted = {"quant_method": "rose", "kind": "int8", "version": version}
    tiny.edit_json(out / "config.json", quantization_config=noted)
    with pytest.raises(CheckpointError, match=r"version: .* reads versions up to 2"):
        load(out)


def test_what_cannot_be_converted_says_why(tmp_path, capsys):
    source = tiny.save_decoder(tmp_path / "plain", "llama")
    out = convert(source, tmp_path / "out", "int8")
    for words, message in (
        (("convert", source, out, "--quantization", "int8"), "exists already"),
        (("convert", out, tmp_path / "again", "--quantization", "int8"), "stored in int8 already"),
        (("convert", source, tmp_path / "again"), "a model folder"),
        (("inspect", out, "--quantization", "int4"), "the checkpoint is stored in int8"),
    ):
        assert rose(*words) == 1
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "again").exists()


def test_an_unknown_kind_in_a_config_is_refused(tmp_path):
    path = tiny.save_decoder(tmp_path, "llama")
    tiny.edit_json(path / "config.json", quantization_config={"quant_method": "rose", "kind": "x"})
    with pytest.raises(CheckpointError, match=r"kind: 'x' is unknown. Known: int8, int4"):
        load(path)


def test_a_broken_run_leaves_nothing(tmp_path, monkeypatch):
    source = tiny.save_decoder(tmp_path / "plain", "llama")
    monkeypatch.setattr(
        "rose.models.convert_quantized.store", lambda *_: (_ for _ in ()).throw(ConvertError("no"))
    )
    assert rose("convert", source, tmp_path / "out", "--quantization", "int8") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
