"""config.json of Qwen3-Next. Free of torch."""

from rose.models.config import ConfigReader
from rose.models.decoder_config import Experts
from rose.models.experts_config import read_experts, sparse_layers
from rose.models.hybrid_config import hybrid_architecture, hybrid_family


def _experts(reader: ConfigReader, layers: int) -> Experts | None:
    """Read the experts with the defaults of `transformers.Qwen3NextConfig`; 0 are none."""
    if reader.values.get("num_experts") == 0:
        return None
    return read_experts(
        reader,
        sparse_layers(reader, layers),
        count=512,
        per_token=10,
        intermediate_size=512,
        renormalize=reader.get("norm_topk_prob", True, bool),
    )


QWEN3_NEXT = hybrid_architecture(
    hybrid_family(
        "qwen3_next",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        kv_heads=2,
        num_layers=48,
    ),
    "rose.models.qwen3_next:Qwen3NextModel",
    _experts,
)
