"""One benchmark from its options to its results."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rose.serving.bench.http_client import BenchError
from rose.serving.bench.loads import Load, Sequences, loads_of
from rose.serving.bench.measure import (
    CHECKED_TOKENS,
    Effort,
    check_tokens,
    check_vectors,
    measure_decode,
    measure_embedding,
)
from rose.serving.bench.results import Results
from rose.serving.bench.targets import InProcess, Inputs, Server, Target

if TYPE_CHECKING:
    from rose.serving.commands.flags import EngineFlags
    from rose.serving.gateway.tokenization import Tokenizer
    from rose.serving.local import Engine

STARTUP_S = 300
HTTP_ONLY = ("concurrency",)
_ENGINE_OPTIONS = (
    *("device", "dtype", "quantization", "attention", "max_model_len", "max_batch_tokens"),
    *("max_num_seqs", "kv_cache_memory", "deterministic"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure: a model, in process or on a server, and perhaps another server."""

    bench: str
    model: str
    engine: "EngineFlags"
    url: str | None = None
    served_name: str | None = None
    compare: str | None = None
    compare_name: str | None = None
    api_key: str | None = None
    seconds: float = 10.0
    quick: bool = False


def run(options: Options, show: Callable[[str], None]) -> Results:
    """Measure.

    Raises:
        ValueError: the model cannot do what is measured, or a server does not answer.
    """
    results = Results(options.bench, Path(options.model).resolve().name)
    with ExitStack() as stack:
        show("loading the model")
        local = stack.enter_context(closing(InProcess(_open(options))))
        targets: list[Target] = [*_servers(options, stack, show)]
        if options.bench not in HTTP_ONLY:
            targets.insert(0, local)
        sequences = make_sequences(local.engine.tokenizer)
        show("comparing answers")
        if options.bench == "decode":
            check_tokens(results, targets, sequences)
        else:
            texts = [sequences.ids(tokens) for tokens in CHECKED_TOKENS]
            everyone = targets if local in targets else [local, *targets]
            check_vectors(results, everyone, texts)
        for load in _fitting(options, local.engine, results):
            _measure(options, results, targets, load, sequences, local.engine, show)
    return results


def _open(options: Options) -> "Engine":
    from rose.serving.local import Engine

    task = "generate" if options.bench == "decode" else "embed"
    arguments = {name: getattr(options.engine, name) for name in _ENGINE_OPTIONS}
    return Engine(options.model, tasks=(task,), **arguments)


def _servers(options: Options, stack: ExitStack, show: Callable[[str], None]) -> Iterator[Server]:
    url = options.url
    if url is None and options.bench in HTTP_ONLY:
        show("starting a server")
        url = stack.enter_context(own_server(options.model, options.engine))
    for where, name in ((url, options.served_name), (options.compare, options.compare_name)):
        if where is not None:
            server = Server.find(where, name, options.api_key)
            yield stack.enter_context(closing(server))


@contextlib.contextmanager
def own_server(model: str, engine: "EngineFlags") -> Iterator[str]:
    """Serve a model for as long as the context is open; gives the address.

    Raises:
        BenchError: it does not start.
    """
    from rose.serving.commands.flags import as_options

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rose", "serve", model, "--port", str(port)]
    command += [*as_options(engine), "--log-level", "warning"]
    process = subprocess.Popen(command)
    try:
        _await_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _await_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    end = time.monotonic() + STARTUP_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        time.sleep(0.2)
    raise BenchError("the server that was started for this did not become ready")


def make_sequences(tokenizer: "Tokenizer") -> Sequences:
    """Draw from whole words of a vocabulary, so that texts of them have as many tokens again."""
    backend = tokenizer.backend
    tokens = [backend.id_to_token(i) or "" for i in range(backend.get_vocab_size())]
    marked = [i for i, t in enumerate(tokens) if t[:1] in "\u0120\u2581" and _is_word(t[1:])]
    plain = [i for i, t in enumerate(tokens) if _is_word(t)]
    (whole,), (inner,) = (
        tokenizer.encode(["hello"], add_special_tokens=special) for special in (True, False)
    )
    added, count = whole.tolist(), len(inner)
    start = next(i for i in range(len(added)) if added[i : i + count] == inner.tolist())
    return Sequences(marked or plain or inner.tolist(), (added[:start], added[start + count :]))


def _is_word(token: str) -> bool:
    return len(token) > 2 and token.isascii() and token.isalpha() and token.islower()


def _fitting(options: Options, engine: "Engine", results: Results) -> list[Load]:
    """Leave out loads that are too long for the model."""
    loads = loads_of(options.bench, quick=options.quick)
    limit = engine.card.max_model_len
    fitting = [load for load in loads if load.tokens + load.new_tokens <= limit]
    if left := [load.name for load in loads if load not in fitting]:
        results.notes.append(f"Left out, for the model takes {limit} tokens: {'; '.join(left)}.")
    if not fitting:
        raise ValueError(f"the model takes {limit} tokens, fewer than any load of this benchmark")
    return fitting


def _measure(
    options: Options,
    results: Results,
    targets: Sequence[Target],
    load: Load,
    sequences: Sequences,
    engine: "Engine",
    show: Callable[[str], None],
) -> None:
    seconds = 0.0 if options.quick else options.seconds
    effort = Effort(seconds, 2 if options.quick else 3 if load.batch >= 100 else 7)
    if options.bench == "decode":
        measure_decode(results, targets, load, sequences, effort, show)
        return

    def draw(load: Load) -> Inputs:
        batch = sequences.batch(load)
        if options.bench not in HTTP_ONLY:
            return batch
        return [engine.tokenizer.backend.decode(ids) for ids in batch]

    measure_embedding(results, targets, load, draw, effort, show)
