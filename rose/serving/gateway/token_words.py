"""How log-probabilities name tokens."""

from rose.serving.gateway.choice import floored
from rose.serving.gateway.detokenization import TokenTable
from rose.serving.gateway.generation_schemas import ChatLogprobs, ChosenLogprob, TokenLogprob
from rose.serving.protocol import TokenLogprobs


def chat_logprobs(table: TokenTable, entries: list[TokenLogprobs], top: int) -> ChatLogprobs:
    """Entries in the form of chat completions, each with `top` likely tokens."""
    return ChatLogprobs(content=[_chosen(table, entry, top) for entry in entries])


def likely(table: TokenTable, entry: TokenLogprobs) -> dict[str, float]:
    """The likely tokens at a place and the chosen one; of those that read alike the likelier."""
    found: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        found.setdefault(word(table, token_id), floored(logprob))
    found.setdefault(word(table, entry.token_id), floored(entry.logprob))
    return found


def word(table: TokenTable, token_id: int) -> str:
    r"""A token as text; one that is no text by itself as `bytes:\xe2\x80`."""
    raw = table.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chosen(table: TokenTable, entry: TokenLogprobs, top: int) -> ChosenLogprob:
    pairs = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
    raw = table.token_bytes(entry.token_id)
    return ChosenLogprob(
        token=raw.decode(errors="replace"),
        logprob=floored(entry.logprob),
        bytes=list(raw),
        top_logprobs=[_token(table, *pair) for pair in pairs],
    )


def _token(table: TokenTable, token_id: int, logprob: float) -> TokenLogprob:
    raw = table.token_bytes(token_id)
    text = raw.decode(errors="replace")
    return TokenLogprob(token=text, logprob=floored(logprob), bytes=list(raw))
