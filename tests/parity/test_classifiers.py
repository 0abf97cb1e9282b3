"""Scores against transformers and sentence-transformers: classification heads, and yes or no."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer import modules as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rose.models.errors import CheckpointError
from rose.models.loader import LoadedModel, load
from rose.models.output import activate_scores
from rose.models.scoring import QWEN3_RERANKER
from tests import tiny
from tests.batches import ragged
from tests.parity.oracle import sequences

PAIRS = [("kite", "red kite over the sea"), ("green tea", "a"), ("sea", "sea"), ("a b c", "")]
LABELS = {0: "contradiction", 1: "entailment", 2: "neutral"}
KINDS = [*tiny.ENCODERS, *tiny.DECODERS]


def save(path: Path, kind: str, **overrides: object) -> Path:
    """A classifier; its label is wide apart from others, so that errors show."""
    if kind in tiny.ENCODERS:
        return tiny.save_encoder(path, kind, head="classifier", **overrides)
    return tiny.save_decoder(path, kind, head="classifier", **overrides)


def scores(
    model: LoadedModel, batch: list[list[int]], segments: list[list[int]] | None = None
) -> torch.Tensor:
    """Raw scores of packed sequences; one by one they are the same."""
    packed, cu = ragged(batch, segments)
    together = model.classifier(packed, cu)
    assert together.dtype == torch.float32
    for index, ids in enumerate(batch):
        alone = model.classifier(*ragged([ids], segments and [segments[index]]))
        torch.testing.assert_close(alone[0], together[index], atol=1e-5, rtol=1e-5)
    return together


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3])
def test_raw_scores(tmp_path, kind, count):
    path = save(tmp_path, kind, num_labels=count)
    model = load(path)
    assert model.card.tasks == (("score",) if count == 1 else ("classify",))
    assert model.card.scoring.labels == tuple(f"LABEL_{i}" for i in range(count))
    batch = sequences(40)
    reference = AutoModelForSequenceClassification.from_pretrained(path)
    expected = torch.cat([reference(torch.tensor([ids])).logits for ids in batch])
    torch.testing.assert_close(scores(model, batch), expected, atol=2e-5, rtol=1e-4)
    assert model.embedding is None
    assert model.lm is None


def test_labels_keep_their_order(tmp_path):
    path = save(tmp_path, "bert", id2label=LABELS)
    assert load(path).card.scoring.labels == ("contradiction", "entailment", "neutral")


@pytest.mark.parametrize("kind", list(tiny.DECODERS))
def test_the_last_token_that_is_no_padding_counts(tmp_path, kind):
    path = save(tmp_path, kind, num_labels=1, pad_token_id=5)
    batch = [[7, 8, 5, 5], [5, 5], [5, 9], [6, 5, 8]]
    reference = AutoModelForSequenceClassification.from_pretrained(path)
    expected = torch.cat([reference(torch.tensor([ids])).logits for ids in batch])
    torch.testing.assert_close(scores(load(path), batch), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["bfloat16", "float16"])
def test_half_precision_heads_stay_in_float32(tmp_path, mode):
    model = load(save(tmp_path, "bert", num_labels=1), dtype=mode)
    assert {p.dtype for p in model.classifier.head.parameters()} == {torch.float32}
    assert scores_of_equal_dtype(model)


def scores_of_equal_dtype(model: LoadedModel) -> bool:
    return model.classifier(*ragged([[5, 6, 7]])).dtype == torch.float32


def encode(
    model: LoadedModel, pairs: list[tuple[str, str]]
) -> tuple[list[list[int]], list[list[int]] | None]:
    """Tokenise pairs as a gateway does, cutting the longer text of a pair."""
    tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
    tokenizer.enable_truncation(model.card.max_model_len, strategy="longest_first")
    encoded = [tokenizer.encode(*pair) for pair in pairs]
    segments = [e.type_ids for e in encoded] if model.card.scoring.segment_ids else None
    return [e.ids for e in encoded], segments


@pytest.mark.parametrize("kind", list(tiny.ENCODERS))
def test_pairs_are_scored_as_by_sentence_transformers(tmp_path, kind):
    path = save(tmp_path / "model", kind, num_labels=1)
    options = {"tokenizer_class": "BertTokenizer"} if kind == "bert" else {}
    tiny.edit_json(path / "tokenizer_config.json", model_max_length=38, **options)
    long = ("who keeps bees", "a beekeeper looks after hives in the valley " * 30)
    for folder in (path, tmp_path / "saved"):
        reference = CrossEncoder(str(folder), device="cpu")
        if folder == path:
            reference.save_pretrained(str(tmp_path / "saved"))
        model = load(folder)
        assert model.card.scoring.segment_ids == (kind == "bert")
        found = activate_scores(
            scores(model, *encode(model, [*PAIRS, long])), model.card.scoring.activation
        )
        expected = reference.predict([*PAIRS, long])
        np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)
        assert model.warnings == []


def test_segments_matter_only_where_there_are_two(tmp_path):
    """A tokenizer that gives segment ids does not make a model look beyond its one segment."""
    path = save(tmp_path, "bert", num_labels=1, type_vocab_size=1)
    tiny.edit_json(path / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    assert not load(path).card.scoring.segment_ids


SIGMOID, IDENTITY = (
    f"torch.nn.modules.{name}" for name in ("activation.Sigmoid", "linear.Identity")
)
ACTIVATIONS = {
    "none, one label": (1, {}, {}, "sigmoid"),
    "none, three labels": (3, {}, {}, "identity"),
    "nested": (1, {"sentence_transformers": {"activation_fn": IDENTITY}}, {}, "identity"),
    "legacy": (1, {"sbert_ce_default_activation_function": IDENTITY}, {}, "identity"),
    "legacy null": (1, {"sbert_ce_default_activation_function": None}, {}, "sigmoid"),
    "nested before legacy": (
        1,
        {
            "sentence_transformers": {"activation_fn": SIGMOID},
            "sbert_ce_default_activation_function": IDENTITY,
        },
        {},
        "sigmoid",
    ),
    "own file": (1, {}, {"activation_fn": IDENTITY}, "identity"),
    "own file first": (
        1,
        {"sentence_transformers": {"activation_fn": IDENTITY}},
        {"activation_fn": SIGMOID},
        "sigmoid",
    ),
    "several labels": (3, {"sentence_transformers": {"activation_fn": SIGMOID}}, {}, "sigmoid"),
    "tanh": (1, {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, {}, "tanh"),
}


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("classifiers")
    return {count: save(folder / str(count), "bert", num_labels=count) for count in (1, 3)}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activation(classifiers, tmp_path, case):
    count, config, own, expected = ACTIVATIONS[case]
    path = tiny.copy(classifiers[count], tmp_path / "model")
    tiny.edit_json(path / "config.json", **config)
    if own:
        CrossEncoder(str(path), device="cpu").save_pretrained(str(path))
        tiny.edit_json(path / "config_sentence_transformers.json", **own)
        tiny.edit_json(path / "config.json", **config)
    model = load(path)
    assert model.card.scoring.activation == expected
    reference = CrossEncoder(str(path), device="cpu").predict(PAIRS)
    found = activate_scores(scores(model, *encode(model, PAIRS)), expected)
    np.testing.assert_allclose(found if count > 1 else found[:, 0], reference, atol=1e-5)


@pytest.mark.parametrize("value", ["torch.nn.Softmax", "mymodule.Scale", "torch.eye", 3])
def test_an_unknown_activation_is_refused(classifiers, tmp_path, value):
    path = tiny.copy(classifiers[1], tmp_path / "model")
    tiny.edit_json(path / "config.json", sentence_transformers={"activation_fn": value})
    with pytest.raises(CheckpointError, match=r"activation_fn.*Sigmoid"):
        load(path)


def test_great_scores_stay_ordered():
    raw = torch.tensor([[12.1], [12.3], [-40.0], [30.0], [31.0]])
    found = activate_scores(raw, "sigmoid")[:, 0]
    assert np.argsort(found).tolist() == np.argsort(raw[:, 0].numpy()).tolist()
    assert len(set(found.tolist())) == len(found)


@pytest.mark.parametrize(
    ("tasks", "count", "named"),
    [
        (("score",), 3, "cannot score"),
        (("classify",), 1, "cannot classify"),
        (("rank",), 1, "rank"),
    ],
)
def test_tasks_that_a_classifier_has_not(classifiers, tasks, count, named):
    with pytest.raises(CheckpointError, match=named):
        load(classifiers[count], tasks=tasks)


def test_the_backbone_of_a_classifier_may_embed(classifiers):
    model = load(classifiers[1], tasks=("embed", "score"))
    assert model.card.tasks == ("embed", "score")
    assert model.embedding.backbone is model.classifier.backbone


def test_a_pooling_module_makes_an_embedder_of_a_classifier(classifiers, tmp_path):
    modules = [st.Transformer(str(classifiers[1])), st.Pooling(32, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path))
    tiny.edit_json(tmp_path / "config.json", architectures=["BertForSequenceClassification"])
    assert load(tmp_path).card.tasks == ("embed",)


def test_malformed_labels_are_refused(classifiers, tmp_path):
    path = tiny.copy(classifiers[3], tmp_path / "model")
    for labels in ({"0": "a", "2": "b"}, {"0": 1}, {}, ["a"]):
        tiny.edit_json(path / "config.json", id2label=labels)
        with pytest.raises(CheckpointError, match="id2label"):
            load(path)


# Rankers that answer yes or no.


def save_ranker(path: Path, kind: str = "qwen3", chat: str | None = None, **overrides) -> Path:
    """A language model whose tokenizer knows yes, no and ChatML."""
    tiny.save_decoder(path, kind, vocab_size=80, **overrides)
    tokenizer = tiny.decoder_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(path)
    return path


def reference_yes_no(path: Path, batch: list[list[int]], ids: tuple[int, int]) -> torch.Tensor:
    """Qwen3-Reranker's own computation: softmax over the two logits at the end."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    rows = [model(torch.tensor([row])).logits[0, -1] for row in batch]
    both = torch.stack([row[[ids[1], ids[0]]] for row in rows])
    return torch.log_softmax(both, dim=1).exp()[:, 1]


def render(model: LoadedModel, query: str, document: str) -> list[int]:
    """Tokenise the three pieces of a template one by one."""
    tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
    template = model.card.scoring.template
    body = template.body.format(instruction=template.instruction, query=query, document=document)
    pieces = (template.prefix, body, template.suffix)
    return [
        token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids
    ]


@pytest.mark.parametrize("kind", list(tiny.DECODERS))
@pytest.mark.parametrize("tied", [True, False])
def test_yes_or_no(tmp_path, kind, tied):
    sizes = {"max_position_embeddings": 1024, "tie_word_embeddings": tied}
    path = save_ranker(tmp_path, kind, **sizes)
    model = load(path, tasks=("score",))
    facts = model.card.scoring
    assert (facts.kind, facts.activation, facts.labels) == ("yes_no", "sigmoid", ("yes",))
    assert facts.template == QWEN3_RERANKER
    batch = [render(model, *pair) for pair in PAIRS]
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tuple(tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    found = activate_scores(scores(model, batch), facts.activation)[:, 0]
    np.testing.assert_allclose(found, reference_yes_no(path, batch, ids), atol=1e-5)
    assert model.lm is None


def test_a_ranker_may_generate_too(tmp_path):
    model = load(save_ranker(tmp_path), tasks=("generate", "score"))
    assert model.card.tasks == ("generate", "score")
    assert model.lm.backbone is model.classifier.backbone


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("chat", [None, ROLES])
def test_logit_score_of_sentence_transformers(tmp_path, chat):
    path = save_ranker(tmp_path / "model", chat=chat)
    reference = CrossEncoder(str(path), device="cpu")
    reference.save_pretrained(str(tmp_path / "saved"))
    model = load(tmp_path / "saved")
    assert model.card.tasks == ("score",)
    assert model.card.scoring.template is None
    assert (model.card.scoring.chat is None) == (chat is None)
    features = reference.preprocess(PAIRS)
    batch = [
        row[mask.bool()].tolist()
        for row, mask in zip(features["input_ids"], features["attention_mask"], strict=True)
    ]
    found = activate_scores(scores(model, batch), model.card.scoring.activation)[:, 0]
    np.testing.assert_allclose(found, reference.predict(PAIRS), atol=1e-5)
    tiny.edit_json(tmp_path / "saved" / "1_LogitScore" / "config.json", false_token_id=None)
    again = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    found = activate_scores(scores(load(tmp_path / "saved"), batch), "sigmoid")[:, 0]
    np.testing.assert_allclose(found, again.predict(PAIRS), atol=1e-5)


def test_what_a_yes_no_ranker_lacks_is_named(tmp_path):
    path = tiny.save_decoder(tmp_path / "plain", "qwen3")
    with pytest.raises(CheckpointError, match="'yes' and 'no'"):
        load(path, tasks=("score",))
    tokenizer = tiny.decoder_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(path)
    with pytest.raises(CheckpointError, match="im_start"):
        load(path, tasks=("score",))
    headless = save_ranker(tmp_path / "headless", head=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(headless, tasks=("score",))
    bidirectional = save_ranker(tmp_path / "both", is_causal=False)
    with pytest.raises(CheckpointError, match="cannot score"):
        load(bidirectional, tasks=("score",))


def test_modules_that_would_change_the_score_are_refused(classifiers, tmp_path):
    CrossEncoder(str(classifiers[1]), device="cpu").save_pretrained(str(tmp_path))
    entries = json.loads((tmp_path / "modules.json").read_text())
    dense = {"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([*entries, dense]))
    shutil.copytree(classifiers[1], tmp_path / "1_Dense")
    with pytest.raises(CheckpointError, match="Transformer is expected, found Transformer, Dense"):
        load(tmp_path)
