"""GGUF files written by llama.cpp's conventions, converted back and compared with their origin."""

import json
import math
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rose.models.gguf import ConvertError, convert_gguf
from tests.unit.gguf_files import tiny_model, write_gguf


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_weights_and_logits_survive_the_round_trip(tmp_path, arch, tied):
    model = tiny_model(arch, tie_word_embeddings=tied)
    source = write_gguf(tmp_path / "model.gguf", arch, model)
    convert_gguf(source, tmp_path / "out", "float32")

    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = dict(model.state_dict())
    if tied:
        del expected["lm_head.weight"]
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again) is type(model)
    assert again.config.rope_parameters == model.config.rope_parameters
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_the_one_asked_for(tmp_path, dtype):
    model = tiny_model("qwen2")
    convert_gguf(write_gguf(tmp_path / "m.gguf", "qwen2", model), tmp_path / "out", dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
    embedding = model.model.embed_tokens.weight
    assert torch.equal(written["model.embed_tokens.weight"].float(), embedding)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)


def test_quantised_tensors_become_what_they_stand_for(tmp_path):
    model = tiny_model("llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    convert_gguf(
        write_gguf(tmp_path / "m.gguf", "llama", model, quantise=kind), tmp_path / "out", "float32"
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    q_proj = model.model.layers[1].self_attn.q_proj.weight.detach()
    # A step of 8-bit blocks is their largest value / 127; rounding is off by half a step.
    assert (written["model.layers.1.self_attn.q_proj.weight"] - q_proj).abs().max() <= 0.125 / 254
    assert not torch.equal(written["model.layers.1.self_attn.q_proj.weight"], q_proj)


@pytest.mark.parametrize(("arch", "flag"), [("llama", "attention_bias"), ("llama", "mlp_bias")])
def test_biases_are_found_and_declared(tmp_path, arch, flag):
    model = tiny_model(arch, **{flag: True})
    convert_gguf(write_gguf(tmp_path / "m.gguf", arch, model), tmp_path / "out", "float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert getattr(again.config, flag) is True
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_an_output_that_repeats_the_embedding_is_tied(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone()
    convert_gguf(write_gguf(tmp_path / "m.gguf", "llama", model), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def llama3_factors(head_dim, theta, factor):
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * theta ** (i / head_dim)
        smooth = (8192 / wave - 1) / 3
        factors.append(
            1 if wave < 2048 else factor if wave > 8192 else 1 / ((1 - smooth) / factor + smooth)
        )
    return np.array(factors, np.float32)


def test_llama3_rope_factors_become_rope_scaling(tmp_path):
    model = tiny_model("llama", rope_theta=500000.0)
    factors = llama3_factors(16, 500000.0, 32.0)
    assert len(set(factors.tolist())) >= 3  # short, long and one between
    source = write_gguf(tmp_path / "m.gguf", "llama", model, tensors={"rope_freqs.weight": factors})
    convert_gguf(source, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.rope_parameters == {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = again.model.rotary_emb.inv_freq.float()
    torch.testing.assert_close(model.model.rotary_emb.inv_freq / torch.from_numpy(factors), scaled)


def test_other_rope_factors_are_refused(tmp_path):
    factors = llama3_factors(16, 10000.0, 32.0) * np.linspace(1, 1.5, 8, dtype=np.float32)
    source = write_gguf(
        tmp_path / "m.gguf", "llama", tiny_model("llama"), tensors={"rope_freqs.weight": factors}
    )
    with pytest.raises(ConvertError, match=r"m\.gguf.*rope_freqs\.weight"):
        convert_gguf(source, tmp_path / "out")


def test_rope_factors_of_one_mean_no_scaling(tmp_path):
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    source = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), tensors=ones)
    convert_gguf(source, tmp_path / "out")
    assert "rope_scaling" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_yarn_and_linear_scaling(tmp_path):
    settings = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
    }
    source = write_gguf(tmp_path / "m.gguf", "qwen2", tiny_model("qwen2"), settings=settings)
    convert_gguf(source, tmp_path / "yarn")
    rope = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn").config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    assert rope["original_max_position_embeddings"] == 32

    settings = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    source = write_gguf(tmp_path / "g.gguf", "gemma3", tiny_model("gemma3"), settings=settings)
    convert_gguf(source, tmp_path / "linear")
    rope = AutoModelForCausalLM.from_pretrained(tmp_path / "linear").config.rope_parameters
    assert rope["full_attention"]["rope_type"] == "linear"
    assert rope["full_attention"]["factor"] == 8.0
    assert rope["sliding_attention"]["rope_type"] == "default"


def test_an_embedder_gets_its_modules(tmp_path):
    settings = {"qwen3.pooling_type": 3}
    source = write_gguf(tmp_path / "m.gguf", "qwen3", tiny_model("qwen3"), settings=settings)
    convert_gguf(source, tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    assert pooling["pooling_mode_lasttoken"] is True
    assert pooling["pooling_mode_mean_tokens"] is False


def llama(path, **changes):
    return write_gguf(path, "llama", tiny_model("llama"), **changes)


BAD = {
    "an unknown tensor": (
        {"tensors": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
        r"tensor 'blk\.0\.attn_sinks\.weight' has no place",
    ),
    "a layer too many": (
        {"tensors": {"blk.2.attn_norm.weight": np.zeros(64, np.float32)}},
        r"tensor 'blk\.2\.attn_norm\.weight' has no place",
    ),
    "a missing tensor": (
        {"skip": {"blk.1.ffn_up.weight"}},
        r"has no tensor 'blk\.1\.ffn_up\.weight'",
    ),
    "another shape": (
        {
            "skip": {"output_norm.weight"},
            "tensors": {"output_norm.weight": np.zeros(63, np.float32)},
        },
        r"'output_norm\.weight' has shape \(63,\), but the metadata say \(64,\)",
    ),
    "values that are not finite": (
        {
            "skip": {"output_norm.weight"},
            "tensors": {"output_norm.weight": np.full(64, np.nan, np.float32)},
        },
        r"'output_norm\.weight' holds values that are not finite",
    ),
    "missing metadata": (
        {"skip": {"attention.head_count"}},
        r"has no metadata 'llama\.attention\.head_count'",
    ),
    "a setting that would be lost": (
        {"settings": {"llama.expert_count": 8}},
        r"setting 'llama\.expert_count' is not supported",
    ),
    "a bidirectional model": (
        {"settings": {"llama.attention.causal": False}},
        r"bidirectional",
    ),
    "an unknown pre-tokenizer": ({"pre": "quokka"}, r"pre-tokenizer 'quokka'.*smollm.*qwen2"),
    "a part of several": ({"settings": {"split.count": 3}}, r"is one of 3 parts"),
    "an id outside of the vocabulary": (
        {"settings": {"tokenizer.ggml.unknown_token_id": 999}},
        r"unk_token is 999",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_fault_is_named_and_leaves_nothing_behind(tmp_path, fault):
    changes, message = BAD[fault]
    source = llama(tmp_path / "m.gguf", **changes)
    with pytest.raises(ConvertError, match=rf"m\.gguf: .*{message}"):
        convert_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_another_architecture_is_refused(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", "mamba", settings={"mamba.block_count": 1})
    with pytest.raises(ConvertError, match=r"'mamba' is not among those known: llama, qwen2"):
        convert_gguf(source, tmp_path / "out")


def test_a_quantisation_that_cannot_be_read(tmp_path):
    model = tiny_model("llama")
    source = write_gguf(tmp_path / "m.gguf", "llama", model, skip={"output_norm.weight"},
                        tensors={"output_norm.weight": np.zeros(64, np.int32)})  # fmt: skip
    with pytest.raises(ConvertError, match=r"'output_norm\.weight' has quantisation I32"):
        convert_gguf(source, tmp_path / "out")


def test_every_cut_of_a_file_is_noticed(tmp_path):
    content = llama(tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 4, 10, 30, 200, len(content) // 2, len(content) - 40):
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(ConvertError, match=r"cut\.gguf"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_files_are_no_gguf(tmp_path):
    (tmp_path / "m.gguf").write_text("hello")
    with pytest.raises(ConvertError, match=r"m\.gguf: is not a GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    with pytest.raises(ConvertError, match=r"none\.gguf: there is no such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")


def test_an_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConvertError, match="out: exists already"):
        convert_gguf(llama(tmp_path / "m.gguf"), tmp_path / "out")
    with pytest.raises(ConvertError, match="'int8' is not one of bfloat16"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "new", "int8")
    assert (tmp_path / "out" / "mine").exists()


def test_values_too_large_for_the_dtype_are_refused(tmp_path):
    large = {"output_norm.weight": np.full(64, 1e6, np.float32)}
    source = llama(tmp_path / "m.gguf", skip={"output_norm.weight"}, tensors=large)
    with pytest.raises(ConvertError, match=r"'output_norm\.weight' holds values too large"):
        convert_gguf(source, tmp_path / "out", "float16")
    convert_gguf(source, tmp_path / "out", "bfloat16")


def test_progress_counts_tensors_and_an_interruption_cleans_up(tmp_path):
    source, seen = llama(tmp_path / "m.gguf"), []
    convert_gguf(source, tmp_path / "out", progress=lambda *report: seen.append(report))
    total = len(load_file(tmp_path / "out" / "model.safetensors"))
    assert [done for done, _, _ in seen] == list(range(total + 1))
    assert {of for _, of, _ in seen} == {total}

    def interrupt(done, total, name):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "second", progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_without_the_package_gguf_the_extra_is_named(tmp_path, monkeypatch):
    source = llama(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'rose-engine\[gguf\]'"):
        convert_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gemma3_27b_scales_attention_by_its_own_rule(tmp_path):
    for layers, scalar in ((62, 64 // 4), (6, 32)):  # hidden / heads against head_dim
        model = tiny_model("gemma3", num_hidden_layers=layers)
        source = write_gguf(tmp_path / f"{layers}.gguf", "gemma3", model)
        convert_gguf(source, tmp_path / str(layers))
        config = json.loads((tmp_path / str(layers) / "config.json").read_text())
        assert config["query_pre_attn_scalar"] == scalar
        assert config["layer_types"].count("full_attention") == layers // 6
