"""What quantisation learns of a model before it rounds the weights, and which models it refuses."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose import Engine
from rose.kernels.cpu import load_library
from rose.kernels.quantization import quantize
from rose.models import quantizing
from rose.models.loader import load
from rose.models.sample_texts import TEXTS, encode_samples, input_power
from rose.serving import cli
from tests import tiny


@pytest.fixture(autouse=True)
def _kernels():
    if load_library() is None:
        pytest.skip("there are no CPU kernels here")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.save_decoder(tmp_path_factory.mktemp("models") / "llama", "llama")


def spoil(path):
    """Let no weight of a layer survive 8 bits: large ones beside them, which meet zeros."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "LayerNorm" in name:
            tensors[name][::16] = 0.0  # of what goes into the projections
        elif name.endswith("weight") and ("attention.self" in name or "intermediate" in name):
            tensors[name][:, ::16] = 1e4
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(("task", "head"), [("embed", None), ("classify", "classifier")])
def test_int8_is_refused_where_it_changes_vectors(tmp_path, task, head, capsys, monkeypatch):
    good = tiny.save_encoder(tmp_path / "good", "bert", head=head)
    bad = spoil(tiny.save_encoder(tmp_path / "bad", "bert", head=head))
    monkeypatch.setattr(quantizing, "LEAST_COSINE", 0.99)  # random weights lose more than others
    for path in (good, bad):
        with Engine(path, device="cpu", tasks=(task,)):
            pass
    with Engine(good, device="cpu", tasks=(task,), quantization="int8"):
        pass
    message = r"--quantization: int8 .* least cosine to float32 is 0\.\d+, and 0.99 is wanted"
    with pytest.raises(ValueError, match=message):
        Engine(bad, device="cpu", tasks=(task,), quantization="int8")
    with pytest.raises(SystemExit) as caught:
        cli.main(["convert", str(bad), str(tmp_path / "out"), "--quantization", "int8"])
    assert caught.value.code == 1
    assert "the least cosine" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_what_is_not_a_number_is_refused():
    before = torch.ones(2, 3)
    with pytest.raises(ValueError, match="cosine to float32 is nan"):
        quantizing._compare("int8", before, before * torch.nan, "otherwise")


def test_a_model_that_also_generates_may_do_that_alone(llama, monkeypatch):
    monkeypatch.setattr(quantizing, "LEAST_COSINE", 2.0)
    with pytest.raises(ValueError, match="without quantization, or with --task generate"):
        Engine(llama, device="cpu", tasks=("embed", "generate"), quantization="int8")
    with Engine(llama, device="cpu", tasks=("generate",), quantization="int8"):
        pass


def test_samples_are_what_the_model_takes(llama):
    loaded = load(llama, tasks=("generate",))
    found = encode_samples(loaded.tokenizer_json, loaded.card.vocab_size, 9)
    assert 0 < len(found) <= len(TEXTS)
    assert all(0 < len(ids) <= 9 for ids in found)
    assert all(0 <= i < loaded.card.vocab_size for ids in found for i in ids)
    assert max(i for ids in encode_samples(loaded.tokenizer_json, 5, 9) for i in ids) < 5


def test_the_power_of_inputs_is_that_of_all_tokens(llama):
    backbone = load(llama, tasks=("generate",)).backbone
    texts = [[1, 2, 3], [4, 5, 6, 7, 8]]  # all of them are enough
    together = input_power(backbone, texts)
    alone = [input_power(backbone, [text]) for text in texts]
    assert len(together) == 4 * len(backbone.layers)
    for module, power in together.items():
        mean = (3 * alone[0][module] + 5 * alone[1][module]) / 8
        torch.testing.assert_close(power, mean, rtol=1e-5, atol=1e-6)
    first = backbone.layers[0]
    hidden = first.attention_norm(backbone.embedding(torch.tensor([*texts[0], *texts[1]])))
    torch.testing.assert_close(together[first.attention.qkv], hidden.square().mean(0))


def test_weights_that_meet_large_inputs_are_rounded_with_more_care():
    torch.manual_seed(0)
    weight, power = torch.randn(100, 96), torch.ones(96)
    power[::9] = 100.0
    x = torch.randn(500, 96) * power.sqrt()
    lost = [
        (x @ (quantize(weight, "int4", known).dequantize() - weight).T).square().mean()
        for known in (power, None)
    ]
    assert lost[0] < 0.6 * lost[1]
    for useless in (torch.zeros(96), torch.full((96,), torch.nan)):
        found, plain = quantize(weight, "int4", useless), quantize(weight, "int4")
        assert torch.equal(found.codes, plain.codes)
