"""`Engine.score`, `rank` and `classify` against sentence-transformers and transformers."""

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rose import Engine
from rose.models.loader import load
from rose.models.scoring import QWEN3_RERANKER
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.graphs import GraphPolicy, WarmupShape
from rose.runtime.scoring import ScoringModel
from rose.runtime.worker import DeviceWorker
from tests import tiny
from tests.graph_rig import CallCapturer, FixedSdpaBackend
from tests.parity.test_classifiers import ROLES, reference_yes_no, save, save_ranker

QUERY = "who keeps bees"
DOCUMENTS = [
    "no idea",
    "a beekeeper looks after hives in the valley",
    "",
    "kite",
    "green tea a red kite over the sea",
    "a </s> b [SEP] c",
    "no idea",
]
LONG = "a beekeeper looks after hives in the valley " * 60


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Cross-encoders by their kind, made once."""
    folder = tmp_path_factory.mktemp("models")
    made = {}

    def get(kind, **options):
        key = (kind, *sorted(options.items()))
        if key not in made:
            made[key] = save(folder / str(len(made)), kind, num_labels=1, **options)
        return made[key]

    return get


@pytest.mark.parametrize("kind", list(tiny.ENCODERS))
def test_scores_are_those_of_a_cross_encoder(models, kind):
    path = models(kind)
    reference = CrossEncoder(str(path), device="cpu")
    expected = reference.predict([(QUERY, document) for document in DOCUMENTS])
    with Engine(path, device="cpu", dtype="float32") as engine:
        found = engine.score(QUERY, DOCUMENTS, truncate=True)
        alone = [engine.score(QUERY, [document], truncate=True)[0] for document in DOCUMENTS]
        single = engine.rank(QUERY, DOCUMENTS, top_n=3, truncate=True)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(alone, expected, atol=1e-4)
    ranked = reference.rank(QUERY, DOCUMENTS, top_k=3)
    assert [item.score for item in single] == pytest.approx([r["score"] for r in ranked], abs=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_long_pairs_are_cut_as_the_checkpoint_says(tmp_path, kind, side):
    """With segments that matter: token types of a size at which a mistake is seen."""
    path = save(tmp_path, kind, num_labels=1)
    options = {"tokenizer_class": "BertTokenizer"} if kind == "bert" else {}
    facts = {"truncation_side": side, "model_max_length": 38, **options}
    tiny.edit_json(path / "tokenizer_config.json", **facts)
    if kind == "bert":
        tiny.edit_tensors(path, _widen_types)
    pairs = [(QUERY, DOCUMENTS[0]), (QUERY, LONG), (LONG, "kite"), (LONG, LONG + "kite")]
    expected = CrossEncoder(str(path), device="cpu").predict(pairs)
    queries, documents = zip(*pairs, strict=True)
    with Engine(path, device="cpu", dtype="float32") as engine:
        assert engine.card.scoring.segment_ids == (kind == "bert")
        found = engine.score(queries, documents, truncate=True)
        with pytest.raises(RequestError, match=r"documents\[1\].*the limit is 38.*truncate=True"):
            engine.score(QUERY, ["kite", LONG])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def _widen_types(tensors):
    for name, tensor in tensors.items():
        if "token_type_embeddings" in name:
            tensors[name] = tensor * 20
    return tensors


def test_a_prompt_goes_before_the_query(models):
    path = models("bert")
    reference = CrossEncoder(str(path), device="cpu", prompts={"ask": "sea tea "})
    reference.save_pretrained(str(path) + "-prompts")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    with Engine(path.with_name(path.name + "-prompts"), device="cpu", dtype="float32") as engine:
        for options in ({"prompt_name": "ask"}, {"prompt": "kite "}, {}):
            expected = reference.predict(pairs, **options)
            found = engine.score(QUERY, DOCUMENTS, truncate=True, **options)
            np.testing.assert_allclose(found, expected, atol=1e-4)
        with pytest.raises(RequestError, match="the model has: ask"):
            engine.score(QUERY, DOCUMENTS, prompt_name="tell")


@pytest.mark.parametrize("chat", [None, ROLES])
def test_yes_or_no_of_sentence_transformers(tmp_path, chat):
    path = save_ranker(tmp_path / "model", chat=chat)
    reference = CrossEncoder(str(path), device="cpu")
    reference.save_pretrained(str(tmp_path / "saved"))
    expected = reference.predict([(QUERY, document) for document in DOCUMENTS])
    with Engine(tmp_path / "saved", device="cpu", dtype="float32") as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), expected, atol=1e-4)
        if chat:
            expected = reference.predict([(QUERY, "kite")], prompt="judge")
            found = engine.score(QUERY, ["kite"], instruction="judge")
            np.testing.assert_allclose(found, expected, atol=1e-4)
        else:
            with pytest.raises(RequestError, match="no place"):
                engine.score(QUERY, ["kite"], instruction="judge")


def test_qwen3_rerankers_prompt(tmp_path):
    path = save_ranker(tmp_path, max_position_embeddings=1024)
    tokenizer = AutoTokenizer.from_pretrained(path)
    answers = tuple(tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))

    def expected(instruction, room):
        template = QWEN3_RERANKER
        rows = []
        for document in [*DOCUMENTS, LONG]:
            body = f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}"
            pieces = [
                tokenizer(piece, add_special_tokens=False)["input_ids"]
                for piece in (template.prefix, body, template.suffix)
            ]
            rows.append(pieces[0] + pieces[1][: room - len(pieces[0] + pieces[2])] + pieces[2])
        return reference_yes_no(path, rows, answers).detach()

    with Engine(path, device="cpu", dtype="float32", tasks=("score",)) as engine:
        for instruction in (None, "find beekeepers"):
            found = engine.score(QUERY, [*DOCUMENTS, LONG], truncate=True, instruction=instruction)
            texts = expected(instruction or QWEN3_RERANKER.instruction, engine.card.max_model_len)
            np.testing.assert_allclose(found, texts, atol=1e-4)
        assert engine.rank(QUERY, [*DOCUMENTS, LONG], truncate=True)[0].index == int(
            np.argmax(engine.score(QUERY, [*DOCUMENTS, LONG], truncate=True))
        )


def test_a_ranker_that_generates_and_scores_with_one_copy_of_its_weights(tmp_path):
    path = save_ranker(tmp_path, max_position_embeddings=1024)
    with Engine(path, device="cpu", dtype="float32", tasks=("score",)) as engine:
        expected = engine.score(QUERY, DOCUMENTS)
    with Engine(
        path, device="cpu", dtype="float32", tasks=("embed", "generate", "score")
    ) as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), expected, atol=1e-5)
        loaded = engine._served.loaded
        assert loaded.classifier.backbone is loaded.lm.backbone is loaded.embedding.backbone
        assert len(engine.generate([QUERY], engine.sampling_params(max_tokens=3))) == 1
        assert engine.embed(["kite"]).shape == (1, 32)


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_classes_are_those_of_transformers(tmp_path, problem):
    labels = {0: "contradiction", 1: "entailment", 2: "neutral"}
    path = save(tmp_path, "bert", id2label=labels, problem_type=problem)
    tiny.edit_json(path / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    model = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = ["a red kite", ("green tea", "no idea"), "", LONG]
    arguments = [text if isinstance(text, tuple) else (text,) for text in texts]
    options = {"return_tensors": "pt", "truncation": True, "max_length": 40}
    logits = torch.cat([model(**tokenizer(*one, **options)).logits for one in arguments])
    expected = logits.sigmoid() if problem else logits.softmax(-1)
    with Engine(path, device="cpu", dtype="float32") as engine:
        found = engine.classify(texts, truncate=True)
        rows = [list(item.probabilities.values()) for item in found]
        np.testing.assert_allclose(rows, expected.detach(), atol=1e-4)
        assert [item.label for item in found] == [labels[int(i)] for i in expected.argmax(-1)]
        assert list(found[0].probabilities) == list(labels.values())
        assert engine.classify("a red kite")[0].label == found[0].label
        assert engine.classify(("green tea", "no idea"))[0].label == found[1].label
        assert engine.classify([]) == []
        with pytest.raises(RequestError, match="cannot score"):
            engine.score(QUERY, DOCUMENTS)


def test_what_does_not_fit_is_refused(models):
    with Engine(models("bert"), device="cpu", dtype="float32") as engine:
        assert engine.score(QUERY, []).shape == (0,)
        assert engine.rank(QUERY, []) == []
        for query, documents, field in (
            (QUERY, ["a", 3], "documents[1]"),
            (QUERY, ["a", None], "documents[1]"),
            ([QUERY], ["a", "b"], "query"),
            ([QUERY, 1], ["a", "b"], "query[1]"),
            (QUERY, ["bad \ud83d end"], None),
        ):
            with pytest.raises(RequestError) as caught:
                engine.score(query, documents)
            assert caught.value.field == field
        for options in ({"top_n": 0}, {"top_n": -1}, {"max_tokens_per_doc": 0}):
            with pytest.raises(RequestError, match=next(iter(options))):
                engine.rank(QUERY, ["a"], **options)
        with pytest.raises(RequestError, match="cannot classify"):
            engine.classify(["a"])
    embedder = Engine(models("bert"), device="cpu", tasks=("embed",))
    with embedder, pytest.raises(RequestError, match="cannot score; it can: embed"):
        embedder.score(QUERY, ["a"])


def test_raw_scores_and_equal_documents(models):
    with Engine(models("bert"), device="cpu", dtype="float32") as engine:
        raw = engine.score(QUERY, DOCUMENTS, raw_scores=True, truncate=True)
        shown = engine.score(QUERY, DOCUMENTS, truncate=True)
        np.testing.assert_allclose(shown, 1 / (1 + np.exp(-raw)), atol=1e-6)
        ranked = engine.rank(QUERY, ["kite"] * 5)
        assert [item.index for item in ranked] == list(range(5))
        best = engine.rank(QUERY, DOCUMENTS, raw_scores=True, truncate=True)
        assert [item.score for item in best] == sorted(raw.tolist(), reverse=True)


def test_a_score_that_is_no_number_names_its_document(models, tmp_path):
    path = tiny.copy(models("bert"), tmp_path / "model")
    row = AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("kite")

    def spoil(tensors):
        tensors["bert.embeddings.word_embeddings.weight"][row] = torch.nan
        return tensors

    tiny.edit_tensors(path, spoil)
    with Engine(path, device="cpu", dtype="float32") as engine:
        with pytest.raises(NonFiniteError) as caught:
            engine.score("sea", ["tea", "kite"])
        assert caught.value.field == "documents[1]"
        assert np.isfinite(engine.score("sea", ["tea"])).all()


def test_progress_and_determinism(models):
    calls = []
    with Engine(models("bert"), device="cpu", dtype="float32", deterministic=True) as engine:
        together = engine.score(
            QUERY, DOCUMENTS, truncate=True, progress=lambda *done: calls.append(done)
        )
        alone = [engine.score(QUERY, [document], truncate=True)[0] for document in DOCUMENTS]
    assert calls[-1] == (len(DOCUMENTS), len(DOCUMENTS))
    assert together.tolist() == alone


@pytest.mark.parametrize("count", [1, 3])
def test_segments_reach_the_model_eagerly_and_in_padded_buckets(tmp_path, count):
    """As device graphs would run it; made-up batches of a warm-up have segments too."""
    path = save(tmp_path, "bert", num_labels=count)
    tiny.edit_tensors(path, _widen_types)
    loaded, worker = load(path, dtype="float32"), DeviceWorker()
    model = ScoringModel(loaded.classifier)
    rng = np.random.default_rng(0)
    try:
        eager, graphs, blind = (
            EmbeddingRuntime(model, FixedSdpaBackend(), worker, segment_ids=segment_ids)
            for segment_ids in (True, True, False)
        )
        graphs.use_graphs(CallCapturer(), GraphPolicy(max_tokens=300, capture_share=1))
        graphs.warm_up([WarmupShape(2, 20)], 60)
        for texts in (1, 2, 3, 7) * 5:
            lengths = rng.integers(4, 38, texts).astype(np.int32)
            ids = rng.integers(3, 60, lengths.sum(), dtype=np.int32)
            segments = rng.integers(0, 2, lengths.sum(), dtype=np.int32)
            batch = EmbedBatch(ids, lengths, np.zeros(texts, np.int32), segments)
            expected = eager.step(batch).result(30)
            found = graphs.step(batch).result(30)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            assert not torch.allclose(blind.step(batch).result(30), expected, atol=1e-3)
            starts = np.concatenate(([0], np.cumsum(lengths)))
            token_types = torch.tensor([segments[: starts[1]].tolist()])
            reference = AutoModelForSequenceClassification.from_pretrained(path)
            logits = reference(
                torch.tensor([ids[: starts[1]].tolist()]), token_type_ids=token_types
            )
            torch.testing.assert_close(found[:1], logits.logits, rtol=1e-4, atol=1e-4)
        assert graphs.graphs.counters.failures == 0
        assert graphs.graphs.counters.hits >= 5
    finally:
        worker.close()


def test_a_head_keeps_its_float32_weights_beside_a_rounded_backbone(models, monkeypatch):
    monkeypatch.setattr("rose.models.quantizing.LEAST_COSINE", 0.97)  # random weights lose more
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    heads, layers, scores = [], [], []
    for quantization in ("int8", None):
        options = {"device": "cpu", "dtype": "float32", "quantization": quantization}
        with Engine(models("bert"), **options) as engine:
            loaded = engine._served.loaded
            heads.append(loaded.classifier.head.output.op(x))
            layers.append(loaded.backbone.layers[0].mlp.up.op(x))
            scores.append(engine.score(QUERY, DOCUMENTS, truncate=True))
    assert torch.equal(*heads)
    assert not torch.equal(*layers)
    np.testing.assert_allclose(*scores, atol=0.2)
