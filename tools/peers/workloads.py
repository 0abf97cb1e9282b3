"""What the engines are asked to do, and what the machine could do at best.

A workload has rows; every engine does each row once a turn. Texts and prompts are drawn from a
seed, so that they are the same on every machine.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.peers.embedders import Text
from tools.texts import WORDS, skewed_lengths, text_of_tokens

LENGTHS = (16, 128, 512)
POOL = 64  # texts of each length
MIXED = 256
PROMPT, LONG_PROMPT = 16, 512  # tokens
PROMPTS = 32
STREAMS = (1, 8, 16)
CLIENTS = {128: (1, 2, 4, 8, 16), 512: (1, 4, 16)}


@dataclass(frozen=True)
class Row:
    """A row: its name, what a worker is told to do, and how much that is.

    Attributes:
        order: Of `worker`; of a server, the length of the texts and the number of clients.
        units: Tokens, texts or the like, for rates.
        tokens: That the model sees in one forward pass or one run.
    """

    name: str
    order: dict[str, Any]
    units: int = 1
    tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """Rows that are measured together, one after another."""

    kind: str  # "embed", "generate", "quantized", "http" or "start"
    title: str
    rows: tuple[Row, ...]
    measure: str = "ms"  # or "texts/s", "tokens/s": what the table shows

    def quick(self) -> "Workload":
        """The least costly rows alone."""
        return Workload(self.kind, self.title, self.rows[:1], self.measure)


def _one_text(length: int, repeats: int) -> Row:
    order = {"op": "batch", "length": str(length), "count": 1, "repeats": repeats}
    return Row(f"{length} tokens", order, 1, length)


def _batch(count: int) -> Row:
    order = {"op": "batch", "length": "512", "count": count, "repeats": 1}
    return Row(f"{count} x 512", order, count, 512 * count)


def _streams(streams: int, new: int) -> Row:
    order = {"op": "decode", "streams": streams, "new": new}
    return Row(f"{streams} stream{'s' if streams > 1 else ''}", order, streams * new, streams)


def _http(length: int) -> Workload:
    rows = [
        Row(f"{clients} client{'s' if clients > 1 else ''}", {"length": length, "clients": clients})
        for clients in CLIENTS[length]
    ]
    return Workload("http", f"HTTP, single texts of {length} tokens", tuple(rows))


NEW_TOKENS = 32
WORKLOADS = {
    "latency": Workload(
        "embed",
        "Embedding one text",
        (_one_text(16, 20), _one_text(128, 8), _one_text(512, 3)),
    ),
    "batches": Workload(
        "embed", "Embedding batches of 512 tokens", (_batch(5), _batch(25), _batch(50))
    ),
    "mixed": Workload(
        "embed",
        f"Embedding {MIXED} texts of 8 to 512 tokens",
        (Row("mixed", {"op": "mixed"}, MIXED),),
        "texts/s",
    ),
    "decode": Workload(
        "generate",
        "Decoding one stream and several",
        tuple(_streams(streams, NEW_TOKENS) for streams in STREAMS),
        "tokens/s",
    ),
    "decode-quantized": Workload(
        "quantized",
        "Decoding with weights of 8 and 4 bits",
        tuple(_streams(streams, NEW_TOKENS) for streams in STREAMS),
        "tokens/s",
    ),
    "first-token": Workload(
        "generate",
        f"Time to the first token behind a prompt of {LONG_PROMPT}",
        (Row("first token", {"op": "first"}, 1, LONG_PROMPT),),
    ),
    "http-128": _http(128),
    "http-512": _http(512),
    "start": Workload("start", "From the command to the first vector", (Row("start", {}),), "s"),
}


@dataclass(frozen=True)
class Inputs:
    """Texts by their length, mixed ones, and prompts by their length."""

    texts: dict[str, list[Text]]
    mixed: list[Text]
    prompts: dict[str, list[list[int]]]

    @classmethod
    def draw(cls, embedder: Path, llm: Path, seed: int) -> "Inputs":
        """Draw them for the tokenizers of two checkpoints."""
        rng = np.random.default_rng(seed)
        encode = _encoder(embedder)

        def text(tokens: int) -> Text:
            words = text_of_tokens(rng, tokens, lambda text: len(encode(text)))
            return Text(words, encode(words))

        texts = {str(length): [text(length) for _ in range(POOL)] for length in LENGTHS}
        mixed = [text(length) for length in skewed_lengths(MIXED, seed)]
        continue_ = _encoder(llm)
        words = np.array(WORDS["English"], object)
        prompts = {
            str(length): [
                continue_(" ".join(rng.choice(words, length)))[:length] for _ in range(PROMPTS)
            ]
            for length in (PROMPT, LONG_PROMPT)
        }
        return cls(texts, mixed, prompts)

    def write(self, path: Path) -> None:
        """Keep them in a file, which `read` reads."""
        content = {
            "texts": {n: [vars(text) for text in texts] for n, texts in self.texts.items()},
            "mixed": [vars(text) for text in self.mixed],
            "prompts": self.prompts,
        }
        path.write_text(json.dumps(content))

    @classmethod
    def read(cls, path: Path) -> "Inputs":
        """Read what `write` wrote."""
        content = json.loads(path.read_text())
        texts = {n: [Text(**text) for text in texts] for n, texts in content["texts"].items()}
        return cls(texts, [Text(**text) for text in content["mixed"]], content["prompts"])

    @property
    def checked(self) -> list[Text]:
        """Texts whose vectors are compared: of every length, and mixed ones."""
        return [text for texts in self.texts.values() for text in texts[:2]] + self.mixed[:18]


def _encoder(folder: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer  # not every environment has it, and only this needs it

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda text: list(tokenizer.encode(text).ids)


def linear_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(inputs, outputs) of each linear layer that every token goes through, of a config.json.

    Raises:
        ValueError: the model type is neither "bert" nor "llama".
    """
    width, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "bert":
        layer = [(width, width)] * 4 + [(width, inner), (inner, width)]
    elif config["model_type"] == "llama":
        head = config.get("head_dim") or width // config["num_attention_heads"]
        keys = head * config["num_key_value_heads"]
        queries = head * config["num_attention_heads"]
        layer = [(width, queries), (width, keys), (width, keys), (queries, width)]
        layer += [(width, inner), (width, inner), (inner, width)]
    else:
        raise ValueError(f"model_type {config['model_type']!r}; bert and llama are known")
    return layer * int(config["num_hidden_layers"])


def head_shape(config: dict[str, Any]) -> tuple[int, int]:
    """(inputs, outputs) of the layer that turns a hidden state into logits."""
    return (config["hidden_size"], config["vocab_size"])


@dataclass(frozen=True)
class Limits:
    """Rates of the machine, one a turn: operations and bytes a second."""

    flops: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)

    def seconds(self, shapes: Sequence[tuple[int, int]], tokens: int, width: float) -> float:
        """The least time for `tokens` through layers whose weights have `width` bytes each.

        The slower of computing and reading the weights once, at the best rates seen.
        """
        weights = sum(inputs * outputs for inputs, outputs in shapes)
        return max(2 * weights * tokens / max(self.flops), weights * width / max(self.bytes))


def least_seconds(row: Row, kind: str, limits: Limits, config: dict[str, Any]) -> float | None:
    """The least time for a row on this machine, attention aside; None if that is not known.

    Weights of the embedder are read as float32; those of the LLM as the 2 bytes that the
    checkpoint stores.
    """
    if not limits.flops or not limits.bytes:
        return None
    shapes = linear_shapes(config)
    if kind == "embed":
        return limits.seconds(shapes, row.tokens, 4) if row.tokens else None
    if row.order["op"] == "first":
        return limits.seconds(shapes, row.tokens, 2)
    steps = row.units // row.tokens
    prompts = limits.seconds(shapes, row.tokens * PROMPT, 2)
    return prompts + (steps - 1) * limits.seconds([*shapes, head_shape(config)], row.tokens, 2)
