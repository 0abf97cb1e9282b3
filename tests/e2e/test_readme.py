"""The Python of the README runs as it stands with what `make serve` fetches."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.golden

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture
def run(minilm, smollm, monkeypatch):
    """Run a snippet where a reader would, and return the names that it leaves."""

    def run(snippet):
        monkeypatch.chdir(ROOT)
        names = {}
        exec(compile(snippet, "README.md", "exec"), names)
        return names

    return run


def test_these_are_all():
    assert len(SNIPPETS) == 2


def test_with_a_server(run, server, minilm, smollm):
    (snippet,) = (text for text in SNIPPETS if "OpenAI" in text)
    with run(snippet.replace("http://127.0.0.1:8000", server.url))["client"] as client:
        assert {model.id for model in client.models.list()} == {minilm.name, smollm.name}


def test_without_a_server(run):
    (snippet,) = (text for text in SNIPPETS if "with Engine" in text)
    names = run(snippet)
    assert (names["vectors"].dtype, names["vectors"].shape) == ("float32", (2, 128))
    assert "Paris" in names["outputs"][0].text
    assert names["best"][0].index == 0
