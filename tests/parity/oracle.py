"""transformers as the oracle of an architecture's hidden states."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from rose.models.loader import LoadedModel, load
from tests.batches import ragged

LENGTHS = (1, 7, 2, 33, 16)


def sequences(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def reference_states(
    path: Path,
    batch: list[list[int]],
    token_type_ids: list[list[int]] | None = None,
    **changes: object,
) -> list[Tensor]:
    """transformers' last hidden states, one text at a time, with changes to the config."""
    config = AutoConfig.from_pretrained(path)
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModel.from_pretrained(
        path, config=config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    types = token_type_ids or [None] * len(batch)
    return [
        model(
            torch.tensor([ids]),
            **({} if kinds is None else {"token_type_ids": torch.tensor([kinds])}),
        ).last_hidden_state[0]
        for ids, kinds in zip(batch, types, strict=True)
    ]


def assert_states(
    model: LoadedModel, batch: list[list[int]], expected: list[Tensor], atol: float = 5e-5
) -> None:
    """Packed and one by one, ROSE's hidden states are the expected ones."""
    packed, cu = ragged(batch)
    states = model.backbone(packed).split(cu.diff().tolist())
    for ids, together, wanted in zip(batch, states, expected, strict=True):
        torch.testing.assert_close(together, wanted, atol=atol, rtol=1e-5)
        alone = model.backbone(ragged([ids])[0])
        torch.testing.assert_close(alone, together, atol=atol, rtol=1e-5)


def check(path: Path, lengths: Sequence[int] = LENGTHS, **load_options: object) -> LoadedModel:
    """Load a checkpoint and hold its hidden states to transformers'."""
    model = load(path, **load_options)
    batch = sequences(model.card.vocab_size, lengths)
    assert_states(model, batch, reference_states(path, batch))
    return model
