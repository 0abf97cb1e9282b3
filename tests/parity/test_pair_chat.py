"""Pairs of a classifier whose chat template speaks of queries and documents, without modules.json."""

import numpy as np
import pytest
from sentence_transformers import CrossEncoder

from rose import Engine
from tests import tiny

LOOP = "{% for m in messages %}{% if m.role == 'query' %}a CONTENT{% elif m.role == 'document' %}"
TEMPLATE = LOOP + " tea CONTENT words{% endif %}{% endfor %}"
DOCUMENTS = ["sea", "green tea", "short"]


@pytest.mark.parametrize("content", ["{{ m.content }}", "{{ m.content[0].text }}"])
def test_scores_are_those_of_sentence_transformers(tmp_path, content):
    folder = tiny.save_encoder(tmp_path / "m", "bert", head="classifier", num_labels=1)
    pairs = [("red kite", document) for document in DOCUMENTS]
    plain = CrossEncoder(str(folder), device="cpu").predict(pairs)
    template = TEMPLATE.replace("CONTENT", content)
    tiny.edit_json(folder / "tokenizer_config.json", chat_template=template)
    expected = CrossEncoder(str(folder), device="cpu").predict(pairs)
    assert np.abs(expected - plain).max() > 1e-3
    with Engine(folder, device="cpu", dtype="float32", max_batch_tokens=256) as engine:
        np.testing.assert_allclose(engine.score("red kite", DOCUMENTS), expected, atol=1e-5)
