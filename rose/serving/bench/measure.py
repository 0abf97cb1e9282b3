"""Runs loads on targets in turns, after a look at whether their answers agree."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rose.serving.bench.loads import Load, Sequences
from rose.serving.bench.results import Check, Results, Row
from rose.serving.bench.targets import Inputs, Target, Vectors

LEAST_COSINE = 0.999
CHECKED_TOKENS = (5, 16, 40)
CHECKED_NEW = 12  # tokens
REQUESTS_A_TURN = 4  # of a client, where requests are short


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a load is measured: for so many seconds, but at least so many turns."""

    seconds: float
    least_turns: int

    def turns(self) -> Iterator[int]:
        """Count turns until it is enough."""
        end, turn = time.perf_counter() + self.seconds, 0
        while turn < self.least_turns or time.perf_counter() < end:
            yield turn
            turn += 1


Show = Callable[[str], None]


def check_vectors(results: Results, targets: Sequence[Target], texts: Sequence[list[int]]) -> None:
    """Compare the vectors of targets, or of a text alone and in company where there is one."""
    found = {target.name: target.vectors(texts) for target in targets}
    if len(targets) == 1:
        alone = np.concatenate([targets[0].vectors([text]) for text in texts])
        found["each text alone"] = alone
    for one, other in combinations(found, 2):
        least = float(_cosines(found[one], found[other]).min())
        name = f"least cosine, {one} to {other}"
        results.checks.append(Check(name, f"{least:.7f}", least >= LEAST_COSINE))


def _cosines(one: Vectors, other: Vectors) -> Vectors:
    if one.shape != other.shape:
        return np.array([0.0], np.float32)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines: Vectors = (one * other).sum(1) / lengths
    return cosines


def check_tokens(results: Results, targets: Sequence[Target], sequences: Sequences) -> None:
    """Compare greedy texts of targets, or of two runs where there is one."""
    load = Load(CHECKED_TOKENS[-1], new_tokens=CHECKED_NEW)
    prompts = [sequences.ids(tokens) for tokens in CHECKED_TOKENS]
    found = {t.name: [s.text for s in t.decode(prompts, load)] for t in targets}
    if len(targets) == 1:
        alone = [targets[0].decode([prompt], load)[0].text for prompt in prompts]
        found["each prompt alone"] = alone
    for one, other in combinations(found, 2):
        pairs = list(zip(found[one], found[other], strict=True))
        same = sum(a == b for a, b in pairs)
        value = f"{same} of {len(pairs)} equal"
        if same < len(pairs):
            shares = [_common(*pair) / max(1, *map(len, pair)) for pair in pairs]
            value += f", the same for {min(shares):.0%} of their length at least"
        name = f"greedy texts, {one} and {other}"
        results.checks.append(Check(name, value, same == len(pairs)))


def _common(one: str, other: str) -> int:
    """Count the characters before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def measure_embedding(
    results: Results,
    targets: Sequence[Target],
    load: Load,
    draw: Callable[[Load], Inputs],
    effort: Effort,
    show: Show,
) -> None:
    """Add a row for each target."""
    each = REQUESTS_A_TURN if load.clients > 1 and load.batch == 1 else 1
    count = load.clients * each
    rows = [Row(target.name, load, count * load.batch) for target in targets]
    for target in targets:
        target.embed([draw(load) for _ in range(load.clients)], load.clients)  # warm-up
    for turn in effort.turns():
        show(f"{load.name}, turn {turn + 1}")
        requests = [draw(load) for _ in range(count)]
        for target, row in _in_turn(targets, rows, turn):
            began = time.perf_counter()
            row.seconds += target.embed(requests, load.clients)
            row.walls.append(time.perf_counter() - began)
    results.rows += rows


def measure_decode(
    results: Results,
    targets: Sequence[Target],
    load: Load,
    sequences: Sequences,
    effort: Effort,
    show: Show,
) -> None:
    """Add a row for each target."""
    rows = [Row(target.name, load, load.clients * load.new_tokens) for target in targets]
    for target in targets:
        target.decode([sequences.ids(load.tokens) for _ in range(load.clients)], load)  # warm-up
    for turn in effort.turns():
        show(f"{load.name}, turn {turn + 1}")
        prompts = [sequences.ids(load.tokens) for _ in range(load.clients)]
        for target, row in _in_turn(targets, rows, turn):
            streams = target.decode(prompts, load)
            ends = [stream.times[-1] for stream in streams]
            row.seconds += [stream.times[0] - stream.began for stream in streams]
            row.walls.append(max(ends) - min(stream.began for stream in streams))
            row.token_seconds += [
                (stream.times[-1] - stream.times[0]) / max(1, stream.tokens - 1)
                for stream in streams
            ]
    results.rows += rows


def _in_turn(
    targets: Sequence[Target], rows: Sequence[Row], turn: int
) -> Iterator[tuple[Target, Row]]:
    """Let another target begin each time."""
    order = [(turn + i) % len(targets) for i in range(len(targets))]
    return ((targets[i], rows[i]) for i in order)
