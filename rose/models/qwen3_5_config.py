"""config.json of Qwen3.5, dense and with a mixture of experts. Free of torch.

A checkpoint is either the language model alone, or that of a model that sees too: then the language
model's settings are in `text_config`. ROSE serves the language model of both.
"""

from dataclasses import replace

from rose.models.architecture import Architecture
from rose.models.config import ConfigReader
from rose.models.decoder_config import Experts
from rose.models.experts_config import read_experts
from rose.models.hybrid_config import hybrid_architecture, hybrid_family

BACKBONE = "rose.models.qwen3_5:Qwen35Model"


def _experts(reader: ConfigReader, layers: int) -> Experts:
    """Read the experts with the defaults of `transformers.Qwen3_5MoeTextConfig`."""
    return read_experts(
        reader,
        frozenset(range(layers)),
        count=256,
        per_token=8,
        intermediate_size=512,
        renormalize=True,
    )


def _composite(name: str, text: Architecture) -> Architecture:
    """Make the entry of a checkpoint whose vision part has no use here."""
    return replace(text, name=name, ignored=(*text.ignored, r"visual\..+"), text_key="text_config")


QWEN3_5_TEXT = hybrid_architecture(
    hybrid_family(
        "qwen3_5_text",
        vocab_size=248320,
        hidden_size=4096,
        intermediate_size=12288,
        kv_heads=4,
        num_layers=32,
    ),
    BACKBONE,
)
QWEN3_5_MOE_TEXT = hybrid_architecture(
    hybrid_family(
        "qwen3_5_moe_text",
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=512,  # of an MLP that no layer has
        kv_heads=2,
        num_layers=40,
    ),
    BACKBONE,
    _experts,
)
QWEN3_5 = _composite("qwen3_5", QWEN3_5_TEXT)
QWEN3_5_MOE = _composite("qwen3_5_moe", QWEN3_5_MOE_TEXT)
