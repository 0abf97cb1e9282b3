"""What the benchmarks ask for: sizes, and token ids or texts of those sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LATENCY_TOKENS = (128, 512, 4096)
SCORING_BATCHES = (5, 25, 50)
SCORING_TOKENS = 512
THROUGHPUT_TOKENS = (512, 1024, 4096)
THROUGHPUT_BATCH, THROUGHPUT_CLIENTS = 100, 4
CLIENTS = (1, 2, 4, 8, 16)
CLIENT_TOKENS = 512
STREAMS = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 64, 64


@dataclass(frozen=True, slots=True)
class Load:
    """One row of a table.

    `clients` at a time each send requests of `batch` texts, of `tokens` tokens each. A decode load
    is of prompts, each continued by `new_tokens`.
    """

    tokens: int
    batch: int = 1
    clients: int = 1
    new_tokens: int = 0

    @property
    def name(self) -> str:
        """How the row is called."""
        size = f"{self.tokens:,} tokens"
        if self.new_tokens:
            return f"{self.clients} x {size} + {self.new_tokens}"
        texts = f"{self.batch} x {size}" if self.batch > 1 else size
        return f"{self.clients} clients, {texts}" if self.clients > 1 else texts


def loads_of(bench: str, *, quick: bool) -> list[Load]:
    """List the loads of a benchmark; quick ones only show that everything works."""
    if quick:
        return {
            "latency": [Load(16)],
            "scoring": [Load(16, batch=3)],
            "throughput": [Load(16, batch=4, clients=2)],
            "concurrency": [Load(16, clients=n) for n in (1, 2)],
            "decode": [Load(8, clients=n, new_tokens=6) for n in (1, 2)],
        }[bench]
    return {
        "latency": [Load(n) for n in LATENCY_TOKENS],
        "scoring": [Load(SCORING_TOKENS, batch=n) for n in SCORING_BATCHES],
        "throughput": [
            Load(n, batch=THROUGHPUT_BATCH, clients=THROUGHPUT_CLIENTS) for n in THROUGHPUT_TOKENS
        ],
        "concurrency": [Load(CLIENT_TOKENS, clients=n) for n in CLIENTS],
        "decode": [Load(PROMPT_TOKENS, clients=n, new_tokens=NEW_TOKENS) for n in STREAMS],
    }[bench]


class Sequences:
    """Draws token ids that a tokenizer gives for words, so that texts of them are ordinary.

    The same seed draws the same ones.
    """

    def __init__(
        self, words: Sequence[int], edges: tuple[list[int], list[int]], seed: int = 0
    ) -> None:
        """Note the ids to draw from, and those that go before and after them in every sequence."""
        self._words = np.array(words, np.int32)
        self._before, self._after = edges
        self._random = np.random.default_rng(seed)

    def ids(self, tokens: int) -> list[int]:
        """Draw a sequence of `tokens` tokens."""
        inner = max(1, tokens - len(self._before) - len(self._after))
        drawn = self._random.choice(self._words, inner).tolist()
        return [*self._before, *drawn, *self._after][:tokens]

    def batch(self, load: Load) -> list[list[int]]:
        """Draw the sequences of a request."""
        return [self.ids(load.tokens) for _ in range(load.batch)]
