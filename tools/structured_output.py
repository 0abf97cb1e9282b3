#!/usr/bin/env python3
"""Ask a server for JSON under schemas at temperature 1, and check every answer.

Each prompt asks for something about a text; the answer has to be JSON that `jsonschema` finds
valid. Temperature 1 and a small model make sure that the grammar, and not the model, is tested.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from rich.progress import Progress

from tools.load_test import loopback_url
from tools.report import MODELS, Report, add_output_options
from tools.server import RunningServer, serve
from tools.texts import mixed_texts

MAX_TOKENS = 768  # more than the largest value of any schema below
ANSWER_LIMIT_S = 300

Schema = dict[str, Any]


def _text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Schema] = {
    "object": _object(title=_text(30), language=_text(12), words={"type": "integer"}),
    "enum": _object(
        mood={"enum": ["glad", "sad", "neutral", None]}, sure={"type": "boolean"}, kind={"const": 1}
    ),
    "numbers": _object(
        score={"type": "number", "minimum": 0, "maximum": 1},
        stars={"type": "integer", "minimum": 1, "maximum": 5},
    ),
    "array": {"type": "array", "items": _text(12), "minItems": 2, "maxItems": 5},
    "nested": _object(
        people={
            "type": "array",
            "maxItems": 3,
            "items": _object(name=_text(16), age={"type": ["integer", "null"], "maximum": 120}),
        }
    ),
    "any_of": {"anyOf": [_object(city=_text(16)), _object(year={"type": "integer"})]},
    "definitions": {
        "$defs": {
            "place": _object(name=_text(16), code={"type": "string", "pattern": "^[A-Z]{3}$"})
        },
        **_object(start={"$ref": "#/$defs/place"}, end={"$ref": "#/$defs/place"}),
    },
    "date": _object(day={"type": "string", "format": "date"}, note=_text(20)),
    "optional": {
        "type": "object",
        "properties": {"a": _text(8), "b": {"type": "integer"}, "ä 😀": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


async def ask(http: httpx.AsyncClient, model: str, number: int, text: str) -> tuple[str, str]:
    """Ask for one answer; return the name of its schema, and what is wrong, "" if nothing is."""
    name = list(SCHEMAS)[number % len(SCHEMAS)]
    form = {"name": name, "strict": True, "schema": SCHEMAS[name]}
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Describe this text as JSON: {text}"}],
        "response_format": {"type": "json_schema", "json_schema": form},
        "temperature": 1,
        "seed": number,
        "max_tokens": MAX_TOKENS,
    }
    answer = await http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return name, f"status {answer.status_code}: {answer.text[:200]}"
    choice = answer.json()["choices"][0]
    return name, fault_of(SCHEMAS[name], choice["message"]["content"], choice["finish_reason"])


def fault_of(schema: Schema, content: str, finish: str) -> str:
    """Say what is wrong with an answer; "" if nothing is."""
    if finish != "stop":
        return f"ends by {finish}: {content[-200:]!r}"
    try:
        value = json.loads(content)
    except ValueError as error:
        return f"is no JSON ({error}): {content!r}"
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return "; ".join(f"{error.message} in {content!r}" for error in checker.iter_errors(value))


async def run(
    url: str, model: str, prompts: int, clients: int, seed: int, progress: Progress
) -> list[tuple[str, str]]:
    """Ask `prompts` times, `clients` at once."""
    texts = mixed_texts(prompts, seed, most_words=60)
    places = asyncio.Semaphore(clients)
    task = progress.add_task("JSON under schemas", total=prompts)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_LIMIT_S) as http:

        async def one(number: int, text: str) -> tuple[str, str]:
            async with places:
                found = await ask(http, model, number, text)
            progress.advance(task)
            return found

        return await asyncio.gather(*(one(i, text) for i, text in enumerate(texts)))


def main() -> int:
    """Run the tool."""
    options = _options()
    report = Report(
        "structured_output",
        "Structured output",
        f"{options.prompts} chats at temperature 1, each with one of {len(SCHEMAS)} JSON schemas "
        f"as `response_format`, {options.clients} at once. Every answer is parsed, and validated "
        "with jsonschema.",
    )
    with _server(options) as server, Progress(transient=True) as progress:
        began = time.monotonic()
        found = asyncio.run(
            run(server.url, options.llm, options.prompts, options.clients, options.seed, progress)
        )
        report.data["seconds"] = time.monotonic() - began
        troubles = server.troubles()
    faults = [f"{name}: {fault}" for name, fault in found if fault]
    print(*faults[:20], sep="\n", file=sys.stderr)
    report.check("answers that do not follow their schema", len(faults), "0", not faults)
    report.check("lines of trouble in the log", len(troubles), "0", not troubles)
    asked = Counter(name for name, _ in found)
    wrong = Counter(name for name, fault in found if fault)
    rows = [[name, count, count - wrong[name]] for name, count in asked.items()]
    report.table("answers by schema", ["schema", "asked", "valid"], rows)
    return report.finish(options)


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[RunningServer]:
    if options.url:
        yield RunningServer(options.url)
        return
    with serve([options.models / options.llm]) as server:
        yield server


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", type=loopback_url, help="ask this server instead of starting one")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models' folders")
    parser.add_argument("--llm", default="SmolLM2-135M-Instruct", help="name of the LLM to ask")
    parser.add_argument("--prompts", "-n", type=int, default=100)
    parser.add_argument("--clients", "-c", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
