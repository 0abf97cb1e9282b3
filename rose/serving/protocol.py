"""The wire between a gateway and an engine: a msgpack header and raw frames, no pickle.

A message is a list of ZeroMQ frames. The first holds one of the structs below, tagged with its
type; the others hold arrays as they lie in memory. The engine binds a ROUTER, each client connects
a DEALER. The first message on a connection is `Hello`; the answer is `Welcome`, or `Refused` if the
two speak different versions.
"""

from typing import Literal

import msgspec

from rose.models.card import ModelCard, RowOutput
from rose.runtime.options import EmbedOptions, Priority, SamplingParams

Buffer = bytes | bytearray | memoryview

PROTOCOL_VERSION = 3

FailureKind = Literal[
    "bad_request",  # the caller's mistake
    "overloaded",  # the queue is full
    "deadline",  # the request's time is over (found by the client)
    "non_finite",  # the model computed NaN or infinity for an item
    "internal",  # a fault of the engine
    "unavailable",  # the engine is gone, closing, or not answering
]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Client: the first message; `protocol` is the version that it speaks."""

    protocol: int
    client: str


class EmbedRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Client: embed a batch of texts.

    Frames: lengths int32 [B] (tokens per text), ids int32 [sum of lengths] and, where parts of
    texts are to be embedded, spans per text int32 [B] and their bounds int32 [spans, 2]: first
    token and the one after the last, counted within the text. `pool_from` is the number of leading
    tokens of each text that pooling leaves out (a prompt); spans need none. `outputs` are what is
    asked for, of one pass: "text" is a row for each text, or span, the others are float32, a row
    for each token, and go without spans. `queries` says that the texts are queries, which for a
    late-interaction model may end in tokens that the others do not see.
    `trace` is the HTTP request's id, `traceparent` its place in a trace,
    if it is traced. Deadlines are the client's: it cancels what is late.
    """

    request_id: int
    options: EmbedOptions
    pool_from: int = 0
    outputs: tuple[RowOutput, ...] = ("text",)
    queries: bool = False
    priority: Priority = "online"
    trace: str = ""
    traceparent: str = ""


class ScoreRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Client: score a batch of texts, or of pairs of texts that are joined already.

    Frames: lengths int32 [B] (tokens per text), ids int32 [sum of lengths] and, for models that
    want them, segments (0 or 1) int32 [sum of lengths]. Answered by an `EmbedResult` whose rows are
    raw scores, float32, one per label.
    """

    request_id: int
    priority: Priority = "online"
    trace: str = ""
    traceparent: str = ""


class GenerateRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Client: continue a prompt. Frame: the prompt's ids int32 [T].

    Answered by `Tokens` messages as tokens come, the last of which says why it ended.
    """

    request_id: int
    sampling: SamplingParams
    priority: Priority = "online"
    trace: str = ""
    traceparent: str = ""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Client: nobody waits for this request any more. It gets no answer."""

    request_id: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Client: are you there? Answered by `Pong` with the same `sequence`."""

    sequence: int


class GraphsRequest(msgspec.Struct, tag=True, frozen=True):
    """Client: which device graphs are there? Answered by `GraphsResult`."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Engine: the handshake's answer. Frames: the model's tokenizer.json."""

    protocol: int
    card: ModelCard


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Engine: the handshake failed; `reason` says why."""

    protocol: int
    reason: str


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """Engine: it was asked to stop, has answered everything, and leaves."""


class EmbedResult(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Engine: the vectors of an `EmbedRequest`, or the scores of a `ScoreRequest`.

    Frames, one for each output: rows, little-endian, of the request's output dtype; the first has
    `count` rows of `row_bytes` bytes each.
    `queued_s` and `computed_s` are seconds from arrival to the first step, and from there on.
    """

    request_id: int
    count: int
    row_bytes: int
    queued_s: float
    computed_s: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, and the most likely tokens at its place with theirs."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokensDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request.

    `finish` is "stop" (an end token, which is the last of `token_ids`) or "length", None while it
    goes on. `prompt_logprobs` comes with the first delta when asked for: one entry per prompt token
    but the first. `cached_tokens` of the prompt were found in the prefix cache.
    """

    request_id: int
    token_ids: list[int]
    finish: Literal["stop", "length"] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0


class Tokens(msgspec.Struct, tag=True, frozen=True):
    """Engine: what a step brought for the requests of this client."""

    deltas: list[TokensDelta]


class Failure(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Engine: the request failed. `field` names the request field at fault, if one is."""

    request_id: int
    kind: FailureKind
    message: str
    field: str | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters (see `COUNTERS`) and gauges of an engine, for health and metrics.

    A request is queued until its first step, then it runs until its answer; one whose sequence was
    preempted is queued again. `ready` is 1 while the engine takes work, as its client sees it.
    """

    ready: int = 0
    requests_running: int = 0
    requests_queued: int = 0
    tokens_queued: int = 0
    steps: int = 0
    tokens: int = 0
    sequences_running: int = 0
    sequences_waiting: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    graph_hits: int = 0
    graph_captures: int = 0
    graph_evictions: int = 0
    padding_tokens: int = 0


COUNTERS = (
    "steps",
    "tokens",
    "prefix_hit_tokens",
    "preemptions",
    "graph_hits",
    "graph_captures",
    "graph_evictions",
    "padding_tokens",
)
"""Numbers of `Stats` that only grow while an engine runs; the others are of this moment."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """Engine: alive, and these are its numbers."""

    sequence: int
    stats: Stats


GraphRuntime = Literal["embed", "score", "decode"]
GraphState = Literal["cold", "warm", "captured", "failed"]


class GraphCell(msgspec.Struct, frozen=True, array_like=True):
    """A bucket of batches: its size, what became of its graph, and how many batches it had."""

    sequences: int
    tokens: int
    max_seqlen: int
    state: GraphState
    batches: int


class GraphGrid(msgspec.Struct, frozen=True, kw_only=True):
    """The device graphs of one runtime.

    Every batch is one of `hits` (a graph replayed), `captures` and `eager`; those of more than
    `max_tokens` tokens are always eager. `tokens` and `padding_tokens` are those of graphs.
    """

    runtime: GraphRuntime
    max_tokens: int
    num_bytes: int
    hits: int
    captures: int
    evictions: int
    failures: int
    eager: int
    tokens: int
    padding_tokens: int
    cells: list[GraphCell]


class GraphsResult(msgspec.Struct, tag=True, frozen=True):
    """Engine: its device graphs; none where it runs without."""

    grids: list[GraphGrid]


ClientMessage = (
    Hello | EmbedRequest | ScoreRequest | GenerateRequest | Cancel | Ping | GraphsRequest
)
EngineMessage = Welcome | Refused | Goodbye | EmbedResult | Tokens | Failure | Pong | GraphsResult

encode = msgspec.msgpack.Encoder().encode
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)


class ProtocolError(ValueError):
    """Bytes that are no message of this protocol."""


def decode_from_client(header: Buffer) -> ClientMessage:
    """Decode the first frame of what a client sent.

    Raises:
        ProtocolError: it is no such message.
    """
    try:
        return _client_decoder.decode(header)
    except (msgspec.DecodeError, RecursionError) as error:  # the latter by thousands of brackets
        raise ProtocolError(str(error)) from error


def decode_from_engine(header: Buffer) -> EngineMessage:
    """Decode the first frame of what an engine sent.

    Raises:
        ProtocolError: it is no such message.
    """
    try:
        return _engine_decoder.decode(header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error
