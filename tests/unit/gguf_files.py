"""Tiny models of transformers, written as GGUF files by llama.cpp's conventions."""

import json

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers import pre_tokenizers as pre
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TEXTS = [
    "Numbers 12345, 1,000.5 and 3.14159; it's WE'LL you've I'd",
    "  leading, trailing   and\n\n many\t\tspaces  \r\n",
    "naïve café ÆØÅ ǅ 你好\uff0c世界 こんにちは Привет שלום 🙂👩‍👩‍👧",
    "def f(x):\n    return x**2 + [1, 2][0]  # <tag/> $+=~^|",
    "",
]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CLASSIC = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA = CLASSIC | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def tiny_model(arch, **changes):
    torch.manual_seed(0)
    sizes = SIZES | changes
    if arch == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif arch == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif arch == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 32, **sizes}))
    else:
        sizes = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, **sizes}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes))
    for name, parameter in model.named_parameters():
        # Small multiples of 2^-8: 1 + w and w are then both exact in float32 and in bfloat16.
        scale = 4 if "norm" in name else 32
        step = torch.randint(-scale, scale + 1, parameter.shape) / 256
        parameter.data = step + (1 if "norm" in name and arch != "gemma3" else 0)
    return model.eval()


def stored(arch, name, values, config):
    """A tensor as llama.cpp's converter stores it."""
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    return values + 1 if arch == "gemma3" and "norm" in name else values


def gguf_name(name, table):
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{table['.'.join(middle)]}.{kind}"


def write_gguf(path, arch, model=None, *, skip=(), tensors=(), settings=(), tokenizer=None, **kw):
    """Write `model` as a GGUF; `tensors` and `settings` are added, `skip` leaves keys out."""
    writer = gguf.GGUFWriter(path, arch)
    if model is not None:
        write_sizes(writer, model.config, skip)
        table = GEMMA if arch == "gemma3" else CLASSIC
        quantise = kw.get("quantise", gguf.GGMLQuantizationType.F32)
        for name, values in model.state_dict().items():
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            values = np.ascontiguousarray(stored(arch, name, values.numpy(), model.config))
            target = gguf_name(name, table)
            if target in skip:
                continue
            kind = quantise if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(target, gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, values)
    write_vocabulary(writer, tokenizer or bpe(pre.ByteLevel(False)), kw.get("pre", "smollm"))
    for key, value in dict(settings).items():
        writer.add_key_value(key, value, value_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def value_type(value):
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    return gguf.GGUFValueType[kinds[type(value)]]


def write_sizes(writer, config, skip):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    if "attention.head_count" not in skip:
        writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)


def bpe(pre_tokenizer, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=SPECIAL,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def write_vocabulary(writer, tokenizer, name):
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    padding = [f"[PAD{i}]" for i in range(len(tokens), SIZES["vocab_size"])]
    kinds = [3 if token in SPECIAL else 1 for token in tokens] + [5] * len(padding)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
