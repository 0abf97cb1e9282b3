"""What is read from late-interaction checkpoints, shown, and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose import Engine
from rose.models.card import LateInteraction, QueryExpansion
from rose.models.errors import CheckpointError
from rose.models.loader import load
from rose.models.plan import plan_checkpoint
from rose.runtime.errors import RequestError
from rose.serving.inspect import inspect_checkpoint
from tests import late_checkpoints as late
from tests import tiny

STATED = "config_sentence_transformers.json"
QUERY, DOCUMENT = (late.VOCABULARY - len(late.MORE) + late.MORE.index(t) for t in ("[Q] ", "[D] "))
STOP, COMMA = (late.VOCABULARY - len(late.MORE) + late.MORE.index(t) for t in (".", ","))
MASK = tiny.bert_vocabulary().index("[MASK]")


@pytest.fixture
def pylate(tmp_path):
    return late.save_pylate(tmp_path / "model", "bert")


def settings_of(folder, **options):
    report = inspect_checkpoint(str(folder), **options)
    return {setting.name: setting for setting in report.settings}, report


def test_a_card_has_what_a_gateway_needs(pylate):
    card = load(pylate).card
    assert card.tasks == ("embed", "score")
    assert card.max_model_len == 20
    assert card.scoring is None
    facts = card.embedding
    assert (facts.dimensions, facts.hidden_size) == (12, 32)
    assert (facts.outputs, facts.pooling) == (("multi_vector",), "none")
    assert facts.late == LateInteraction(
        query_length=16,
        document_length=20,
        query_marker=QUERY,
        document_marker=DOCUMENT,
        expansion=QueryExpansion(token=MASK, length=16),
        skip_ids=(STOP, COMMA),
    )


def test_inspect_shows_settings_with_their_sources(pylate):
    settings, report = settings_of(pylate)
    shown = {
        "query marker": (f"'[Q] ' (token {QUERY})", f"{STATED}: query_prefix"),
        "document marker": (f"'[D] ' (token {DOCUMENT})", f"{STATED}: document_prefix"),
        "document length": (20, f"{STATED}: document_length"),
        "max_model_len": (20, f"{STATED}: document_length"),
        "skiplist_words": (". ,", STATED),
        "attend_to_expansion_tokens": (False, STATED),
        "pooling": ("none: a vector for each token", "modules.json"),
        "module 1": ("Dense(32 -> 12, identity)", "modules.json"),
    }
    for name, (value, source) in shown.items():
        assert (settings[name].value, settings[name].source) == (value, source)
    expansion = settings["query expansion"]
    assert expansion.value == f"to 16 tokens with token {MASK}, not seen by the others"
    assert (report.dimensions, report.tasks) == (12, ("embed", "score"))
    assert "1_Dense/model.safetensors" in {file.file for file in report.weights}


def test_what_pylate_leaves_out_is_its_default(pylate):
    tiny.edit_json(pylate / STATED, query_length=..., document_length=..., skiplist_words=...)
    tiny.edit_json(pylate / STATED, model_type=..., do_query_expansion=...)  # as it once was
    settings, report = settings_of(pylate)
    assert settings["query_length"].source == "default of PyLate"
    facts = plan_checkpoint(pylate).late
    assert facts.query_length == facts.expansion.length == 32
    assert facts.document_length == 64  # of 180, as many as the model has positions
    assert facts.skip_ids == (COMMA, STOP)  # of all punctuation
    assert any("skiplist_words" in warning and "!" in warning for warning in report.warnings)


def test_pylate_is_known_by_its_module(pylate):
    (pylate / STATED).write_text("{}")
    settings, _ = settings_of(pylate)
    assert settings["query marker"].value == f"'[Q] ' (token {QUERY})"
    assert settings["query_prefix"].source == "default of PyLate"
    assert settings["module 2"].value == "Normalize"


def test_the_command_line_sets_how_long_documents_may_be(pylate):
    for option, expected in ((17, 17), (50, 50)):
        facts = plan_checkpoint(pylate, max_model_len=option).late
        assert (facts.query_length, facts.document_length) == (16, expected)
    with pytest.raises(CheckpointError, match=r"filled up to 16 tokens, max_model_len is 15"):
        plan_checkpoint(pylate, max_model_len=15)


def test_tasks_can_be_chosen(pylate):
    card = load(pylate, tasks=("score",)).card
    assert card.tasks == ("score",)
    assert card.embedding.late is not None
    with pytest.raises(CheckpointError, match="cannot generate, only embed, score"):
        plan_checkpoint(pylate, tasks=("generate",))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (STATED, {"query_prefix": "[X] "}, rf"{STATED}: query_prefix: '\[X\] ' is no token of"),
        (STATED, {"document_prefix": ...}, None),  # the default is there
        (STATED, {"document_prefix": 3}, "document_prefix: a string"),
        (STATED, {"query_length": 0}, "query_length: must be at least 1"),
        (STATED, {"do_query_expansion": "yes"}, "do_query_expansion: true or false"),
        (STATED, {"skiplist_words": "."}, "skiplist_words: a list of texts"),
        (STATED, {"truncate_dim": 8}, "truncate_dim"),
        (STATED, {"model_type": "CrossEncoder"}, "model_type: 'CrossEncoder' does not embed"),
        ("1_Dense/config.json", {"in_features": 31}, "takes 31 channels, the module before"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "module_input_name"),
        (
            "1_Dense/config.json",
            {"out_features": 13},
            r"\[12, 32\], the config asks for \[13, 32\]",
        ),
        ("config.json", {"vocab_size": QUERY}, "query_prefix: .* beyond the .* rows"),
    ],
)
def test_what_cannot_be_had_is_named(pylate, file, changes, message):
    tiny.edit_json(pylate / file, **changes)
    if "vocab_size" in changes:
        key = "embeddings.word_embeddings.weight"
        tiny.edit_tensors(pylate, lambda all_: {**all_, key: all_[key][:QUERY].clone()})
    if message is None:
        assert plan_checkpoint(pylate).late.document_marker == DOCUMENT
        return
    with pytest.raises(CheckpointError, match=message):
        load(pylate)


def test_modules_that_do_not_go_with_tokens_are_refused(pylate):
    entries = json.loads((pylate / "modules.json").read_text())
    kinds = {
        "sentence_transformers.models.Pooling": "does not go with vectors of tokens",
        "sentence_transformers.multi_vector_encoder.modules.HierarchicalTokenPooling": "not support",
        "pylate.models.Other.Other": "not supported",
    }
    for kind, message in kinds.items():
        (pylate / "2_More").mkdir(exist_ok=True)
        more = {"idx": 2, "name": "2", "path": "2_More", "type": kind}
        (pylate / "modules.json").write_text(json.dumps([*entries, more]))
        with pytest.raises(CheckpointError, match=message):
            plan_checkpoint(pylate)
    (pylate / "modules.json").write_text(json.dumps(entries[:1]))
    with pytest.raises(CheckpointError, match="a Dense module is expected, found Transformer"):
        plan_checkpoint(pylate)


def test_stanford_checkpoints_say_less(tmp_path):
    folder = late.save_stanford(tmp_path / "model")
    (folder / "artifact.metadata").unlink()
    settings, report = settings_of(folder)
    assert settings["query marker"].value.startswith("'[unused0]'")
    assert settings["query_maxlen"].source == "default of stanford-nlp ColBERT"
    assert report.dimensions == 12
    first = load(folder).card.fingerprint
    (folder / "artifact.metadata").write_text('{"mask_punctuation": false, "doc_maxlen": 24}')
    card = load(folder).card
    assert card.fingerprint != first
    assert (card.embedding.late.skip_ids, card.embedding.late.document_length) == ((), 24)
    (folder / "artifact.metadata").write_text('{"similarity": "l2"}')
    with pytest.raises(CheckpointError, match="similarity: 'l2' is not supported"):
        load(folder)


def test_a_projection_has_to_be_there(tmp_path):
    folder = late.save_stanford(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.pop("linear.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'linear\.weight'"):
        plan_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "linear.weight": weight}, folder / "pytorch_model.bin")
    assert load(folder).card.embedding.dimensions == 12  # by artifact.metadata
    tiny.edit_json(folder / "artifact.metadata", dim=...)
    with pytest.raises(CheckpointError, match=r"linear\.weight"):
        plan_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "max"}}, "strategy"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min"}}, "length"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids"),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["image"]}, "'image' is unknown"),
        ("2_MultiVectorMask/config.json", {"other": 1}, "other: it is not supported"),
        (STATED, {"similarity_fn_name": "cosine"}, "similarity_fn_name: 'cosine'"),
    ],
)
def test_what_would_change_the_vectors_is_refused(tmp_path, file, changes, message):
    folder = late.save_library(tmp_path / "model", "bert")
    tiny.edit_json(folder / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        plan_checkpoint(folder)


def test_an_end_token_cannot_fill_queries_unseen(tmp_path):
    folder = late.save_library(
        tmp_path / "model",
        "bert",
        query_expansion={"strategy": "fixed", "length": 8, "token": "[SEP]"},
    )
    with pytest.raises(CheckpointError, match=r"queries end in '\[SEP\]' already"):
        plan_checkpoint(folder)


def test_arguments_in_this_process_are_checked(pylate):
    with Engine(pylate, device="cpu", max_batch_tokens=64) as engine:
        with pytest.raises(RequestError, match="embed_types") as failed:
            engine.embed("red")
        assert failed.value.field == "model"
        with pytest.raises(RequestError) as failed:
            engine.embed_types("red", ["multi_vector"])
        assert failed.value.field == "input_type"
        wrong = (
            ({"query": "red", "documents": ["a", "red " * 30]}, "documents[1]"),
            ({"query": "red " * 30, "documents": ["a"]}, "query"),
            ({"query": ["red", "a"], "documents": ["a"]}, "query"),
            ({"query": "red", "documents": [3]}, "documents[0]"),
            ({"query": "red", "documents": ["a"], "instruction": "find"}, "instruction"),
            ({"query": "red", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
            ({"query": "red", "documents": ["a"], "prompt_name": "none"}, "prompt_name"),
        )
        for arguments, field in wrong:
            with pytest.raises(RequestError) as failed:
                engine.score(**arguments)
            assert failed.value.field == field
        with pytest.raises(RequestError, match="cannot classify"):
            engine.classify("red")
        assert engine.score("red", []).shape == (0,)
        cut = engine.score("red", ["a", "red " * 30], truncate=True)
        kept = engine.score("red", ["a", "red " * 30], max_tokens_per_doc=20)
        assert cut.tolist() == pytest.approx(kept.tolist(), abs=1e-6)
