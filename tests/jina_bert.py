"""JinaBERT by its definition, in plain torch, as classes that transformers can load: the oracle.

transformers has none, and the published code is not run. One text at a time or padded; the scores
of all pairs of tokens are held at once.
"""

import math

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput


@strict
class JinaBertConfig(BertConfig):
    """The model's settings; the model for code has others of its layers."""

    model_type = "jina_bert"
    position_embedding_type: str = "alibi"
    feed_forward_type: str = "geglu"
    tie_word_embeddings: bool = False


@strict
class JinaBertCodeConfig(JinaBertConfig):
    """The model for code."""

    model_type = "jina_bert_code"


def slopes(heads: int) -> list[float]:
    """One for each head: of 6 heads four of a series of four, two between them."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]
    lower = 2 ** int(math.log2(heads))
    return slopes(lower) + slopes(2 * lower)[::2][: heads - lower]


class Attention(nn.Module):
    """What a checkpoint calls `attention.self`."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        size = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        if config.model_type == "jina_bert_code":
            self.layer_norm_q = nn.LayerNorm(size, eps=config.layer_norm_eps)
            self.layer_norm_k = nn.LayerNorm(size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if hasattr(self, "layer_norm_q"):
            q, k = self.layer_norm_q(q), self.layer_norm_k(k)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Sum(nn.Module):
    """A projection and the norm of the sum."""

    def __init__(self, config, inputs):
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Layer(nn.Module):
    """A layer whose norms are in its parts."""

    def __init__(self, config):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.kind, self.act = config.feed_forward_type, config.hidden_act
        self.attention = nn.ModuleDict({"self": Attention(config), "output": Sum(config, size)})
        if self.kind == "original":
            self.intermediate = nn.ModuleDict({"dense": nn.Linear(size, inner)})
            self.output = Sum(config, inner)
        else:
            gated, down = nn.Linear(size, 2 * inner, bias=False), nn.Linear(inner, size)
            norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
            self.mlp = nn.ModuleDict({"gated_layers": gated, "wo": down, "layernorm": norm})

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, bias), x)
        if self.kind == "original":
            return self.output(activation(self.act)(self.intermediate["dense"](x)), x)
        gate, up = self.mlp["gated_layers"](x).chunk(2, dim=-1)
        return self.mlp["layernorm"](x + self.mlp["wo"](activation(self.kind)(gate) * up))


class CodeLayer(nn.Module):
    """A layer with two norms of its own."""

    def __init__(self, config):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.kind, self.act = config.feed_forward_type, config.hidden_act
        self.attention = nn.ModuleDict({"self": Attention(config), "output": Sum(config, size)})
        self.layer_norm_1, self.layer_norm_2 = (
            nn.LayerNorm(size, eps=config.layer_norm_eps) for _ in range(2)
        )
        up = {"up_layer": inner} if self.kind == "original" else {"up_gated_layer": 2 * inner}
        self.mlp = nn.ModuleDict({n: nn.Linear(size, rows, bias=False) for n, rows in up.items()})
        self.mlp["down_layer"] = nn.Linear(inner, size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        attended = self.attention["output"](self.attention["self"](x, bias), x)
        x = self.layer_norm_1(x + attended)
        if self.kind == "original":
            inner = activation(self.act)(self.mlp["up_layer"](x))
        else:
            up, gate = self.mlp["up_gated_layer"](x).chunk(2, dim=-1)
            inner = up * activation(self.kind)(gate)
        return self.layer_norm_2(x + self.mlp["down_layer"](inner))


def activation(name: str):
    """The function that a kind of MLP, or `hidden_act`, stands for."""
    return F.relu if name in ("reglu", "relu") else F.gelu


class JinaBertPreTrainedModel(PreTrainedModel):
    """What the classes share."""

    config_class = JinaBertConfig
    base_model_prefix = "bert"

    def _init_weights(self, module):
        """Leave torch's own values."""


class JinaBertModel(JinaBertPreTrainedModel):
    """The encoder, and the pooler that classifiers use."""

    layer_class = Layer

    def __init__(self, config):
        super().__init__(config)
        size, eps = config.hidden_size, config.layer_norm_eps
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config.vocab_size, size),
                "token_type_embeddings": nn.Embedding(config.type_vocab_size, size),
                "LayerNorm": nn.LayerNorm(size, eps=eps),
            }
        )
        layers = [self.layer_class(config) for _ in range(config.num_hidden_layers)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(size, size)})
        self.post_init()

    def get_input_embeddings(self):
        """The table of words."""
        return self.embeddings["word_embeddings"]

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **_):
        """Hidden states; `return_dict` and the like are not looked at."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.embeddings["word_embeddings"](input_ids)
        x = self.embeddings["LayerNorm"](x + self.embeddings["token_type_embeddings"](types))
        place = torch.arange(input_ids.shape[1])
        slope = torch.tensor(slopes(self.config.num_attention_heads)).view(-1, 1, 1)
        bias = -slope * (place[None] - place[:, None]).abs()
        if attention_mask is not None:
            hidden = ~attention_mask.bool()[:, None, None]
            bias = bias.expand(len(x), -1, -1, -1).masked_fill(hidden, -torch.inf)
        for layer in self.encoder["layer"]:
            x = layer(x, bias)
        return BaseModelOutput(last_hidden_state=x)


class JinaBertForMaskedLM(JinaBertPreTrainedModel):
    """With BERT's head over the vocabulary."""

    model_class = JinaBertModel

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.bert = self.model_class(config)
        transform = {"dense": nn.Linear(size, size), "LayerNorm": nn.LayerNorm(size)}
        head = {
            "transform": nn.ModuleDict(transform),
            "decoder": nn.Linear(size, config.vocab_size),
        }
        self.cls = nn.ModuleDict({"predictions": nn.ModuleDict(head)})
        self.post_init()

    def forward(self, **inputs):
        """Logits of every token."""
        head = self.cls["predictions"]
        x = head["transform"]["dense"](self.bert(**inputs).last_hidden_state)
        x = head["transform"]["LayerNorm"](F.gelu(x))
        return MaskedLMOutput(logits=head["decoder"](x))


class JinaBertForSequenceClassification(JinaBertPreTrainedModel):
    """With the pooler and a layer over the first token."""

    model_class = JinaBertModel

    def __init__(self, config):
        super().__init__(config)
        self.bert = self.model_class(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, **inputs):
        """Logits of every text."""
        first = self.bert(input_ids, **inputs).last_hidden_state[:, 0]
        return SequenceClassifierOutput(
            logits=self.classifier(self.bert.pooler["dense"](first).tanh())
        )


class JinaBertCodeModel(JinaBertModel):
    """The model for code."""

    config_class = JinaBertCodeConfig
    layer_class = CodeLayer


class JinaBertCodeForMaskedLM(JinaBertForMaskedLM):
    """The model for code, with a head over the vocabulary."""

    config_class = JinaBertCodeConfig
    model_class = JinaBertCodeModel


class JinaBertCodeForSequenceClassification(JinaBertForSequenceClassification):
    """The model for code, with a classifier."""

    config_class = JinaBertCodeConfig
    model_class = JinaBertCodeModel


def register() -> None:
    """Let transformers find the classes by `model_type`."""
    for config, model, masked, classifier in (
        (JinaBertConfig, JinaBertModel, JinaBertForMaskedLM, JinaBertForSequenceClassification),
        (
            JinaBertCodeConfig,
            JinaBertCodeModel,
            JinaBertCodeForMaskedLM,
            JinaBertCodeForSequenceClassification,
        ),
    ):
        AutoConfig.register(config.model_type, config)
        AutoModel.register(config, model)
        AutoModelForMaskedLM.register(config, masked)
        AutoModelForSequenceClassification.register(config, classifier)
