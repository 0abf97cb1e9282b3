"""The example that makes an embedder of an LLM, from end to end on a tiny Llama."""

import json
import random
import re

import pytest

from tests import tiny
from tools.examples import finetune_embedder


def run(monkeypatch, *arguments):
    """Run the script as from the command line, in this process."""
    monkeypatch.setattr("sys.argv", ["finetune_embedder.py", *map(str, arguments)])
    return finetune_embedder.main()


def write_sts(folder):
    """Sentences of the letters that the tiny tokenizer knows."""
    rng = random.Random(0)

    def sentence():
        return " ".join(rng.choice(tiny.WORDS) for _ in range(4))

    (folder / "stsb").mkdir(parents=True)
    for name in ("dev", "test"):
        rows = [f"{sentence()},{sentence()},{i % 6}.0" for i in range(24)]
        (folder / "stsb" / f"stsb-en-{name}.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("pooling", "data"), [("mean", False), ("lasttoken", True)])
def test_a_fine_tuned_llm_is_served_as_it_was_trained(tmp_path, monkeypatch, capfd, pooling, data):
    llm = tiny.save_decoder(tmp_path / "llm", "llama")
    out = tmp_path / "embedder"
    more = ("--data", write_sts(tmp_path / "data")) if data else ()
    options = ("--steps", 2, "--batch-size", 4, "--learning-rate", "1e-2", "--pooling", pooling)
    code = run(monkeypatch, "--model", llm, "--out", out, *options, *more)
    printed = capfd.readouterr().out
    assert code == 0, printed
    kinds = [
        entry["type"].rpartition(".")[2] for entry in json.loads((out / "modules.json").read_text())
    ]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    shares = re.findall(r"partner found ([\d.]+)%", printed)
    assert len(shares) == 3  # before, after, served
    assert shares[1] == shares[2]
    assert len(re.findall(r"STS-B Spearman -?\d\.\d{4}", printed)) == 3 * data
    assert "causal" in printed  # what `rose inspect` says
    assert re.search(r"least cosine to sentence-transformers over \d+ texts: 1 - \de-\d\d", printed)


def test_it_says_what_is_missing(tmp_path, monkeypatch, capfd):
    llm = tiny.save_decoder(tmp_path / "llm", "llama")
    for arguments, word in (
        (("--model", tmp_path), "--model"),
        (("--model", llm, "--data", tmp_path), "stsb-en-dev.csv"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, *arguments)
        assert word in capfd.readouterr().err
