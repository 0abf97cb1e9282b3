"""Reading a checkpoint's small files: what is refused, what is chosen, and from where."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rose.kernels.registry import Registry
from rose.models.bert_config import read_bert_config
from rose.models.config import CheckpointFolder, ConfigReader
from rose.models.decoder_config import LLAMA, QWEN2, QWEN3
from rose.models.errors import CheckpointError
from rose.models.generation import read_generation_card
from rose.models.modernbert_config import read_modernbert_config
from rose.models.plan import fingerprint, plan_checkpoint
from rose.models.recipe import read_recipe
from rose.models.registry import ARCHITECTURES
from rose.models.tokenizer import read_tokenizer_card

BERT = {"model_type": "bert", "architectures": ["BertModel"]}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the small files of a BERT embedder and a weight file of one tensor."""
    write(tmp_path / "config.json", BERT)
    write_weights(tmp_path, bytes(4096))
    types = ["Transformer", "Pooling", "Normalize"]
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": ST + kind}
        for i, kind in enumerate(types)
    ]
    write(tmp_path / "modules.json", entries)
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    return tmp_path


ST = "sentence_transformers.models."


def write(file: Path, value: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


def write_weights(folder: Path, data: bytes) -> None:
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"a": entry}).encode()
    start = len(header).to_bytes(8, "little") + header
    (folder / "model.safetensors").write_bytes(start + data)


def settings(plan) -> dict[str, tuple[object, str]]:
    return {setting.name: (setting.value, setting.source) for setting in plan.settings}


def test_every_setting_names_its_source(folder):
    write(folder / "config.json", BERT | {"hidden_size": 48, "layer_norm_eps": None})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 77, "do_lower_case": True})
    found = settings(plan_checkpoint(folder))
    assert found["hidden_size"] == (48, "config.json")
    assert found["layer_norm_eps"] == (1e-12, "default of bert")  # null is absent
    assert found["max_model_len"] == (77, "sentence_bert_config.json")
    assert found["do_lower_case"] == (True, "sentence_bert_config.json")
    assert found["pooling"] == ("mean", "1_Pooling/config.json")
    assert found["normalize"] == (True, "modules.json")
    assert found["tasks"] == (("embed",), "modules.json")
    chosen = settings(plan_checkpoint(folder, max_model_len=9, tasks=("embed",)))
    assert chosen["max_model_len"] == (9, "option --max-model-len")
    assert chosen["tasks"] == (("embed",), "option --task")


@pytest.mark.parametrize("name", ["missing", "file.txt", "model.gguf", "empty"])
def test_what_is_no_model(tmp_path, name):
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
        (path / "notes.txt").write_text("")
    elif name != "missing":
        path.write_text("x")
    wanted = {
        "missing": "does not exist",
        "file.txt": r"not a folder.*config\.json",
        "model.gguf": "rose convert",
        "empty": r"config\.json is missing.*tokenizer\.json.*notes\.txt",
    }
    with pytest.raises(CheckpointError, match=wanted[name]):
        plan_checkpoint(path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "3", "null", '"text"', "{'a': 1}", "[" * 100000, b"\xff\xfe\x00", "{} {}"],
)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "tokenizer_config.json",
        "1_Pooling/config.json",
    ],
)
def test_malformed_json_names_the_file(folder, name, content):
    data = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        plan_checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "384"),
        ("hidden_size", 384.0),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", -384),
        ("hidden_size", [384]),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 5),
        ("vocab_size", {}),
        ("layer_norm_eps", "1e-5"),
        ("layer_norm_eps", False),
        ("hidden_act", 3),
        ("hidden_act", {}),
        ("is_decoder", True),
        ("is_decoder", "no"),
        ("position_embedding_type", "relative_key"),
        ("max_position_embeddings", "512"),
        ("model_type", None),
        ("model_type", 7),
        ("model_type", "bart"),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_wrong_values_name_file_and_key(folder, key, value):
    write(folder / "config.json", BERT | {key: value})
    with pytest.raises(CheckpointError, match=rf"config\.json.*{key}") as caught:
        plan_checkpoint(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"_load_in_8bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"quant_method": "awq"}, "awq"),
        ({"bits": 4}, "an unknown quantization .*bits"),
        ("int8", "an object is expected"),
    ],
)
def test_foreign_quantizations_are_named(folder, value, named):
    write(folder / "config.json", BERT | {"quantization_config": value})
    with pytest.raises(CheckpointError, match=rf"quantization_config: .*{named}"):
        plan_checkpoint(folder)


def test_infinite_numbers_are_refused(folder):
    (folder / "config.json").write_text('{"model_type": "bert", "layer_norm_eps": Infinity}')
    with pytest.raises(CheckpointError, match="layer_norm_eps"):
        plan_checkpoint(folder)


def test_an_unknown_architecture_lists_the_known_ones(folder):
    write(folder / "config.json", BERT | {"model_type": "brt"})
    with pytest.raises(CheckpointError, match=r"'brt'.*Known: bert, .*qwen3"):
        plan_checkpoint(folder)


def test_an_unknown_activation_is_refused_when_the_model_is_built(tmp_path):
    from rose.models.loader import load
    from tests import tiny

    path = tiny.save_bert(tmp_path)
    tiny.edit_json(path / "config.json", hidden_act="geloo")
    with pytest.raises(CheckpointError, match=r"geloo.*gelu"):
        load(path)


def test_settings_of_sentence_transformers_reach_the_config(folder):
    for key in ("config_args", "config_kwargs"):
        write(folder / "sentence_bert_config.json", {key: {"hidden_size": 48}})
        found = settings(plan_checkpoint(folder))
        assert found["hidden_size"] == (48, f"sentence_bert_config.json: {key}")


# --- recipes ---------------------------------------------------------------------------------


def entries_of(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "modules.json").read_text())


@pytest.mark.parametrize(
    "kind",
    [
        "sentence_transformers.models.CNN",
        "sentence_transformers.models.LSTM",
        "sentence_transformers.models.WeightedLayerPooling",
        "sentence_transformers.models.Asym",
        "sentence_transformers.base.modules.router.Router",
        "sentence_transformers.models.StaticEmbedding",
        "st_quantize.OtherQuantizer",
        "custom_module.Dense",
        "pylate.models.Other.Dense",
        "Dense",
        "",
    ],
)
def test_unknown_modules_are_named(folder, kind):
    write(folder / "modules.json", [*entries_of(folder), {"type": kind, "path": "3_X"}])
    with pytest.raises(CheckpointError, match=f"'{kind}' is not supported.*Dense"):
        plan_checkpoint(folder)


@pytest.mark.parametrize(
    "entry", [3, None, "Dense", {}, {"type": 3}, {"type": ST + "Dense", "path": 3}]
)
def test_malformed_module_entries(folder, entry):
    write(folder / "modules.json", [*entries_of(folder), entry])
    with pytest.raises(CheckpointError, match=r"modules\.json: entry 3"):
        plan_checkpoint(folder)


NOT_WITHIN = ["../secret", "/etc", "a/../../b", "a\0b"]


@pytest.mark.parametrize("path", NOT_WITHIN)
def test_module_paths_stay_within_the_folder(folder, path):
    write(folder / "modules.json", [*entries_of(folder), {"type": ST + "Dense", "path": path}])
    with pytest.raises(CheckpointError, match="folder within the model"):
        plan_checkpoint(folder)


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["broken link", "loop", "folder", "pipe"])
def test_what_is_no_file_is_not_taken_as_absent(folder, name, kind):
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file if kind == "loop" else "../../blobs/abc")
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        read_tokenizer_card(plan_checkpoint(folder).core)


@pytest.mark.parametrize("kind", ["Pooling", "Dense"])
def test_a_module_whose_folder_is_missing_is_refused(folder, kind):
    entries = [*entries_of(folder)[:2], {"type": ST + "Dense", "path": "1_Pooling"}]
    entries[1 if kind == "Pooling" else 2]["path"] = "7_None"
    write(folder / "modules.json", entries)
    with pytest.raises(CheckpointError, match=rf"modules\.json: entry \d: module .*{kind}.*7_None"):
        plan_checkpoint(folder)


@pytest.mark.parametrize(
    "kinds",
    [
        [],
        ["Pooling", "Transformer"],
        ["Transformer"],
        ["Transformer", "Normalize"],
        ["Transformer", "Dense", "Pooling"],
        ["Transformer", "Pooling", "Pooling"],
        ["Transformer", "Pooling", "Transformer"],
    ],
)
def test_orders_of_modules_that_make_no_sense(folder, kinds):
    write(
        folder / "modules.json",
        [{"type": ST + kind, "path": "1_Pooling" if i else ""} for i, kind in enumerate(kinds)],
    )
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        plan_checkpoint(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode": "attention"},
        {"pooling_mode": ["mean", "attention"]},
        {"pooling_mode": 3},
        {"pooling_mode": {"a": 1}},
        {"pooling_mode_attention": True},
        {"pooling_mode_attention": False, "pooling_mode_mean_tokens": True},
    ],
)
def test_unknown_pooling_modes_are_refused(folder, config):
    write(folder / "1_Pooling" / "config.json", config)
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json.*pooling mode.*Known"):
        plan_checkpoint(folder)


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_pooling_without_config_is_the_mean_with_a_warning(folder, content):
    (folder / "1_Pooling" / "config.json").unlink()
    if content:
        (folder / "1_Pooling" / "config.json").write_text(content)
    plan = plan_checkpoint(folder)
    assert plan.recipe is not None
    assert plan.recipe.pooling.modes == ("mean",)
    assert "1_Pooling/config.json" in plan.warnings[0]


def test_pooling_names_win_over_flags(folder):
    write(
        folder / "1_Pooling" / "config.json",
        {"pooling_mode": ["lasttoken", "cls"], "pooling_mode_mean_tokens": True},
    )
    recipe = read_recipe(CheckpointFolder(folder), causal=False)
    assert recipe.pooling.modes == ("last", "cls")


@pytest.mark.parametrize(
    "config",
    [
        {"out_features": 8},
        {"in_features": 32},
        {"in_features": "32", "out_features": 8},
        {"in_features": 32, "out_features": 0},
        {"in_features": 32, "out_features": 8, "bias": "yes"},
        {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.Softmax"},
        {"in_features": 32, "out_features": 8, "activation_function": "evil.Tanh"},
        {"in_features": 32, "out_features": 8, "activation_function": "Tanh"},
        {"in_features": 32, "out_features": 8, "module_input_name": "token_embeddings"},
        {"in_features": 32, "out_features": 8, "module_output_name": "other"},
        {"in_features": 32, "out_features": 8, "gating": True},
    ],
)
def test_dense_settings_that_are_refused(folder, config):
    dense = {"type": "sentence_transformers.base.modules.dense.Dense", "path": "2_Dense"}
    write(folder / "modules.json", [*entries_of(folder)[:2], dense])
    write(folder / "2_Dense" / "config.json", config)
    with pytest.raises(CheckpointError, match=r"2_Dense/config\.json"):
        plan_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config_sentence_transformers.json", {"prompts": ["a"]}),
        ("config_sentence_transformers.json", {"prompts": {"a": 3}}),
        ("config_sentence_transformers.json", {"prompts": {"a": "x"}, "default_prompt_name": "b"}),
        ("config_sentence_transformers.json", {"default_prompt_name": "b"}),
        ("config_sentence_transformers.json", {"truncate_dim": 0}),
        ("config_sentence_transformers.json", {"truncate_dim": "64"}),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}),
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}),
        ("config_sentence_transformers.json", {"matryoshka_dimensions": [64, -1]}),
        ("sentence_bert_config.json", {"max_seq_length": "256"}),
        ("sentence_bert_config.json", {"max_seq_length": True}),
        ("sentence_bert_config.json", {"max_seq_length": 0}),
        ("sentence_bert_config.json", {"max_seq_length": -1}),
        ("sentence_bert_config.json", {"do_lower_case": "yes"}),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}),
        ("sentence_bert_config.json", {"module_output_name": "scores"}),
        ("sentence_bert_config.json", {"query_expansion": {"length": 32}}),
        ("sentence_bert_config.json", {"modality_config": {"image": {}}}),
        ("sentence_bert_config.json", {"modality_config": {"text": {}, "message": {}}}),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler"}}},
        ),
        ("tokenizer_config.json", {"model_max_length": "512"}),
        ("tokenizer_config.json", {"model_max_length": 0}),
    ],
)
def test_settings_that_are_refused(folder, name, values):
    write(folder / name, values)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        plan_checkpoint(folder)


# --- decoders --------------------------------------------------------------------------------


def read(architecture, **values):
    reader = ConfigReader(values, "config.json", architecture.name)
    return architecture.read_config(reader), reader


def test_defaults_of_the_decoders():
    llama, reader = read(LLAMA)
    assert (llama.hidden_size, llama.num_kv_heads, llama.head_dim) == (4096, 32, 128)
    assert llama.ropes["full_attention"].theta == 10000.0
    assert all(s.source != "config.json" for s in reader.settings)
    qwen2, _ = read(QWEN2, hidden_size=64, num_attention_heads=4)
    assert (qwen2.head_dim, qwen2.qkv_bias, qwen2.output_bias) == (16, True, False)
    qwen3, _ = read(QWEN3, hidden_size=64, num_attention_heads=4)
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm) == (128, False, True)


def test_a_null_head_dim_is_derived():
    assert read(QWEN3, hidden_size=64, num_attention_heads=4, head_dim=None)[0].head_dim == 16
    # Explicit, heads need not divide the hidden size.
    assert read(LLAMA, hidden_size=56, num_attention_heads=3, head_dim=16)[0].head_dim == 16
    with pytest.raises(CheckpointError, match="head_dim is not given"):
        read(LLAMA, hidden_size=56, num_attention_heads=3)


@pytest.mark.parametrize(
    "values",
    [
        {"head_dim": 15},
        {"head_dim": 0},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 0},
        {"is_causal": "no"},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["linear_attention"] * 32},
        {"layer_types": ["sliding_attention"] * 32},
        {"layer_types": "full_attention"},
        {"layer_types": ["sliding_attention"] * 32, "use_sliding_window": False},
        {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
        {"rope_theta": 0},
        {"rope_theta": "1e4"},
        {"rope_scaling": "linear"},
        {"rope_parameters": []},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "mrope"}},
        {"rope_scaling": {"type": "longrope"}},
        {"rope_scaling": {"rope_type": "su"}},
        {"rope_scaling": {"rope_type": 3}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": "4"}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {"type": "dynamic"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 2,
                "high_freq_factor": 2,
            }
        },
    ],
    ids=str,
)
def test_decoder_settings_that_are_refused(values):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(QWEN3, **values)


def test_an_unknown_rope_kind_is_named():
    with pytest.raises(CheckpointError, match=r"'mrope'.*default, linear, dynamic, llama3, yarn"):
        read(LLAMA, rope_scaling={"type": "mrope"})


def test_rope_settings_at_the_wrong_place_are_refused():
    reader = ConfigReader(
        {"rope_scaling": {"full_attention": {"rope_type": "linear"}}}, "config.json", "modernbert"
    )
    with pytest.raises(CheckpointError, match="full_attention: an object of settings"):
        read_modernbert_config(reader)


def test_rope_given_twice_warns():
    _, reader = read(LLAMA, rope_theta=7.0, rope_parameters={"rope_theta": 9.0})
    assert "rope_parameters is used" in reader.warnings[0]
    _, reader = read(
        LLAMA, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 9.0}
    )
    assert "rope_scaling is used" in reader.warnings[0]
    _, reader = read(LLAMA, rope_scaling={"type": "default", "colour": "red"})
    assert "colour" in reader.warnings[0]
    assert read(LLAMA, rope_theta=9.0, rope_scaling=None)[1].warnings == []


def test_rope_settings_name_their_source():
    _, reader = read(LLAMA, rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2.0})
    found = {s.name: (s.value, s.source) for s in reader.settings if s.name.startswith("rope")}
    assert found == {
        "rope_scaling.kind": ("linear", "config.json: rope_scaling"),
        "rope_scaling.theta": (7.0, "config.json"),
        "rope_scaling.factor": (2.0, "config.json: rope_scaling"),
    }
    found = {s.name: (s.value, s.source) for s in read(QWEN2)[1].settings}
    assert found["rope_parameters.theta"] == (10000.0, "default of qwen2")


def test_windows():
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 30}
    causal, _ = read(QWEN2, **window)
    assert causal.window == (7, 0)
    assert causal.layer_types == ("full_attention",) * 30 + ("sliding_attention",) * 2
    both, _ = read(QWEN2, **window, is_causal=False)
    assert both.window == (8, 8)
    off, _ = read(QWEN2, **(window | {"use_sliding_window": False}))
    assert off.window == (None, None)
    none, _ = read(QWEN2, **(window | {"sliding_window": None}))
    assert "sliding_attention" not in none.layer_types


# --- tasks, generation, fingerprint -----------------------------------------------------------


def llm(folder: Path, **values: object) -> Path:
    write(
        folder / "config.json",
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "tie_word_embeddings": True,
            **values,
        },
    )
    return folder


def test_tasks(folder):
    assert plan_checkpoint(folder).tasks == ("embed",)
    with pytest.raises(CheckpointError, match="cannot generate"):
        plan_checkpoint(folder, tasks=("generate",))
    with pytest.raises(CheckpointError, match="'dance' is unknown"):
        plan_checkpoint(folder, tasks=("dance",))
    llm(folder)
    assert plan_checkpoint(folder).tasks == ("embed", "generate")
    assert plan_checkpoint(folder, tasks=("generate",)).recipe is None
    (folder / "modules.json").unlink()
    assert plan_checkpoint(folder).tasks == ("generate",)
    assert plan_checkpoint(folder, tasks=("generate", "embed")).tasks == ("embed", "generate")
    assert plan_checkpoint(llm(folder, is_causal=False)).tasks == ("embed",)
    assert plan_checkpoint(llm(folder, architectures=["LlamaModel"])).tasks == ("embed",)
    assert plan_checkpoint(llm(folder, architectures=None)).tasks == ("embed",)


def test_an_embedder_without_a_head_only_embeds(folder):
    plan = plan_checkpoint(llm(folder, tie_word_embeddings=False))
    assert plan.tasks == ("embed",)
    assert settings(plan)["tasks"][0] == ("embed",)
    assert "lm_head.weight" in plan.warnings[-1]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        plan_checkpoint(folder, tasks=("embed", "generate"))


def test_generation_settings(folder):
    llm(folder, eos_token_id=[5, 6], bos_token_id=1)
    assert read_generation_card(CheckpointFolder(folder)).eos_token_ids == (5, 6)
    write(
        folder / "generation_config.json",
        {"eos_token_id": 7, "temperature": 0.6, "top_k": 20, "top_p": 1, "min_p": None},
    )
    card = read_generation_card(CheckpointFolder(folder))
    assert (card.eos_token_ids, card.bos_token_id) == ((7,), 1)
    assert (card.temperature, card.top_k, card.top_p, card.min_p) == (0.6, 20, 1.0, None)
    write(folder / "generation_config.json", {"do_sample": False, "temperature": 0.6})
    assert read_generation_card(CheckpointFolder(folder)).temperature == 0
    for bad in ({"eos_token_id": "x"}, {"eos_token_id": [1, None]}, {"temperature": "hot"}):
        write(folder / "generation_config.json", bad)
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            read_generation_card(CheckpointFolder(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.5),
        ("top_k", -2),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e9),
    ],
)
def test_generation_settings_out_of_range_are_refused(folder, key, value):
    write(llm(folder) / "generation_config.json", {key: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key}: must be"):
        read_generation_card(CheckpointFolder(folder))


def test_fingerprints_follow_files_and_options(folder, tmp_path):
    def current(**options: object) -> str:
        return fingerprint(plan_checkpoint(folder), options)

    first = current()
    assert current() == first
    assert current(dtype="bfloat16") != first
    write(folder / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    second = current()
    assert second != first
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b" ")
    assert current() != second


def test_fingerprints_tell_fine_tunes_of_one_size(folder):
    found = set()
    for value in (0, 1):  # the first MiB is the same
        write_weights(folder, bytes(2 << 20) + bytes([value]) * (6 << 20))
        found.add(fingerprint(plan_checkpoint(folder), {}))
    assert len(found) == 2


@pytest.mark.parametrize("value", [10**6, 2**40, 2**63])
@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "head_dim", "num_labels"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_numbers_that_the_weights_cannot_have_are_refused(folder, key, value, suffix):
    if suffix == "bin":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    write(folder / "config.json", BERT | {key: value})
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: {value} is more than the"):
        plan_checkpoint(folder)


def test_positions_are_no_more_than_can_be_counted(folder):
    write(folder / "config.json", BERT | {"max_position_embeddings": 2**31})
    with pytest.raises(CheckpointError, match=r"config\.json: max_position_embeddings: .* at most"):
        plan_checkpoint(folder)


def test_registry_entries_load():
    assert isinstance(ARCHITECTURES, Registry)
    for name in ARCHITECTURES:
        assert ARCHITECTURES.load(name).name == name
    assert read_bert_config(ConfigReader({}, "config.json", "bert")).head_dim == 64


@pytest.mark.parametrize(
    "module",
    ["config", "recipe", "card", "plan", "registry", "tokenizer", "weight_files", "output"],
)
def test_free_of_torch(module):
    code = f"import sys, rose.models.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_planning_loads_no_torch(folder):
    code = (
        "import sys; from rose.models.plan import plan_checkpoint; "
        f"plan_checkpoint({str(folder)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
