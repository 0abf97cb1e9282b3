"""An engine that generates what a script says, for tests of the gateway; no model, no torch."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from rose.models.card import GenerationCard, ModelCard, TokenizerCard
from rose.serving.gateway.app import create_app
from rose.serving.gateway.generation_schemas import ChatAnswer
from rose.serving.gateway.http_protocol import HttpProtocol
from rose.serving.gateway.settings import GatewaySettings
from rose.serving.protocol import Stats, TokenLogprobs, TokensDelta
from tests.unit.gateway_stub import Http

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
HI = [{"role": "user", "content": "hi"}]
SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
BOS, END = 0, 1
VOCAB_SIZE = 320  # a little more than the tokenizer has
CORPUS = ["the red kite hovers over the hill, 1, 2, 3, 4", "日本 🦙 café Größe", '{"name": "w"}']


def byte_tokenizer(bos=False):
    """A byte-level tokenizer: any text is its bytes, some of them merged."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
        )
    return backend


def card(backend, **changes):
    tokenizer = {
        "special_tokens": {"bos_token": "<|bos|>", "eos_token": "<|end|>"},
        "chat_templates": {"default": TEMPLATE},
        **changes.pop("tokenizer", {}),
    }
    generation = {
        "eos_token_ids": (END,),
        "max_kv_tokens": 4096,
        "structured_output": True,
        **changes.pop("generation", {}),
    }
    facts = {
        "name": "llm",
        "path": "/models/llm",
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "tasks": ("generate",),
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 256,
        "fingerprint": "llm-1",
        "created": 1_700_000_000,
        "tokenizer": TokenizerCard(**tokenizer),
        "generation": GenerationCard(**generation),
    }
    return ModelCard(**{**facts, **changes})


class StubLLM:
    """Gives its script, a list of token ids, one a step, up to `max_tokens`.

    Attributes:
        script: Ids that every request gets; a function makes them from prompt ids and sampling.
        per_delta: Tokens of one delta.
        delay_s: Time before each delta.
        fail_after: Deltas before `failure` is raised.
        calls: What was asked: (ids, sampling, priority, trace).
        cancelled: Generators that were closed before their end.
    """

    def __init__(self, script=(), backend=None, **changes):
        self.backend = backend or byte_tokenizer()
        self.card = card(self.backend, **changes)
        self.tokenizer_json = self.backend.to_str().encode()
        self.ready, self.unready_reason, self.stats = True, None, Stats()
        self.script = script
        self.per_delta, self.delay_s, self.cached = 1, 0.0, 0
        self.failure, self.fail_after = None, 0
        self.calls, self.cancelled, self.running = [], 0, 0
        self.delivered = 0  # deltas
        self.logprob_of = lambda _: -0.5

    def say(self, text):
        """Lets the answer be a text and the end token."""
        self.script = [*self.backend.encode(text, add_special_tokens=False).ids, END]
        return self

    async def embed(self, ids, options, **_):
        raise NotImplementedError

    async def generate(self, ids, sampling, *, priority="online", trace=""):
        self.calls.append((ids.tolist(), sampling, priority, trace))
        self.running += 1
        done = False
        try:
            for number, delta in enumerate(self._deltas(ids, sampling)):
                await asyncio.sleep(self.delay_s)
                if self.failure is not None and number >= self.fail_after:
                    done = True
                    raise self.failure
                self.delivered += 1
                done = delta.finish is not None
                yield delta
        finally:
            self.running -= 1
            self.cancelled += not done

    def _deltas(self, ids, sampling):
        script = self.script(ids, sampling) if callable(self.script) else self.script
        tokens, finish = self._outcome(list(script), sampling)
        steps = range(0, max(1, len(tokens)), self.per_delta)
        for start in steps:
            part = tokens[start : start + self.per_delta]
            yield TokensDelta(
                request_id=len(self.calls),
                token_ids=part,
                finish=finish if start == steps[-1] else None,
                logprobs=self._logprobs(part, sampling.logprobs),
                prompt_logprobs=None
                if start
                else self._logprobs(ids[1:], sampling.prompt_logprobs),
                cached_tokens=0 if start else self.cached,
            )

    def _outcome(self, tokens, sampling):
        ends = set(sampling.stop_token_ids)
        ends |= set() if sampling.ignore_eos else set(self.card.generation.eos_token_ids)
        limit = len(tokens) if sampling.max_tokens is None else sampling.max_tokens
        for place, token in enumerate(tokens[:limit]):
            if token in ends and place >= sampling.min_tokens:
                return tokens[: place + 1], "stop"
        return tokens[:limit], "length"

    def _logprobs(self, tokens, top):
        if top is None:
            return None
        return [
            TokenLogprobs(
                token_id=int(token),
                logprob=self.logprob_of(int(token)),
                top_ids=[int(token), *range(300, 300 + top - 1)][:top],
                top_logprobs=[self.logprob_of(int(token)), *(-1.0 - i for i in range(top - 1))][
                    :top
                ],
            )
            for token in tokens
        ]


def http_of(client, **settings):
    """An application with one model."""
    http = Http({"llm": client}, **settings)
    http.client = client
    return http


def events_of(text: str):
    """The data of each event of a stream, after checking its form."""
    assert text.isascii()
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event[len("data: ") :] for event in events]


@contextmanager
def served(client, **settings):
    """The application behind a real HTTP server; gives its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = create_app({"llm": client}, GatewaySettings(**settings))
        config = uvicorn.Config(app, log_level="error", http=HttpProtocol, ws="none", lifespan="on")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
    assert not thread.is_alive()


def wait_for(condition, seconds=5.0):
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def chat(http, messages=HI, **fields):
    return http.post("/v1/chat/completions", {"messages": messages, **fields})


def answer(http, messages=HI, **fields):
    response = chat(http, messages, **fields)
    assert response.status_code == 200, response.text
    assert response.content.isascii()
    msgspec.json.decode(response.content, type=ChatAnswer)
    return json.loads(response.content, parse_constant=pytest.fail)


def sampling_of(http, call=-1):
    return http.client.calls[call][1]


def prompt_of(http, call=-1):
    return http.client.backend.decode(http.client.calls[call][0], skip_special_tokens=False)
