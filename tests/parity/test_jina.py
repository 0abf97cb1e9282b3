"""JinaBERT as it is published: with BERT's model_type, told by its classes and its tensors."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rose import Engine
from rose.kernels.cpu import load_library
from rose.models.convert_quantized import convert_quantized
from rose.models.errors import CheckpointError
from rose.models.jina_config import alibi_slopes
from rose.models.loader import load
from rose.models.plan import plan_checkpoint
from rose.runtime.embedding import EmbedBatch, EmbeddingRuntime
from rose.runtime.graphs import GraphPolicy
from rose.runtime.worker import DeviceWorker
from tests import jina_bert, tiny
from tests.batches import ragged
from tests.graph_rig import CallCapturer, FixedSdpaBackend
from tests.parity.oracle import assert_states, reference_states, sequences

SHARED, CODE = "jinaai/jina-bert-implementation", "jinaai/jina-bert-v2-qk-post-norm"
SIX = {"hidden_size": 48, "num_attention_heads": 6}
CLASSES = {
    "AutoConfig": "configuration_bert.JinaBertConfig",
    "AutoModel": "modeling_bert.JinaBertModel",
    "AutoModelForSequenceClassification": "modeling_bert.JinaBertForSequenceClassification",
}
TEXTS = ["kite", "red kite over the sea", "green tea"]


def auto_map(repository: str | None) -> dict[str, str]:
    return {key: f"{repository}--{name}" if repository else name for key, name in CLASSES.items()}


def publish(path: Path, kind: str = "jina_bert", *, repository=SHARED, **options) -> Path:
    """A checkpoint with the config.json of the published ones, which say that they are BERT."""
    repository = CODE if kind == "jina_bert_code" and repository == SHARED else repository
    tiny.save_encoder(path, kind, **{**SIX, **options})
    head = options.get("head")
    name = {None: "Model", "masked_lm": "ForMaskedLM", "classifier": "ForSequenceClassification"}
    tiny.edit_json(
        path / "config.json",
        model_type="bert",
        architectures=[f"JinaBert{name[head]}"],
        auto_map=auto_map(repository),
        emb_pooler="mean",
    )
    return path


def oracle(path: Path, kind: str):
    """The hidden states of plain torch."""
    copy = tiny.copy(path, path.with_name(path.name + "-oracle"))
    tiny.edit_json(copy / "config.json", model_type=kind, auto_map=...)
    batch = sequences(60)
    return batch, reference_states(copy, batch)


@pytest.mark.parametrize("kind", ["jina_bert", "jina_bert_code"])
@pytest.mark.parametrize("head", [None, "masked_lm"])
def test_published_checkpoints(tmp_path, kind, head):
    path = publish(tmp_path / "model", kind, head=head)
    model = load(path, tasks=("embed",))
    assert model.card.architecture == kind
    assert_states(model, *oracle(path, kind))
    sources = {setting.name: setting.source for setting in model.settings}
    assert sources["architecture"] == "config.json: model_type, architectures and the weights"


@pytest.mark.parametrize("kind", ["jina_bert", "jina_bert_code"])
@pytest.mark.parametrize("told_by", ["architectures", "auto_map", "weights"])
def test_one_of_three_is_enough(tmp_path, kind, told_by):
    path = publish(tmp_path / "model", kind)
    if told_by != "architectures":
        tiny.edit_json(path / "config.json", architectures=["BertModel"])
    if told_by != "auto_map":
        tiny.edit_json(path / "config.json", auto_map=...)
    assert load(path).card.architecture == kind


@pytest.mark.parametrize("kind", ["jina_bert", "jina_bert_code"])
def test_weights_that_tell_no_names_before_they_are_loaded(tmp_path, kind):
    path = publish(tmp_path / "model", kind)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    model = load(path)
    assert model.card.architecture == kind
    assert_states(model, *oracle(path, kind))
    tiny.edit_json(path / "config.json", auto_map=..., architectures=["BertModel"])
    with pytest.raises(CheckpointError, match="neither architectures nor auto_map name it"):
        load(path)


@pytest.mark.parametrize("auto", [None, "x", 3, {"AutoModel": None}, {"AutoModel": [None, 3]}])
@pytest.mark.parametrize("names", [None, "JinaBertModel", 3, [3], ["BertModel"]])
def test_malformed_names_leave_it_to_the_weights(tmp_path, names, auto):
    path = publish(tmp_path)
    tiny.edit_json(path / "config.json", architectures=names, auto_map=auto)
    assert plan_checkpoint(path).architecture.name == "jina_bert"


def test_a_bert_with_such_positions_is_refused(tmp_path):
    path = tiny.save_bert(tmp_path)
    tiny.edit_json(path / "config.json", position_embedding_type="alibi")
    with pytest.raises(CheckpointError, match=r"'alibi' is supported for JinaBert alone.*none"):
        load(path)
    # With Jina's names, but BERT's tensors.
    tiny.edit_json(path / "config.json", auto_map=auto_map(SHARED), feed_forward_type="geglu")
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight' is missing"):
        load(path)
    tiny.edit_json(path / "config.json", feed_forward_type="original")
    with pytest.raises(CheckpointError, match=r"no use for: 'embeddings\.position_embeddings"):
        load(path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"position_embedding_type": "absolute"}, r"position_embedding_type: 'absolute' is not"),
        ({"position_embedding_type": ...}, r"position_embedding_type: 'absolute' is not"),
        ({"feed_forward_type": "swiglu"}, r"feed_forward_type: 'swiglu' .* geglu, reglu, original"),
        ({"feed_forward_type": ...}, r"intermediate\.dense\.weight' is missing"),
        ({"is_decoder": True}, "is_decoder"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(tmp_path, settings, named):
    path = publish(tmp_path)
    tiny.edit_json(path / "config.json", **settings)
    with pytest.raises(CheckpointError, match=named):
        load(path)


@pytest.mark.parametrize("model_type", ["deberta", "deberta-v2"])
def test_rerankers_of_deberta_are_refused_with_the_reason(tmp_path, model_type):
    path = tiny.save_bert(tmp_path)
    tiny.edit_json(
        path / "config.json",
        model_type=model_type,
        architectures=["DebertaV2ForSequenceClassification"],
    )
    with pytest.raises(
        CheckpointError, match=rf"'{model_type}' is not .* \(disentangled attention"
    ):
        load(path)


def test_mean_pooling_of_modules_json(tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as st

    tiny.save_encoder(tmp_path / "plain", "jina_bert", **SIX)
    whole = st.Transformer(str(tmp_path / "plain"))
    pooling = st.Pooling(whole.get_embedding_dimension(), "mean")
    reference = SentenceTransformer(modules=[whole, pooling], device="cpu")
    reference.save_pretrained(str(tmp_path / "model"))
    tiny.edit_json(tmp_path / "model" / "config.json", model_type="bert", auto_map=auto_map(SHARED))
    with Engine(tmp_path / "model", device="cpu", dtype="float32") as engine:
        assert engine.card.architecture == "jina_bert"
        assert engine.card.embedding.pooling == "mean"
        found = engine.embed(TEXTS)
    np.testing.assert_allclose(found, reference.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize("stated", [{}, {"architectures": ["JinaBertForMaskedLM"]}])
def test_rerankers_that_leave_the_labels_to_their_users(tmp_path, stated):
    """Their classifier has one row; without `num_labels` transformers would take two."""
    path = publish(tmp_path / "model", head="classifier", num_labels=1)
    tiny.edit_json(path / "config.json", id2label=..., label2id=..., num_labels=..., **stated)
    model = load(path)
    assert model.card.tasks == ("score",)
    assert model.card.scoring.labels == ("LABEL_0",)
    batch, states = oracle(path, "jina_bert")
    weights = load_file(path / "model.safetensors")
    first = torch.stack([state[0] for state in states])
    pooled = first @ weights["bert.pooler.dense.weight"].T + weights["bert.pooler.dense.bias"]
    wanted = pooled.tanh() @ weights["classifier.weight"].T + weights["classifier.bias"]
    scores = model.classifier(*ragged(batch))
    torch.testing.assert_close(scores, wanted, atol=2e-5, rtol=1e-4)
    tiny.edit_json(path / "config.json", num_labels=3)
    with pytest.raises(CheckpointError, match=r"'classifier\.weight'.*\[1, 48\].*\[3, 48\]"):
        load(path)


@pytest.mark.parametrize("heads", range(1, 41))
def test_slopes_are_those_of_the_paper(heads):
    assert alibi_slopes(heads) == pytest.approx(jina_bert.slopes(heads))


@pytest.mark.parametrize("kind", ["jina_bert", "jina_bert_code"])
def test_converted_checkpoints_are_told_too(tmp_path, kind, monkeypatch):
    if load_library() is None:
        pytest.skip("there are no CPU kernels here")
    monkeypatch.setattr("rose.models.quantizing.LEAST_COSINE", 0.97)
    path = publish(tmp_path / "model", kind)
    convert_quantized(path, tmp_path / "rounded", "int8")
    with Engine(path, device="cpu", quantization="int8") as engine:
        expected = engine.embed(TEXTS)
    with Engine(tmp_path / "rounded", device="cpu") as engine:
        assert engine.card.architecture == kind
        np.testing.assert_allclose(engine.embed(TEXTS), expected, atol=1e-6)


def test_graphs_of_padded_batches(tmp_path):
    """The bias is made anew for every batch, whatever it was captured with."""
    model = load(publish(tmp_path)).embedding
    with closing(DeviceWorker()) as worker:
        eager = EmbeddingRuntime(model, FixedSdpaBackend(), worker)
        graphs = EmbeddingRuntime(model, FixedSdpaBackend(), worker)
        graphs.use_graphs(CallCapturer(), GraphPolicy(max_tokens=300, capture_share=1))
        rng = np.random.default_rng(0)
        for count in (1, 3) * 4:
            lengths = rng.integers(4, 38, count).astype(np.int32)
            ids = rng.integers(3, 60, lengths.sum(), dtype=np.int32)
            batch = EmbedBatch(ids, lengths, np.zeros(count, np.int32))
            expected = eager.step(batch).result(30)
            torch.testing.assert_close(graphs.step(batch).result(30), expected)
    assert graphs.graphs.counters.failures == 0
    assert graphs.graphs.counters.hits >= 2
