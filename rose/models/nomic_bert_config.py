"""NomicBERT's config.json, with the names of transformers or of the hub. Free of torch."""

from dataclasses import replace

from rose.models.architecture import Architecture
from rose.models.classifier_config import pooler_head
from rose.models.config import ConfigReader
from rose.models.encoder_config import IGNORED, EncoderConfig, read_encoder_config
from rose.models.errors import CheckpointError
from rose.models.rope import RopeFacts, read_ropes

# The hub's names, which follow GPT-2, -> those of transformers.
_HUB_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# Settings of the hub's code that ROSE has no use for: their default there, and what they must be.
_HUB_VALUES = {
    "activation_function": ("gelu_new", "swiglu"),
    "causal": (False, False),
    "mlp_fc1_bias": (True, False),
    "mlp_fc2_bias": (True, False),
    "num_experts": (0, 0),
    "parallel_block": (False, False),
    "prenorm": (False, False),
    "qkv_proj_bias": (True, False),
    "rotary_emb_fraction": (0.0, 1.0),
    "rotary_emb_interleaved": (False, False),
    "rotary_emb_scale_base": (None, None),
    "use_rms_norm": (False, False),
}


def read_nomic_config(reader: ConfigReader) -> EncoderConfig:
    """Read config.json with the defaults of `transformers.NomicBertConfig`.

    Raises:
        CheckpointError: a setting of the wrong type, or one that ROSE does not compute.
    """
    _translate(reader)
    config = read_encoder_config(reader, vocab_size=30528, max_positions=2048, activation="silu")
    head_dim = reader.size("head_dim", config.head_dim)
    facts = RopeFacts(head_dim, config.max_positions, theta=1000.0)
    return replace(
        config,
        head_dim=head_dim,
        rope=read_ropes(reader, ("all",), facts)["all"],
        attention_bias=False,
        up_bias=False,
        down_bias=False,
    )


def _translate(reader: ConfigReader) -> None:
    """Rename the hub's keys, and refuse what the hub's code could do besides."""
    if "n_embd" not in reader.values:
        return
    for key, (default, needed) in _HUB_VALUES.items():
        found = reader.values.get(key, default)
        if found != needed:
            raise CheckpointError(f"{reader.where(key)}: {found!r} is not supported, only {needed}")
    missing = [key for key in _HUB_KEYS if not reader.has(key)]
    if missing:
        raise CheckpointError(f"{reader.where(missing[0])} is missing")
    renamed = {new: reader.values[old] for old, new in _HUB_KEYS.items()}
    factor = reader.optional("rotary_scaling_factor", float)
    if factor is not None:
        renamed["rope_scaling"] = {"rope_type": "dynamic", "factor": factor}
        renamed["max_position_embeddings"] = reader.size("max_trained_positions", 2048)
    multiple = reader.size("pad_vocab_size_multiple", 1)
    renamed["vocab_size"] = -(-reader.size("vocab_size", 30528) // multiple) * multiple
    reader.override(renamed, reader.label)


NOMIC_BERT = Architecture(
    name="nomic_bert",
    read_config=read_nomic_config,
    backbone="rose.models.nomic_bert:NomicBertModel",
    ignored=IGNORED,
    fused=(("Wqkv", ("q_proj", "k_proj", "v_proj")),),
    classifier=pooler_head,
)
