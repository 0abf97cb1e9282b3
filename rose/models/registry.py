"""The architectures that ROSE can serve, by `model_type` of config.json. Free of torch."""

from collections.abc import Callable

from rose.kernels.registry import Registry
from rose.models.architecture import Architecture
from rose.models.config import CheckpointFolder, ConfigReader

ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture (model_type)",
    {
        "bert": "rose.models.bert_config:BERT",
        "bidirectional_pplx_qwen3": "rose.models.decoder_config:PPLX_QWEN3",
        "distilbert": "rose.models.distilbert_config:DISTILBERT",
        "gemma": "rose.models.gemma_config:GEMMA",
        "gemma2": "rose.models.gemma_config:GEMMA2",
        "gemma3_text": "rose.models.gemma_config:GEMMA3",
        "gte": "rose.models.gte_config:GTE",
        "jina_bert": "rose.models.jina_config:JINA_BERT",
        "jina_bert_code": "rose.models.jina_config:JINA_BERT_CODE",
        "llama": "rose.models.decoder_config:LLAMA",
        "mistral": "rose.models.decoder_config:MISTRAL",
        "modernbert": "rose.models.modernbert_config:MODERNBERT",
        "mpnet": "rose.models.mpnet_config:MPNET",
        "nomic_bert": "rose.models.nomic_bert_config:NOMIC_BERT",
        "olmo2": "rose.models.olmo2_config:OLMO2",
        "phi3": "rose.models.decoder_config:PHI3",
        "qwen2": "rose.models.decoder_config:QWEN2",
        "qwen3": "rose.models.decoder_config:QWEN3",
        "qwen3_5": "rose.models.qwen3_5_config:QWEN3_5",
        "qwen3_5_moe": "rose.models.qwen3_5_config:QWEN3_5_MOE",
        "qwen3_5_moe_text": "rose.models.qwen3_5_config:QWEN3_5_MOE_TEXT",
        "qwen3_5_text": "rose.models.qwen3_5_config:QWEN3_5_TEXT",
        "qwen3_moe": "rose.models.qwen3_moe_config:QWEN3_MOE",
        "qwen3_next": "rose.models.qwen3_next_config:QWEN3_NEXT",
        "roberta": "rose.models.roberta_config:ROBERTA",
        "xlm-roberta": "rose.models.roberta_config:XLM_ROBERTA",
    },
)

# Functions that tell which architecture a `model_type` stands for, where that is not enough.
VARIANTS: Registry[Callable[[ConfigReader, CheckpointFolder], str]] = Registry(
    "model_type with variants", {"bert": "rose.models.jina_config:tell_variant"}
)
# Why ROSE does not know a `model_type` that many would look for.
UNSUPPORTED = dict.fromkeys(
    ("deberta", "deberta-v2"),
    "its attention scores queries and keys against positions too (disentangled attention), "
    "which ROSE does not compute",
)
