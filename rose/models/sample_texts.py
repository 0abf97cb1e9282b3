"""A few built-in texts, and what a model makes of them before anybody asks.

Quantisation wants to know a model's inputs: which channels are large (`input_power`), and whether
its vectors are the same afterwards (`rose.models.quantizing`).

Shape letters: T tokens, B texts, I input channels, C channels.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rose.kernels.attention.base import RaggedLayout
from rose.kernels.attention.choice import choose
from rose.kernels.recurrence import RecurrentBatch
from rose.models.backbone import Backbone, state_specs
from rose.models.batch import TokenBatch
from rose.models.layers import Projection

TEXTS = (
    "Opening hours on public holidays",
    "How do I reset my password?",
    "The harbour was quiet that morning. Two boats lay at the pier, and an old man mended his nets "
    "while gulls waited for what he might throw away.",
    "In 1869 the chemist arranged the 63 known elements by their weights and left gaps for those "
    "that nobody had found; within fifteen years three of them were discovered.",
    "def mean(values: list[float]) -> float:\n    if not values:\n        return 0.0\n"
    "    return sum(values) / len(values)\n",
    '{"name": "kettle", "price": 24.90, "tags": ["kitchen", "steel"], "in_stock": true}',
    "Die Sitzung wurde auf Donnerstag verschoben, weil der Zug aus Prag Verspätung hatte.",
    "La recette demande trois œufs, un verre de lait et beaucoup de patience.",
    "El museo abre a las diez y cierra los lunes; la entrada es gratuita para los estudiantes.",
    "Завтра обещают дождь, поэтому экскурсию по старому городу перенесли.",
    "今天的会议改到下午三点。请大家提前准备好资料。",
    "Dear colleagues, the second quarter closed 4.2 % above plan, mainly because transport cost "
    "less. We expect the trend to weaken after the summer, when contracts with two carriers end. "
    "Please send me your estimates by Friday, together with the risks that you see, and mark what "
    "depends on the exchange rate.",
    "What is the difference between a virus and a bacterium, and why do antibiotics help against "
    "only one of them? Explain it in simple words to a child of ten years, with an example.",
)
_ENOUGH = 16  # tokens, to know what an expert is given


def encode_samples(tokenizer_json: bytes, vocab_size: int, max_len: int) -> list[list[int]]:
    """Return the token ids of the built-in texts; those that a model has no row for are left out.

    Args:
        tokenizer_json: of the model, without truncation and padding.
        vocab_size: rows of the token embedding.
        max_len: tokens of a text at most.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    found = [tokenizer.encode(text).ids for text in TEXTS]
    known = [[i for i in ids if i < vocab_size][:max_len] for ids in found]
    return [ids for ids in known if ids]


def pack(backbone: Backbone, texts: Sequence[Sequence[int]]) -> tuple[TokenBatch, Tensor]:
    """Pack texts for a forward pass in float32 on a CPU.

    Returns:
        the batch, and where each text starts, and T: int32 [B + 1].
    """
    device, lengths = torch.device("cpu"), tuple(map(len, texts))
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    backend = choose("auto", backbone.attention_specs, torch.float32, device)
    batch = TokenBatch(
        input_ids=torch.tensor([i for ids in texts for i in ids]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        attention=backend.plan_ragged(RaggedLayout(cu_seqlens, lengths)),
        recurrence=RecurrentBatch(lengths, device) if state_specs(backbone) else None,
    )
    return batch, cu_seqlens


@torch.inference_mode()
def input_power(backbone: Backbone, texts: Sequence[Sequence[int]]) -> dict[nn.Module, Tensor]:
    """Return the mean squares of what each projection of a backbone is given: float32 [I].

    Experts that too few tokens come to are left out.

    Args:
        backbone: in float32 on a CPU, not yet prepared.
        texts: token ids.
    """
    assert isinstance(backbone, nn.Module)
    found: dict[nn.Module, tuple[int, Tensor]] = {}
    hooks = [
        module.register_forward_pre_hook(_noting(found))
        for module in backbone.modules()
        if isinstance(module, Projection)
    ]
    batch, _ = pack(backbone, texts)
    try:
        backbone(batch)
    finally:
        for hook in hooks:
            hook.remove()
    enough = min(_ENOUGH, len(batch.input_ids))
    return {module: power_I for module, (count, power_I) in found.items() if count >= enough}


def _noting(
    found: dict[nn.Module, tuple[int, Tensor]],
) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x_NI = inputs[0].flatten(0, -2)
        found[module] = (len(x_NI), x_NI.square().mean(0))  # a pass calls each of them once

    return note
