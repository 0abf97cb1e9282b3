"""Tiny random checkpoints, written by the reference libraries, for tests of any part."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GteConfig,
    GteModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from tests import jina_bert

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (
    "kite",
    "over",
    "sea",
    "red",
    "the",
    "a",
    "green",
    "tea",
    "short",
    "text",
    "longer",
    "words",
)
jina_bert.register()  # transformers knows the others
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
Classes = tuple[type[PretrainedConfig], type[PreTrainedModel]]
# What an encoder needs to be tested: transformers' classes by model_type. The rest is free.
ENCODERS: dict[str, Classes] = {
    "bert": (BertConfig, BertModel),
    "distilbert": (DistilBertConfig, DistilBertModel),
    "gte": (GteConfig, GteModel),
    "jina_bert": (jina_bert.JinaBertConfig, jina_bert.JinaBertModel),
    "jina_bert_code": (jina_bert.JinaBertCodeConfig, jina_bert.JinaBertCodeModel),
    "modernbert": (ModernBertConfig, ModernBertModel),
    "mpnet": (MPNetConfig, MPNetModel),
    "nomic_bert": (NomicBertConfig, NomicBertModel),
    "roberta": (RobertaConfig, RobertaModel),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel),
}
DECODERS: dict[str, Classes] = {
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
# Decoders with layers of linear attention, alone and within a model that sees too.
HYBRIDS: dict[str, Classes] = {
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}
COMPOSITES: dict[str, Classes] = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
# What a tiny model of a kind needs beside the common sizes.
DECODER_SETTINGS: dict[str, dict[str, object]] = {
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral": {"sliding_window": 6},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
    },
}
HYBRID_SETTINGS: dict[str, object] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SPARSE_SETTINGS: dict[str, object] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}
VISION_SETTINGS: dict[str, object] = {
    "depth": 4,  # more than the language model has
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
    "patch_size": 2,
}


def bert_vocabulary() -> list[str]:
    """Special tokens, some words, and every letter, alone and within a word."""
    pieces = [f"##{letter}" for letter in LETTERS]
    return [*BERT_SPECIAL, *WORDS, *(c for c in LETTERS if c not in WORDS), *pieces]


def bert_tokenizer(*, lowercase: bool = True) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer: `[CLS] text [SEP]`."""
    vocabulary = {token: index for index, token in enumerate(bert_vocabulary())}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    special = dict(zip(names, BERT_SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def roberta_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: `<s> text </s>`, and `<s> a </s></s> b </s>` for a pair."""
    words = [*ROBERTA_SPECIAL, *WORDS, *(c for c in LETTERS if c not in WORDS)]
    vocabulary = {token: index for index, token in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    special = dict(zip(names, ROBERTA_SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def decoder_tokenizer(*, end: bool = False, bos: bool = False) -> PreTrainedTokenizerFast:
    """A letter-level tokenizer with `<end>`, which is the pad token too, and `<bos>`."""
    tokens = ["<end>", "<bos>", "<unk>", " ", *LETTERS, *LETTERS.upper(), *"0123456789.,?!"]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    single = ("<bos> " if bos else "") + "$A" + (" <end>" if end else "")
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<end>", 0), ("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<end>",
        eos_token="<end>",
        bos_token="<bos>",
        unk_token="<unk>",
    )


def bert_config(**overrides: object) -> BertConfig:
    """A BERT of two layers and 32 channels."""
    settings = {
        "vocab_size": len(bert_vocabulary()),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 40,
    }
    return BertConfig(**(settings | overrides))


def encoder_config(kind: str, **overrides: object) -> PretrainedConfig:
    """An encoder of three layers and 32 channels."""
    settings = {
        "vocab_size": len(bert_vocabulary()),
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 140 if kind == "mpnet" else 40,
    }
    if kind == "distilbert":
        settings["hidden_dim"] = settings.pop("intermediate_size")
    if kind == "modernbert":
        ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
        settings |= {"local_attention": 8, "cls_token_id": 0, "sep_token_id": 0, **ids}
    return ENCODERS[kind][0](**(settings | overrides))


def save_encoder(
    path: Path, kind: str, *, seed: int = 0, head: str | None = None, **overrides: object
) -> Path:
    """Write a tiny encoder with a tokenizer; `head` is None, "masked_lm" or "classifier"."""
    config = encoder_config(kind, **overrides)
    build = {
        None: ENCODERS[kind][1],
        "masked_lm": AutoModelForMaskedLM.from_config,
        "classifier": AutoModelForSequenceClassification.from_config,
    }[head]
    spread(build(config), seed).save_pretrained(path)
    is_bert = kind in ("bert", "distilbert", "modernbert", "nomic_bert") or "jina" in kind
    (bert_tokenizer() if is_bert else roberta_tokenizer()).save_pretrained(path)
    return path


def save_bert(path: Path, *, seed: int = 0, masked_lm: bool = False, **overrides: object) -> Path:
    """Write a tiny BERT with its tokenizer; weights are large enough for errors to show."""
    config = bert_config(**overrides)
    model = spread(BertForMaskedLM(config) if masked_lm else BertModel(config), seed)
    model.save_pretrained(path)
    bert_tokenizer().save_pretrained(path)
    return path


def decoder_config(kind: str, **overrides: object) -> PretrainedConfig:
    """A decoder of three layers and 32 channels, four query heads and two key/value heads."""
    settings = {
        "vocab_size": 70,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    if kind in HYBRIDS or kind in COMPOSITES:
        return _hybrid_config(kind, settings, overrides)
    return DECODERS[kind][0](**(settings | DECODER_SETTINGS.get(kind, {}) | overrides))


def _hybrid_config(
    kind: str, settings: dict[str, object], overrides: dict[str, object]
) -> PretrainedConfig:
    settings = settings | HYBRID_SETTINGS
    if kind != "qwen3_5_text" and kind != "qwen3_5":
        settings |= SPARSE_SETTINGS
    if "qwen3_5_moe" in kind:
        del settings["intermediate_size"]
    if kind in HYBRIDS:
        return HYBRIDS[kind][0](**(settings | overrides))
    whole = {k: overrides.pop(k) for k in ("tie_word_embeddings", "num_labels") if k in overrides}
    return COMPOSITES[kind][0](
        text_config=settings | overrides, vision_config=VISION_SETTINGS, **whole
    )


def save_decoder(
    path: Path,
    kind: str,
    *,
    seed: int = 0,
    head: bool | str = True,
    end: bool = False,
    **overrides: object,
) -> Path:
    """Write a tiny causal LM with a tokenizer.

    Without `head` it is the backbone alone, with "classifier" a sequence classifier.
    """
    config = decoder_config(kind, **overrides)
    is_classifier = head == "classifier"
    model_class = (DECODERS | HYBRIDS | COMPOSITES)[kind][1]
    build = AutoModelForSequenceClassification.from_config if is_classifier else model_class
    model = spread(build(config), seed)
    (model if head else model.model).save_pretrained(path)
    decoder_tokenizer(end=end).save_pretrained(path)
    return path


def spread(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Give every parameter seeded values of a size at which a mistake is seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name.lower() and name.endswith("weight")
            neutral = parameter.mean()  # 1, or 0 in norms that add 1 to their weight
            parameter.copy_(neutral + 0.2 * noise if is_norm else 0.3 * noise)
            if name.endswith("A_log"):
                parameter.sub_(2)  # states of linear attention outlast some tokens
    model.tie_weights()
    return model.eval()


def copy(source: Path, target: Path) -> Path:
    """Copy a checkpoint, to change the copy."""
    return Path(shutil.copytree(source, target))


def shard(folder: Path) -> Path:
    """Store a folder's weights in two files with an index."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    placed = {tensor: names[i % 2] for i, tensor in enumerate(tensors)}
    for name in names:
        part = {t: x for t, x in tensors.items() if placed[t] == name}
        save_file(part, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; the value `...` removes one. A new file is made if there is none."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values = {key: value for key, value in (values | changes).items() if value is not ...}
    path.write_text(json.dumps(values))


def tensors(folder: Path) -> list[str]:
    """Name the tensors of a folder's model.safetensors."""
    return list(load_file(folder / "model.safetensors"))


def edit_tensors(folder: Path, change: "object") -> None:
    """Pass all tensors of a folder's model.safetensors through a function of a dict."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    changed = change(tensors)  # type: ignore[operator]
    save_file({n: t.contiguous().clone() for n, t in changed.items()}, file, {"format": "pt"})
