"""How much time a yes-or-no ranker saves by computing a query's prompt once for its documents.

`python tools/shared_prompts.py [MODEL]`: the same pairs with and without, in turn, best of three.
"""

import random
import sys
import time
from typing import Any

import numpy as np

from rose import Engine
from rose.serving.local_ranking import PairOptions

MODEL = ".models/SmolLM2-135M-Instruct"
QUERY = "Which bird hunts over the hill?"
TEXT = "a red kite is a bird of prey that circles above slopes and green tea is best hot"
DOCUMENTS = 16
RUNS = 3


def main() -> None:
    """Print a line for each length of the documents."""
    model = sys.argv[1] if sys.argv[1:] else MODEL
    with Engine(model, device="cpu", dtype="float32", tasks=("score",)) as engine:
        for words in (20, 100):
            measure(engine, words)


def measure(engine: Engine, words: int) -> None:
    """Score documents of so many words."""
    rng = random.Random(words)
    documents = [" ".join(rng.choices(TEXT.split(), k=words)) for _ in range(DOCUMENTS)]
    ranker = engine.ranker()
    encoded = ranker.encode(QUERY, documents, PairOptions())
    seconds: dict[bool, list[float]] = {True: [], False: []}
    scores: dict[bool, Any] = {}
    served = engine._served
    sharing, budget = served.scoring._prefixes, served.max_score_tokens  # type: ignore[union-attr]
    for _ in range(RUNS):
        for shared in (True, False):
            served.scoring._prefixes = sharing if shared else None  # type: ignore[union-attr]
            served.max_score_tokens = budget if shared else served.max_batch_tokens
            began = time.perf_counter()
            scores[shared] = ranker.raw(encoded)
            seconds[shared].append(time.perf_counter() - began)
    served.scoring._prefixes, served.max_score_tokens = sharing, budget  # type: ignore[union-attr]
    with_it, without = min(seconds[True]), min(seconds[False])
    print(
        f"{encoded.tokens / DOCUMENTS:.0f} tokens a pair: {without:.2f} s without, {with_it:.2f} s "
        f"with, {without / with_it:.2f} times as fast; scores differ by "
        f"{np.abs(scores[True] - scores[False]).max():.1e} at most"
    )


if __name__ == "__main__":
    main()
