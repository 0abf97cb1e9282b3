"""What generation_config.json asks for beyond the usual: taken over, or named in a warning."""

import json
import math
import re
from pathlib import Path

import pytest
from transformers import GenerationConfig

from rose.models.config import CheckpointFolder
from rose.models.errors import CheckpointError
from rose.models.generation import read_generation_card
from rose.models.plan import plan_checkpoint


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the small files of a language model and a weight file of no tensor."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    write(tmp_path / "config.json", config | {"tie_word_embeddings": True})
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("values", "bias"),
    [
        ({"suppress_tokens": [7, 1]}, {7: -100, 1: -100}),
        ({"bad_words_ids": [[7], [2], [3, 4]]}, {7: -100}),  # 2 ends: it is never banned
        ({"sequence_bias": [[[7], 1.5], [[3, 4], -2.0], [[5], -1e9]]}, {7: 1.5, 5: -100}),
        ({"sequence_bias": [[[7], -math.inf], [[5], -(10**400)]]}, {7: -100, 5: -100}),
        ({"suppress_tokens": None, "bad_words_ids": [], "sequence_bias": None}, {}),
    ],
)
def test_single_tokens_that_a_checkpoint_bans_are_a_bias(folder, values, bias):
    write(folder / "generation_config.json", {"eos_token_id": 2, "min_new_tokens": 3} | values)
    card = read_generation_card(CheckpointFolder(folder))
    assert (card.logit_bias, card.min_tokens) == (bias, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", 7),
        ("suppress_tokens", [-1]),
        ("bad_words_ids", [7]),
        ("bad_words_ids", [[True]]),
        ("sequence_bias", [[7, 1.5]]),
        ("sequence_bias", [[[7], float("nan")]]),
        ("sequence_bias", [[[7], math.inf]]),
        ("sequence_bias", [[[7], 1e39]]),  # more than float32 holds
        ("sequence_bias", [[[7], 10**400]]),
        ("sequence_bias", {"7": 1.5}),
        ("min_new_tokens", -1),
    ],
)
def test_malformed_bans_are_refused(folder, key, value):
    write(folder / "generation_config.json", {key: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key}: "):
        read_generation_card(CheckpointFolder(folder))


def test_one_warning_names_what_generation_leaves_out(folder):
    asked = {
        "no_repeat_ngram_size": 3,
        "begin_suppress_tokens": [5],
        "forced_bos_token_id": 0,
        "num_beams": 4,
        "penalty_alpha": 0.6,
        "typical_p": 0.9,
        "epsilon_cutoff": 1e-4,
        "renormalize_logits": True,
        "encoder_repetition_penalty": 1.2,
        "stop_strings": ["x"],
    }
    several = {"bad_words_ids": [[7], [3, 4]], "sequence_bias": [[[3, 4], 1.0]]}
    write(folder / "generation_config.json", asked | several | {"suppress_tokens": [1]})
    plan = plan_checkpoint(folder)
    (warning,) = [text for text in plan.warnings if "generation_config.json" in text]
    for name in (*asked, *several):
        assert re.search(rf"\b{name}\b", warning)
    assert "suppress_tokens" not in warning.replace("begin_suppress_tokens", "")


def test_neutral_generation_settings_are_silent(folder):
    neutral = GenerationConfig().to_dict() | {
        "no_repeat_ngram_size": 0,
        "begin_suppress_tokens": [],
        "num_beams": 1,
        "typical_p": 1.0,
        "encoder_repetition_penalty": 1.0,
        "renormalize_logits": False,
        "guidance_scale": 1.0,
        "bad_words_ids": [[7]],
        "top_h": None,
    }
    write(folder / "generation_config.json", neutral)
    assert not [text for text in plan_checkpoint(folder).warnings if "generation_config" in text]


def test_older_checkpoints_say_it_in_config_json(folder):
    values = {"repetition_penalty": 1.5, "top_p": 0.5, "do_sample": False, "num_beams": 4}
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | values)
    card = read_generation_card(CheckpointFolder(folder))
    assert (card.repetition_penalty, card.top_p, card.temperature) == (1.5, 0.5, None)
    warned = r"config\.json asks for what is not supported and left out: num_beams"
    assert any(re.match(warned, text) for text in plan_checkpoint(folder).warnings)
    write(folder / "generation_config.json", {"top_p": 0.9})
    card = read_generation_card(CheckpointFolder(folder))
    assert (card.repetition_penalty, card.top_p) == (None, 0.9)
