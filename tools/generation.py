"""Generation requests with known answers, for tools that attack a server."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from tools.texts import mixed_texts

POOL = 24  # prompts
MOST_TOKENS = 48
MOST_BYTES = 400  # of a prompt, so that it fits into a small pool of pages
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class KnownText:
    """A prompt and what it gives alone.

    Attributes:
        path: Route.
        body: Of the request, without `max_tokens`.
        text: `MOST_TOKENS` tokens, or fewer where the model ended.
        prompt_tokens: As the server counts them.
    """

    path: str
    body: dict[str, Any]
    text: str
    prompt_tokens: int


KnownTexts = list[KnownText]


@dataclass
class Choice:
    """One output of an answer."""

    text: str = ""
    finish: list[str] = field(default_factory=list)


@dataclass
class Answer:
    """An answer, whole or put together from a stream."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    def add(self, data: dict[str, Any]) -> None:
        """Take in an answer or a chunk of one."""
        for item in data["choices"]:
            choice = self.choices.setdefault(item["index"], Choice())
            message = item.get("message") or item.get("delta") or item
            choice.text += message.get("text") or message.get("content") or ""
            if item["finish_reason"] is not None:
                choice.finish.append(item["finish_reason"])
        self.usage = data.get("usage") or self.usage


@dataclass(frozen=True)
class Wish:
    """A request and what has to come of it."""

    known: KnownText
    body: dict[str, Any]

    @property
    def path(self) -> str:
        """Route."""
        return self.known.path

    def fault_of(self, status: int, text: str, read: Callable[[str], Answer]) -> str | None:
        """Say what is wrong with an answer; None if nothing is."""
        if status != 200:
            return f"status {status}: {text[:200]}"
        try:
            answer = read(text)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"the answer has the wrong form ({error!r}): {text[-300:]}"
        return next(self._faults(answer), None)

    def _faults(self, answer: Answer) -> Iterable[str]:
        n, most = self.body.get("n", 1), self.body["max_tokens"]
        if sorted(answer.choices) != list(range(n)):
            yield f"choices {sorted(answer.choices)} instead of {n}"
        for choice in answer.choices.values():
            if choice.finish not in (["stop"], ["length"]):
                yield f"finish reasons {choice.finish}"
            if not self.known.text.startswith(choice.text.rstrip("\ufffd")):
                yield f"{choice.text!r} does not begin {self.known.text!r} ({self.body})"
            if choice.finish == ["stop"] and choice.text != self.known.text:
                yield f"{choice.text!r} ends before {self.known.text!r}"
        usage = answer.usage
        if usage is None or usage["prompt_tokens"] != self.known.prompt_tokens:
            yield f"usage {usage} instead of {self.known.prompt_tokens} tokens of prompt"
        elif not 1 <= usage["completion_tokens"] <= n * most:
            yield f"usage {usage} for {n} choices of {most} tokens"


def read_answer(text: str) -> Answer:
    """Read the JSON of a whole answer."""
    answer = Answer()
    answer.add(json.loads(text))
    return answer


def read_stream(text: str) -> Answer:
    """Read the server-sent events of a stream, which has to end as it should.

    Raises:
        ValueError: it does not.
    """
    events = text.split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise ValueError("the stream does not end with [DONE]")
    answer, ids = Answer(), set()
    for event in events[:-2]:
        data = json.loads(event.removeprefix("data: "))
        ids.add(data["id"])
        answer.add(data)
    if len(ids) != 1:
        raise ValueError(f"chunks of {len(ids)} ids")
    return answer


async def learn_texts(
    http: httpx.AsyncClient, model: str, seed: int, count: int = POOL
) -> KnownTexts:
    """Ask for the output of `count` prompts, alone and one after another."""
    texts = [text for text in mixed_texts(8 * count, seed, most_words=60) if _is_short(text)]
    return [await _learn(http, model, i, text) for i, text in enumerate(texts[:count])]


def _is_short(text: str) -> bool:
    return len(text.encode()) <= MOST_BYTES


async def _learn(http: httpx.AsyncClient, model: str, number: int, text: str) -> KnownText:
    body: dict[str, Any] = {"model": model, "temperature": 0}
    if number % 2:
        body |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
    if number % 4 < 2:
        path, body["prompt"] = COMPLETIONS, text
    else:
        path, body["messages"] = CHAT, [{"role": "user", "content": text}]
    sent = {**body, "max_tokens": MOST_TOKENS}
    answer = read_answer((await http.post(path, json=sent)).raise_for_status().text)
    assert answer.usage is not None
    return KnownText(path, body, answer.choices[0].text, answer.usage["prompt_tokens"])


def draw_wish(pool: KnownTexts, rng: np.random.Generator, *, stream: bool) -> Wish:
    """Draw a prompt, and how much of its output is asked for."""
    known = pool[int(rng.integers(len(pool)))]
    body = {**known.body, "max_tokens": int(rng.integers(1, MOST_TOKENS + 1)), "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if known.body["temperature"] == 0 and rng.random() < 0.25:
        body["n"] = 2
    if rng.random() < 0.2:
        body["priority"] = "bulk"
    return Wish(known, body)
