"""Every architecture that comes out of a GGUF, written with the names of the package gguf."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers as pre
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rose.models.gguf import ConvertError, convert_gguf
from rose.models.gguf.families import FAMILIES
from rose.models.loader import load
from tests import tiny
from tests.unit.gguf_files import SIZES, bpe, value_type, write_vocabulary

ENCODER_SIZES = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | {
    "num_hidden_layers": 4,
    "pad_token_id": 0,
}
CLASSES = {
    "gemma": (GemmaConfig, GemmaForCausalLM, {"head_dim": 32}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 3},
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 9}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "qwen3moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "bert": (BertConfig, BertModel, {}),
    "nomic-bert": (NomicBertConfig, NomicBertModel, {}),
    "modern-bert": (
        ModernBertConfig,
        ModernBertModel,
        {"local_attention": 8, "cls_token_id": 0, "sep_token_id": 0},
    ),
}
ENCODERS = {"bert", "nomic-bert", "modern-bert"}


def tiny_model(arch, **changes):
    """A random model; its weights are small multiples of 2^-8, exact in every format."""
    torch.manual_seed(0)
    config_class, model_class, own = CLASSES[arch]
    sizes = ENCODER_SIZES if arch in ENCODERS else SIZES
    options = {"add_pooling_layer": False} if arch == "bert" else {}
    model = model_class(config_class(**(sizes | own | changes)), **options)
    for name, parameter in model.named_parameters():
        scale = 4 if "norm" in name.lower() else 32
        step = torch.randint(-scale, scale + 1, parameter.shape) / 256
        from_one = "norm" in name.lower() and name.endswith("weight") and "gemma" not in arch
        parameter.data = step + from_one
    return model.eval()


def checkpoint(model, folder):
    """The tensors of the model under the names in which it is published."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def stored(arch, tensors, layers):
    """Names and values as llama.cpp's converter stores them."""
    names = gguf.get_tensor_name_map(
        next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), layers
    )
    experts = {}
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if "gemma" in arch and name.endswith("norm.weight"):
            values = values + 1
        if ".experts." in name:
            before, after = name.split(".experts.")
            number, kind = after.split(".", 1)
            experts.setdefault(f"{before}.experts.{kind}", {})[int(number)] = values
            continue
        yield names.get_name(name, try_suffixes=(".weight", ".bias")), values
    for name, parts in experts.items():
        values = np.stack([parts[number] for number in range(len(parts))])
        yield names.get_name(name, try_suffixes=(".weight",)), values


def settings(arch, config):
    """The metadata that llama.cpp's converter writes for the architecture alone."""
    epsilon = "layer_norm_rms_epsilon"
    values = {}
    if arch in ENCODERS:
        epsilon = "layer_norm_epsilon"
        values = {"attention.causal": False, "pooling_type": 1}
    eps = getattr(config, "norm_eps", None) or getattr(config, "layer_norm_eps", None)
    values[f"attention.{epsilon}"] = eps or config.rms_norm_eps
    rope = getattr(config, "rope_parameters", None)
    if rope and "gemma" not in arch:
        values["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    if arch == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
    if arch in ("gemma2", "phi3"):
        values["attention.sliding_window"] = config.sliding_window or 0
    if arch == "phi3":
        share = rope.get("partial_rotary_factor", 1.0)
        heads = config.hidden_size // config.num_attention_heads
        values["rope.dimension_count"] = int(share * heads)
        values["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    if arch == "qwen3moe":
        values |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if arch == "modern-bert":
        values |= {
            "attention.sliding_window": config.local_attention,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
            "rope.scaling.type": "none",
            "vocab_size": config.vocab_size,
            "classifier.pooling_type": 2,
        }
    if getattr(config, "head_dim", None) and arch not in ENCODERS:
        values |= {"attention.key_length": config.head_dim}
        values |= {"attention.value_length": config.head_dim}
    return values


def write(path, arch, model, tensors, *, changes=(), more=(), skip=()):
    """Write a GGUF; `changes` are settings and `more` tensors that are added or replaced."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    common = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
    }
    if arch not in ENCODERS:
        common["attention.head_count_kv"] = config.num_key_value_heads
    for key, value in (common | settings(arch, config) | dict(changes)).items():
        if key not in skip:
            writer.add_key_value(f"{arch}.{key}", value, value_type(value))
    found = dict(stored(arch, tensors, config.num_hidden_layers))
    for name, values in (found | dict(more)).items():
        if name not in skip:
            writer.add_tensor(name, np.ascontiguousarray(values))
    write_vocabulary(writer, bpe(pre.ByteLevel(False)), "smollm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def outputs(model):
    with torch.no_grad():
        out = model(torch.arange(40)[None])
    return getattr(out, "logits", None) if hasattr(out, "logits") else out.last_hidden_state


def convert(tmp_path, arch, model, **written):
    tensors = checkpoint(model, tmp_path / "origin")
    source = write(tmp_path / "model.gguf", arch, model, tensors, **written)
    convert_gguf(source, tmp_path / "out", "float32")
    return tensors, tmp_path / "out"


def again(folder, arch):
    if arch == "bert":
        return BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    auto = AutoModel if arch in ENCODERS else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval()


@pytest.mark.parametrize("arch", CLASSES)
def test_weights_and_outputs_survive_the_round_trip(tmp_path, arch):
    model = tiny_model(arch)
    expected, out = convert(tmp_path, arch, model)
    written = load_file(out / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    copy = again(out, arch)
    assert type(copy) is type(model)
    assert copy.config.rope_parameters == model.config.rope_parameters if arch != "bert" else True
    assert torch.equal(outputs(copy), outputs(model))
    loaded = load(out, dtype="float32")
    assert ("generate" in loaded.card.tasks) is (arch not in ENCODERS)


def test_all_architectures_are_tested():
    assert CLASSES.keys() | {"llama", "qwen2", "qwen3", "gemma3"} == FAMILIES.keys()
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert FAMILIES.keys() <= known


def test_an_encoder_says_how_it_pools_and_generates_nothing(tmp_path):
    _, out = convert(tmp_path, "bert", tiny_model("bert"))
    assert json.loads((out / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"]
    assert not (out / "generation_config.json").exists()


@pytest.mark.parametrize(("layers", "scalar"), [(46, 16), (3, 32)])
def test_gemma2_27b_scales_attention_by_its_own_rule(tmp_path, layers, scalar):
    model = tiny_model("gemma2", num_hidden_layers=layers, query_pre_attn_scalar=scalar)
    _, out = convert(tmp_path, "gemma2", model)
    config = json.loads((out / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == scalar
    assert config["layer_types"] == model.config.layer_types


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "long_factor": [1.5, 2.0, 4.25, 8.0],
    "short_factor": [1.0, 1.0, 1.25, 1.5],
}


def phi3_128k(tmp_path, **written):
    model = tiny_model(
        "phi3", rope_parameters=dict(LONG), original_max_position_embeddings=32, sliding_window=None
    )
    factors = {
        f"rope_factors_{kind}.weight": np.array(LONG[f"{kind}_factor"], np.float32)
        for kind in ("long", "short")
    }
    written = {"more": factors} | written
    return model, convert(tmp_path, "phi3", model, **written)[1]


def test_the_long_and_the_short_factors_of_phi3(tmp_path):
    attention = (1 + np.log(4) / np.log(32)) ** 0.5
    changes = {"rope.scaling.attn_factor": float(attention), "rope.scaling.type": "longrope"}
    model, out = phi3_128k(tmp_path, changes=changes)
    copy = again(out, "phi3")
    for key in ("rope_type", "long_factor", "short_factor", "partial_rotary_factor"):
        assert copy.config.rope_parameters[key] == LONG[key]
    assert copy.config.sliding_window is None
    assert torch.equal(outputs(copy), outputs(model))
    load(out, dtype="float32")


def test_what_phi3s_rope_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConvertError, match=r"attn_factor is 2\.0"):
        phi3_128k(tmp_path, changes={"rope.scaling.attn_factor": 2.0})
    length = "rope.scaling.original_context_length"
    with pytest.raises(ConvertError, match=rf"'phi3\.{length}' is 1, and 2 is the least possible"):
        phi3_128k(tmp_path, changes={length: 1})
    with pytest.raises(ConvertError, match=r"has 'rope_factors_long\.weight', and of the long"):
        phi3_128k(tmp_path, skip={"rope_factors_short.weight"})


NEW = {"more": {"rope_freqs.weight": np.ones(8, np.float32)}}
BAD = {
    "a causal encoder": ("bert", {"changes": {"attention.causal": True}}, "the model is causal"),
    "a ranker": ("bert", {"changes": {"pooling_type": 4}}, "pooling type 4 is not supported"),
    "a classifier": (
        "bert",
        {"more": {"cls.weight": np.zeros((64, 64), np.float32)}},
        r"tensor 'cls\.weight' has no place in a bert model",
    ),
    "no token types": (
        "bert",
        {"skip": {"token_types.weight"}},
        r"has no tensor 'token_types\.weight', which a bert model needs",
    ),
    "rope factors of an encoder": ("nomic-bert", NEW, r"'rope_freqs\.weight' has no place"),
    "other factors of phi3": ("phi3", NEW, r"'rope_freqs\.weight' has no place"),
    "windows in periods of no layer": (
        "gemma2",
        {"changes": {"attention.sliding_window_pattern": 0}},
        r"'gemma2\.attention\.sliding_window_pattern' is 0, and 1 is the least possible",
    ),
    "periods of no layer in an encoder": (
        "modern-bert",
        {"changes": {"attention.sliding_window_pattern": 0}},
        r"'modern-bert\.attention\.sliding_window_pattern' is 0, and 1 is the least possible",
    ),
    "experts of NomicBERT": (
        "nomic-bert",
        {"changes": {"moe_every_n_layers": 2}},
        r"setting 'nomic-bert\.moe_every_n_layers' is not supported",
    ),
    "OLMo 3": (
        "olmo2",
        {"changes": {"attention.sliding_window": 8}},
        r"setting 'olmo2\.attention\.sliding_window' is not supported",
    ),
    "shared experts": (
        "qwen3moe",
        {"changes": {"expert_shared_feed_forward_length": 8}},
        r"expert_shared_feed_forward_length' is not supported",
    ),
    "experts of another size": (
        "qwen3moe",
        {"changes": {"expert_count": 4}},
        r"'blk\.0\.ffn_gate_inp\.weight' has shape \(5, 64\)",
    ),
    "scaled rope of an encoder": (
        "nomic-bert",
        {"changes": {"rope.scaling.type": "yarn"}},
        "rope scaling is not supported for nomic-bert",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_fault_is_named(tmp_path, fault):
    arch, written, message = BAD[fault]
    with pytest.raises(ConvertError, match=rf"model\.gguf: .*{message}"):
        convert(tmp_path, arch, tiny_model(arch), **written)
    assert not (tmp_path / "out").exists()


def bert_gguf(path, tokenizer, model, tensors):
    """A BERT whose vocabulary is spelled as llama.cpp spells it."""
    source = write(path.with_suffix(".plain"), "bert", model, tensors)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "bert")
    for name, entry in reader.fields.items():
        if name.startswith("bert."):
            writer.add_key_value(name, entry.contents(), entry.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [t if t in special else t[2:] if t.startswith("##") else "\u2581" + t for t in tokens]
    )
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_word_piece_tokenizer_comes_from_its_own_folder(tmp_path):
    tokenizer = tiny.bert_tokenizer()
    tokenizer.save_pretrained(tmp_path / "own")
    model = tiny_model("bert", vocab_size=len(tokenizer))
    tensors = checkpoint(model, tmp_path / "origin")
    source = bert_gguf(tmp_path / "m.gguf", tokenizer, model, tensors)
    with pytest.raises(ConvertError, match=r"tokenizer of type 'bert'.*give tokenizer_from"):
        convert_gguf(source, tmp_path / "out")
    convert_gguf(source, tmp_path / "out", tokenizer_from=tmp_path / "own")
    load(tmp_path / "out")
    text = json.loads((tmp_path / "own" / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    first, second = [token for token in vocab if token.startswith("##")][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "own" / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ConvertError, match=r"its tokenizer is not that of .*m\.gguf: token"):
        convert_gguf(source, tmp_path / "other", tokenizer_from=tmp_path / "own")
