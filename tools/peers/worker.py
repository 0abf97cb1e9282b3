"""An engine in a process of its own: orders come as lines of JSON, answers go back as lines.

`python -m tools.peers.worker KIND NAME MODELS LLAMA INPUTS THREADS`
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tools.peers.embedders import EMBEDDERS, Embedder, Text
from tools.peers.generators import GENERATORS, QUANTIZED, Generator
from tools.peers.workloads import LONG_PROMPT, PROMPT, Inputs


class EmbedWork:
    """What an embedder is asked to do."""

    def __init__(self, engine: Embedder, inputs: Inputs) -> None:
        """Work with an engine on inputs."""
        self._engine = engine
        self._inputs = inputs
        self._batch = 0
        self._next = 0

    def vectors(self) -> dict[str, Any]:
        """Vectors of the texts that are compared, each alone."""
        rows = [self._engine.embed([text])[0].tolist() for text in self._inputs.checked]
        return {"vectors": rows}

    def choose_batch(self) -> dict[str, Any]:
        """Find the batch size that is best for texts of mixed lengths, on a quarter of them."""
        times = {
            size: seconds_of(lambda size=size: self._mixed(self._inputs.mixed[::4], size))
            for size in self._engine.batches
        }
        self._batch = min(times, key=times.__getitem__) if times else 0
        return {"batch": self._batch}

    def batch(self, length: str, count: int, repeats: int) -> dict[str, Any]:
        """Time batches of texts of one length; one more comes first, to get going."""
        pool = self._inputs.texts[length]
        self._engine.embed(self._take(pool, 1))
        batches = [self._take(pool, count) for _ in range(repeats)]
        return {
            "seconds": [
                seconds_of(lambda texts=texts: self._engine.embed(texts)) for texts in batches
            ]
        }

    def mixed(self) -> dict[str, Any]:
        """Time all texts of mixed lengths."""
        self._engine.embed(self._take(self._inputs.texts["128"], 1))
        return {"seconds": [seconds_of(lambda: self._mixed(self._inputs.mixed, self._batch))]}

    def _mixed(self, texts: Sequence[Text], size: int) -> None:
        self._engine.embed_mixed(texts, size)

    def _take(self, pool: Sequence[Text], count: int) -> list[Text]:
        start, self._next = self._next, self._next + count
        return [pool[i % len(pool)] for i in range(start, start + count)]


class GenerateWork:
    """What a generator is asked to do."""

    def __init__(self, engine: Generator, inputs: Inputs) -> None:
        """Work with an engine on inputs."""
        self._engine = engine
        self._prompts = inputs.prompts
        self._next = 0

    def tokens(self, count: int, new: int) -> dict[str, Any]:
        """Greedy tokens of the first prompts: one alone, the others together."""
        first, *others = self._prompts[str(PROMPT)][:count]
        alone = self._engine.generate([first], new)
        return {"tokens": [*alone, *self._engine.generate(others, new)]}

    def decode(self, streams: int, new: int) -> dict[str, Any]:
        """Time the continuation of prompts together; a few tokens come first, to get going."""
        prompts = self._take(str(PROMPT), streams)
        self._engine.generate(prompts, 2)
        prompts = self._take(str(PROMPT), streams)
        return {"seconds": [seconds_of(lambda: self._engine.generate(prompts, new))]}

    def first(self) -> dict[str, Any]:
        """Time one token behind a long prompt."""
        self._engine.generate(self._take(str(PROMPT), 1), 2)
        (prompt,) = self._take(str(LONG_PROMPT), 1)
        return {"seconds": [seconds_of(lambda: self._engine.generate([prompt], 1))]}

    def _take(self, length: str, count: int) -> list[list[int]]:
        pool = self._prompts[length]
        start, self._next = self._next, self._next + count
        return [pool[i % len(pool)] for i in range(start, start + count)]


class LimitWork:
    """The machine itself: matrix products of float32, and reading memory."""

    SHAPES = ((384, 384), (384, 1536), (1536, 384), (576, 1536))
    READ = 1 << 28  # bytes, far more than caches hold

    def __init__(self, threads: int) -> None:
        """Prepare operands for so many threads."""
        import torch

        from tools.throughput import GemmLimit

        torch.set_num_threads(threads)
        self._gemm = GemmLimit(self.SHAPES)
        self._vector = torch.ones(self.READ // 4)
        self._rows = self._vector.view(8192, -1)
        self._ones = torch.ones(self._rows.shape[1])

    def limits(self) -> dict[str, Any]:
        """The best rates of this turn, operations and bytes a second."""
        reads = (self._vector.sum, lambda: self._rows @ self._ones)
        read = min(seconds_of(work) for work in reads for _ in range(4))
        return {"flops": self._gemm.measure(), "bytes": self.READ / read}


def seconds_of(work: Callable[[], object]) -> float:
    """How long something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of packages, or of modules that run from their source."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = importlib.import_module(package).__version__
    return found


def load(kind: str, name: str, paths: Sequence[Path], threads: int) -> tuple[Any, list[str]]:
    """Make what is worked with; `paths` are models, llama.cpp's programs, inputs."""
    models, llama, inputs = paths
    if kind == "limits":
        return LimitWork(threads), ["torch"]
    if kind == "embed":
        embedder = EMBEDDERS[name]
        work = EmbedWork(embedder(models, llama, threads), Inputs.read(inputs))
        return work, list(embedder.packages)
    generator = (GENERATORS | QUANTIZED)[name]
    return GenerateWork(generator(models, llama, threads), Inputs.read(inputs)), list(
        generator.packages
    )


def main() -> None:
    """Load, then answer until there are no more orders."""
    kind, name, models, llama, inputs, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print does not get among the answers

    def answer(make: Callable[[], dict[str, Any]]) -> bool:
        try:
            found = make()
        except Exception as error:  # noqa: BLE001 - it is reported to who gave the order
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(found) + "\n")
        return "error" not in found

    work: Any = None

    def start() -> dict[str, Any]:
        nonlocal work
        paths = [Path(models), Path(llama), Path(inputs)]
        work, packages = load(kind, name, paths, int(threads))
        gc.collect()
        gc.freeze()  # as servers do: a full collection would take a tenth of a second of some rows
        return {"versions": versions(packages)}

    if answer(start):
        for line in sys.stdin:
            order = json.loads(line)
            answer(lambda order=order: getattr(work, order.pop("op"))(**order))
    answers.flush()
    os._exit(0)  # some engines leave threads that never end


if __name__ == "__main__":
    main()
