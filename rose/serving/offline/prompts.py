"""From a row of a file to what the model continues."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rose.serving.gateway.templates import TemplateError
from rose.serving.offline.errors import InputError
from rose.serving.offline.sources import Row

if TYPE_CHECKING:
    from rose.serving.local import Engine

# What goes through the chat template: a text as the user's only message, or a list of messages;
# None continues texts as they are.
Chat = Literal["text", "messages"] | None


def make_prompt(engine: "Engine", row: Row, chat: Chat, system: str | None) -> str | list[int]:
    """Return the text, or the token ids, that the model continues.

    Raises:
        TemplateError: the row's messages are malformed, or the chat template refuses them.
    """
    if chat is None:
        return row.text
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": row.text}]
    if chat == "messages":
        messages = _read_messages(row.text)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return engine.chat_prompt(messages)


def _read_messages(text: str) -> list[Mapping[str, Any]]:
    messages = json.loads(text)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TemplateError(f"messages[{index}]: an object with a role is expected")
    return list(messages)


def read_schema(path: Path | None) -> str | None:
    """Read a JSON schema; the engine checks it.

    Raises:
        InputError: the file cannot be read.
    """
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"--json-schema: {path} is not UTF-8") from None
    except OSError as error:
        raise InputError(f"--json-schema: cannot read {path}: {error.strerror}") from None
