"""Models served with weights of 8 and 4 bits: from the option to the answer and the card."""

import re

import numpy as np
import pytest

from rose import Engine, SamplingParams
from rose.kernels.cpu import load_library, replaced
from rose.serving import cli
from rose.serving.commands.flags import EngineFlags, as_options
from tests.tiny import save_bert, save_decoder

TEXTS = ["a cat sat on the mat", "dogs", "the rain in spain falls"]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    if load_library() is None:
        pytest.skip("there are no CPU kernels here")
    # Random weights on few channels lose more than those of real models.
    monkeypatch.setattr("rose.models.quantizing.LEAST_COSINE", 0.97)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_decoder(tmp_path_factory.mktemp("models") / "llama", "llama")


def open_engine(path, quantization=None, **options):
    return Engine(path, device="cpu", max_batch_tokens=256, quantization=quantization, **options)


def rose(*arguments):
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    return caught.value.code


def test_an_embedder_of_8_bits_is_near(bert):
    with open_engine(bert) as plain, open_engine(bert, "int8") as rounded:
        exact, found = (engine.embed(TEXTS, normalize=True) for engine in (plain, rounded))
        assert (plain.card.quantization, rounded.card.quantization) == (None, "int8")
        assert plain.card.fingerprint != rounded.card.fingerprint
    cosines = (exact * found).sum(1)
    assert not np.array_equal(exact, found)
    assert cosines.min() > 0.99


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_llm_does_not_depend_on_its_neighbours(llama, quantization):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [[1, 2, 3], [5] * 9, [8, 9]]
    with open_engine(llama, quantization, tasks=("generate",)) as engine:
        together = [out.token_ids for out in engine.generate(prompts, params)]
        alone = [engine.generate(prompt, params)[0].token_ids for prompt in prompts]
    assert together == alone
    assert all(len(ids) == 6 for ids in together)


def test_what_does_not_fit_says_why(bert, llama):
    with pytest.raises(ValueError, match=r"'int3' is unknown. Known: int8, int4"):
        open_engine(bert, "int3")
    with pytest.raises(
        ValueError, match=r"int4 is for models that generate, .* to embed: use int8"
    ):
        open_engine(bert, "int4")
    with pytest.raises(ValueError, match=r"computed on a CPU from float32, not on cpu from bfloat"):
        open_engine(llama, "int8", dtype="bfloat16")
    with replaced(None), pytest.raises(ValueError, match="needs the compiled CPU kernels"):
        open_engine(bert, "int8")


def test_inspect_shows_the_quantization(bert, capsys):
    assert rose("inspect", bert, "--quantization", "int8") == 0
    shown = capsys.readouterr().out
    assert re.search(r"quantization +int8 +option --quantization", shown)
    assert rose("inspect", bert, "--quantization", "int4") == 1
    assert "int4 is for models that generate" in capsys.readouterr().err


def test_the_option_reaches_the_engines():
    flags = EngineFlags(quantization="int8")
    assert "--quantization int8" in " ".join(as_options(flags))
    assert flags.model_options("folder", None).quantization == "int8"


def test_an_unknown_quantization_is_refused_by_the_command_line(bert, capsys):
    assert rose("serve", bert, "--quantization", "int3") == 2
    assert "int3" in capsys.readouterr().err
