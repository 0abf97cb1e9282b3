"""Requests that a server has to refuse, each with the answer that it owes.

A mistake is refused with its status and an OpenAI error object that names the field at fault.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

JSON_TYPE = {"Content-Type": "application/json"}
MAX_BODY = 32 << 20  # bytes that a server takes by default
DEEP = 100_000


@dataclass(frozen=True)
class Mistake:
    """A request that is wrong.

    Attributes:
        name: What is wrong with it.
        param: The field that the answer has to name; None where it is no field's fault.
        status: Of the answer.
        costly: So large that a run should send it only now and then.
    """

    name: str
    path: str
    body: bytes = b""
    param: str | None = None
    status: int = 400
    headers: Mapping[str, str] = field(default_factory=lambda: JSON_TYPE)
    method: str = "POST"
    costly: bool = False

    def fault_of(self, status: int, answer: bytes) -> str | None:
        """Say what is wrong with the answer to this request; None if nothing is."""
        if status != self.status:
            return f"{self.name}: status {status} instead of {self.status}: {answer[:200]!r}"
        if fault := error_fault(answer):
            return f"{self.name}: {fault}"
        param = json.loads(answer)["error"]["param"]
        if param != self.param:
            return f"{self.name}: names {param!r} instead of {self.param!r}"
        return None


def error_fault(answer: bytes | str) -> str | None:
    """Say why an answer is no OpenAI error object; None if it is one."""
    try:
        error = json.loads(answer)["error"]
        fields = {key: error[key] for key in ("message", "type", "param", "code")}
    except (ValueError, KeyError, TypeError):
        return f"not an OpenAI error object: {answer[:200]!r}"
    if not (isinstance(fields["message"], str) and fields["message"] and fields["type"]):
        return f"the error says nothing: {answer[:200]!r}"
    return None


def embedding_mistakes(model: str, dimensions: int, max_model_len: int) -> list[Mistake]:
    """Mistakes of requests to /v1/embeddings.

    Args:
        model: Name of a served embedder.
        dimensions: Width of its vectors.
        max_model_len: Its limit in tokens.
    """
    path, valid = "/v1/embeddings", {"model": model, "input": "a red kite"}
    long_text, long_ids = "kite " * (2 * max_model_len), [1] * (max_model_len + 1)
    inputs: list[tuple[Any, str]] = [
        (None, "input"),
        ([], "input"),
        ([[]], "input[0]"),
        ([[5], []], "input[1]"),
        (7, "input"),
        (True, "input"),
        ({"text": "a"}, "input"),
        ([1.5], "input[0]"),
        ([None], "input[0]"),
        ([True, False], "input[0]"),
        ([[[5]]], "input[0][0]"),
        ([[5, "red"]], "input[0][1]"),
        (["a", 3], "input[1]"),
        ([[5], 5], "input[1]"),
        ([-1], "input[0]"),
        ([5, 10**9], "input[1]"),
        ([[5], [5, -1]], "input[1][1]"),
        ([10**30], "input[0]"),
        ([2**63], "input[0]"),
        ([5] * 10 + [2**31], "input[10]"),
        (["a"] * 2049, "input"),
        (long_text, "input"),
        (["a", long_text], "input[1]"),
        (long_ids, "input"),
        ([[5], long_ids], "input[1]"),
    ]
    fields: list[tuple[dict[str, Any], str]] = [
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": 3}, "encoding_format"),
        ({"output_dtype": "float64"}, "output_dtype"),
        ({"encoding_format": "base64_int8", "output_dtype": "float32"}, "output_dtype"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": dimensions + 1}, "dimensions"),
        ({"dimensions": 10**25}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"dimensions": 8.5}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"normalize": 1}, "normalize"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": max_model_len + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5, "truncate": False}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"priority": "high"}, "priority"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"user": 3}, "user"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt_name": "no such prompt"}, "prompt_name"),
        ({"input_type": "haiku"}, "input_type"),
        ({"late_chunking": True}, "late_chunking"),
        ({"chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"model": 5}, "model"),
    ]
    return [
        *(_wrong(path, valid, {"input": value}, param) for value, param in inputs),
        *(_wrong(path, valid, values, param) for values, param in fields),
        _wrong(path, valid, {"model": "no-such-model"}, "model", status=404),
        Mistake("no input", path, _json({"model": model}), "input"),
        *_broken_bodies(path, valid),
        *_broken_requests(path, valid),
    ]


def generation_mistakes(model: str, max_model_len: int) -> list[Mistake]:
    """Mistakes of requests to /v1/completions and /v1/chat/completions.

    Args:
        model: Name of a served LLM.
        max_model_len: Its limit in tokens.
    """
    path, valid = "/v1/completions", {"model": model, "prompt": "The sky is", "max_tokens": 4}
    fields: list[tuple[dict[str, Any], str]] = [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [10**9]}, "prompt[0]"),
        ({"prompt": [5, -1]}, "prompt[1]"),
        ({"prompt": [5] * (max_model_len + 1)}, "prompt"),
        ({"prompt": "kite " * (3 * max_model_len)}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids[0]"),
        ({"logit_bias": {"1000000000": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias[...]"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": "yes"}, "stream"),
        ({"use_beam_search": True}, "use_beam_search"),
    ]
    chat_path = "/v1/chat/completions"
    chat = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    chat_fields: list[tuple[dict[str, Any], str]] = [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"content": "Hi"}]}, "messages[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
    ]
    return [
        *(_wrong(path, valid, values, param) for values, param in fields),
        *(_wrong(chat_path, chat, values, param) for values, param in chat_fields),
        *_broken_bodies(chat_path, chat),
        *_broken_requests(path, valid),
    ]


def _broken_bodies(path: str, valid: Mapping[str, Any]) -> Iterable[Mistake]:
    """Bodies that are not JSON, or not the JSON of an object."""
    good = _json(valid)
    open_end = good[:-1]
    bodies = {
        "an empty body": b"",
        "no JSON": b"a red kite",
        "JSON that is cut off": good[:-5],
        "something behind the JSON": good + b" x",
        "an array instead of an object": b"[" + good + b"]",
        "null": b"null",
        "a string": b'"input"',
        "UTF-16": good.decode().encode("utf-16"),
        "bad UTF-8 in a field": open_end + b', "user": "\xff\xfe"}',
        "bad UTF-8 in an unknown field": open_end + b', "x": "\xc3\x28"}',
        "half of a surrogate pair": open_end + rb', "user": "\ud83d end"}',
        "a raw line feed in a string": open_end + b', "user": "a\nb"}',
        "NaN": open_end + b', "x": NaN}',
        "single quotes": good.replace(b'"', b"'"),
        "a comment": b"/* hello */" + good,
        "a deep unknown field": open_end + b', "x": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        "deep and never closed": b'{"input": ' + b"[" * DEEP,
        "deep objects": open_end + b', "x": ' + b'{"a":' * DEEP + b"1" + b"}" * (DEEP + 1),
    }
    for name, body in bodies.items():
        yield Mistake(name, path, body)
    yield Mistake("a key twice", path, open_end + b', "user": "a", "user": "b"}', "user")


def _broken_requests(path: str, valid: Mapping[str, Any]) -> Iterable[Mistake]:
    """Requests that are wrong outside their body."""
    good = _json(valid)
    unsupported = {
        "plain text": {"Content-Type": "text/plain"},
        "a form": {"Content-Type": "application/x-www-form-urlencoded"},
        "another charset": {"Content-Type": "application/json; charset=utf-16"},
        "a compressed body": {**JSON_TYPE, "Content-Encoding": "gzip"},
    }
    for name, headers in unsupported.items():
        yield Mistake(name, path, good, status=415, headers=headers)
    yield Mistake("a wrong method", path, method="GET", status=405, headers={})
    yield Mistake("an unknown route", path + "/more", good, status=404)
    yield Mistake("a huge body", path, b" " * MAX_BODY + good, status=413, costly=True)


def _wrong(
    path: str, valid: Mapping[str, Any], change: dict[str, Any], param: str, status: int = 400
) -> Mistake:
    name = f"{path} {json.dumps(change)[:60]}"
    return Mistake(name, path, _json({**valid, **change}), param, status)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
