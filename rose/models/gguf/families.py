"""The architectures of GGUF files that can be converted: their names, tensors and settings.

Shape letters of the tables: V vocabulary, H hidden, F feed-forward, G twice that, Q query heads x
head dim, K key-value heads x head dim, A queries, keys and values together, D head dim, E experts,
X feed-forward of an expert, P positions, T token types.
"""

from dataclasses import dataclass, field

Table = dict[str, tuple[str, str]]  # name in the GGUF -> (name in the checkpoint, shape letters)

_TOP: Table = {
    "token_embd.weight": ("model.embed_tokens.weight", "VH"),
    "output_norm.weight": ("model.norm.weight", "H"),
}
_HEAD: Table = {"output.weight": ("lm_head.weight", "VH")}

_PROJECTIONS: Table = {
    "attn_q.weight": ("self_attn.q_proj.weight", "QH"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KH"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KH"),
    "attn_output.weight": ("self_attn.o_proj.weight", "HQ"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "FH"),
    "ffn_up.weight": ("mlp.up_proj.weight", "FH"),
    "ffn_down.weight": ("mlp.down_proj.weight", "HF"),
}
_NORMS: Table = {
    "attn_norm.weight": ("input_layernorm.weight", "H"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "H"),
}
_SANDWICH_NORMS: Table = {
    "attn_norm.weight": ("input_layernorm.weight", "H"),
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "H"),
    "ffn_norm.weight": ("pre_feedforward_layernorm.weight", "H"),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "H"),
}
_QK_NORMS: Table = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "D"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "D"),
}
_QKV_BIAS: Table = {
    "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "K"),
    "attn_v.bias": ("self_attn.v_proj.bias", "K"),
}
_ATTENTION_BIAS: Table = _QKV_BIAS | {"attn_output.bias": ("self_attn.o_proj.bias", "H")}
_MLP_BIAS: Table = {
    "ffn_gate.bias": ("mlp.gate_proj.bias", "F"),
    "ffn_up.bias": ("mlp.up_proj.bias", "F"),
    "ffn_down.bias": ("mlp.down_proj.bias", "H"),
}
_ATTENTION: Table = {k: v for k, v in _PROJECTIONS.items() if k.startswith("attn")}
_POST_NORMS: Table = {
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "H"),
    "post_ffw_norm.weight": ("post_feedforward_layernorm.weight", "H"),
}
_WIDE_QK_NORMS: Table = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "Q"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "K"),
}
_FUSED: Table = {
    "attn_qkv.weight": ("self_attn.qkv_proj.weight", "AH"),
    "attn_output.weight": ("self_attn.o_proj.weight", "HQ"),
    "ffn_up.weight": ("mlp.gate_up_proj.weight", "GH"),
    "ffn_down.weight": ("mlp.down_proj.weight", "HF"),
}
# A tensor of all experts becomes one for each.
_EXPERTS: Table = {
    "ffn_gate_inp.weight": ("mlp.gate.weight", "EH"),
    "ffn_gate_exps.weight": ("mlp.experts.{expert}.gate_proj.weight", "EXH"),
    "ffn_up_exps.weight": ("mlp.experts.{expert}.up_proj.weight", "EXH"),
    "ffn_down_exps.weight": ("mlp.experts.{expert}.down_proj.weight", "EHX"),
}


def _with_bias(table: Table) -> Table:
    """Add the bias of each weight: as long as the weight's first dimension."""
    biases = {
        source.replace(".weight", ".bias"): (target.replace(".weight", ".bias"), letters[0])
        for source, (target, letters) in table.items()
    }
    return table | biases


_BERT_TOP: Table = {
    "token_embd.weight": ("embeddings.word_embeddings.weight", "VH"),
    "token_types.weight": ("embeddings.token_type_embeddings.weight", "TH"),
    "position_embd.weight": ("embeddings.position_embeddings.weight", "PH"),
    **_with_bias({"token_embd_norm.weight": ("embeddings.LayerNorm.weight", "H")}),
}
_BERT: Table = _with_bias(
    {
        "attn_q.weight": ("attention.self.query.weight", "QH"),
        "attn_k.weight": ("attention.self.key.weight", "KH"),
        "attn_v.weight": ("attention.self.value.weight", "KH"),
        "attn_output.weight": ("attention.output.dense.weight", "HQ"),
        "attn_output_norm.weight": ("attention.output.LayerNorm.weight", "H"),
        "ffn_up.weight": ("intermediate.dense.weight", "FH"),
        "ffn_down.weight": ("output.dense.weight", "HF"),
        "layer_output_norm.weight": ("output.LayerNorm.weight", "H"),
    }
)
_NOMIC_TOP: Table = {
    "token_embd.weight": ("embeddings.word_embeddings.weight", "VH"),
    "token_types.weight": ("embeddings.token_type_embeddings.weight", "TH"),
    **_with_bias({"token_embd_norm.weight": ("emb_ln.weight", "H")}),
}
_NOMIC: Table = {
    "attn_qkv.weight": ("attn.Wqkv.weight", "AH"),
    "attn_output.weight": ("attn.out_proj.weight", "HQ"),
    "ffn_up.weight": ("mlp.fc11.weight", "FH"),
    "ffn_gate.weight": ("mlp.fc12.weight", "FH"),
    "ffn_down.weight": ("mlp.fc2.weight", "HF"),
    **_with_bias(
        {
            "attn_output_norm.weight": ("norm1.weight", "H"),
            "layer_output_norm.weight": ("norm2.weight", "H"),
        }
    ),
}
_MODERN_TOP: Table = {
    "token_embd.weight": ("embeddings.tok_embeddings.weight", "VH"),
    "token_embd_norm.weight": ("embeddings.norm.weight", "H"),
    "output_norm.weight": ("final_norm.weight", "H"),
}
_MODERN: Table = {
    "attn_norm.weight": ("attn_norm.weight", "H"),
    "attn_qkv.weight": ("attn.Wqkv.weight", "AH"),
    "attn_output.weight": ("attn.Wo.weight", "HQ"),
    "ffn_norm.weight": ("mlp_norm.weight", "H"),
    "ffn_up.weight": ("mlp.Wi.weight", "GH"),
    "ffn_down.weight": ("mlp.Wo.weight", "HF"),
}

# About heads, whose tensors are refused: without effect.
_CLASSES = frozenset({"classifier.pooling_type", "classifier.output_labels"})
_WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        model_class: of transformers; `model_type` is its config's.
        layer: tensors of every layer; `not_in_first` are those that the first one lacks.
        top: tensors outside of the layers.
        layers: name of a layer in the checkpoint, up to its number.
        biases: flags of the config that bring tensors of their own, all or none.
        settings: metadata that it has besides the common ones.
        is_encoder: sees the whole text, and has no head.
        norms_above_one: the checkpoint's norm weights are those of the GGUF less 1.
        turned: rows of q and k are in llama.cpp's order, see `rotate_halves`.
    """

    model_class: str
    model_type: str
    layer: Table
    not_in_first: frozenset[str] = frozenset()
    top: Table = field(default_factory=lambda: _TOP)
    layers: str = "model.layers"
    biases: dict[str, Table] = field(default_factory=dict)
    settings: frozenset[str] = frozenset()
    is_encoder: bool = False
    norms_above_one: bool = False
    turned: bool = False

    @property
    def head(self) -> Table:
        """The tensor of the language model's head, where it is not the embedding."""
        return {} if self.is_encoder else _HEAD


FAMILIES = {
    "llama": Family(
        model_class="LlamaForCausalLM",
        model_type="llama",
        layer=_PROJECTIONS | _NORMS,
        biases={"attention_bias": _ATTENTION_BIAS, "mlp_bias": _MLP_BIAS},
        turned=True,
    ),
    "qwen2": Family(
        model_class="Qwen2ForCausalLM",
        model_type="qwen2",
        layer=_PROJECTIONS | _NORMS | _QKV_BIAS,
    ),
    "qwen3": Family(
        model_class="Qwen3ForCausalLM",
        model_type="qwen3",
        layer=_PROJECTIONS | _NORMS | _QK_NORMS,
        biases={"attention_bias": _ATTENTION_BIAS},
    ),
    "qwen3moe": Family(
        model_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer=_ATTENTION | _NORMS | _QK_NORMS | _EXPERTS,
        biases={"attention_bias": _ATTENTION_BIAS},
        settings=frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
    ),
    "gemma": Family(
        model_class="GemmaForCausalLM",
        model_type="gemma",
        layer=_PROJECTIONS | _NORMS,
        norms_above_one=True,
    ),
    "gemma2": Family(
        model_class="Gemma2ForCausalLM",
        model_type="gemma2",
        layer=_PROJECTIONS | _SANDWICH_NORMS,
        settings=_WINDOW | {"attn_logit_softcapping", "final_logit_softcapping"},
        norms_above_one=True,
    ),
    "gemma3": Family(
        model_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer=_PROJECTIONS | _SANDWICH_NORMS | _QK_NORMS,
        biases={"attention_bias": _ATTENTION_BIAS},
        settings=_WINDOW | {"rope.freq_base_swa", "final_logit_softcapping"},
        norms_above_one=True,
    ),
    "phi3": Family(
        model_class="Phi3ForCausalLM",
        model_type="phi3",
        layer=_FUSED | _NORMS,
        settings=frozenset({"attention.sliding_window", "rope.scaling.attn_factor"}),
    ),
    "olmo2": Family(
        model_class="Olmo2ForCausalLM",
        model_type="olmo2",
        layer=_PROJECTIONS | _POST_NORMS | _WIDE_QK_NORMS,
    ),
    "bert": Family(
        model_class="BertModel",
        model_type="bert",
        layer=_BERT,
        top=_BERT_TOP,
        layers="encoder.layer",
        settings=_CLASSES,
        is_encoder=True,
    ),
    "nomic-bert": Family(
        model_class="NomicBertModel",
        model_type="nomic_bert",
        layer=_NOMIC,
        top=_NOMIC_TOP,
        layers="encoder.layers",
        is_encoder=True,
    ),
    "modern-bert": Family(
        model_class="ModernBertModel",
        model_type="modernbert",
        layer=_MODERN,
        not_in_first=frozenset({"attn_norm.weight"}),
        top=_MODERN_TOP,
        layers="layers",
        settings=_WINDOW | _CLASSES | {"rope.freq_base_swa", "hidden_activation"},
        is_encoder=True,
    ),
}
