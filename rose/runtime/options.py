"""Options of a request, as the wire carries them and the runtimes read them. Free of torch."""

from typing import Literal, get_args

import msgspec

OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
OUTPUT_DTYPES: tuple[str, ...] = get_args(OutputDtype)

Priority = Literal["online", "bulk"]


class EmbedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the vectors of one request are finished: cut, normalise, quantise, in this order.

    `dimensions` None is the full width; `normalize` None is what the checkpoint says.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    output_dtype: OutputDtype = "float32"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one sequence are chosen, and when it ends. Token ids only, no text.

    The steps, in this order and in float32: repetition penalty (tokens of prompt and output),
    presence and frequency penalty (tokens of the output), `logit_bias`, the banned end tokens while
    fewer than `min_tokens` are out, the mask of `grammar`; then temperature, top_k, top_p, min_p.

    Attributes:
        max_tokens: new tokens at most; None is up to the model's length.
        temperature: 0 takes the most likely token.
        top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
        logit_bias: is added to the logits of these ids; -100 or less bans them.
        seed: the same seed gives the same tokens whatever else runs; None draws a fresh one.
        stop_token_ids: end tokens beside those of the checkpoint; the token that ends is the last.
        ignore_eos: go on past the checkpoint's end tokens; one still ends a complete `grammar`.
        logprobs: log-probabilities of that many most likely tokens beside the chosen one's;
            None is none at all. They are the model's own, before all of these steps.
        prompt_logprobs: the same for the tokens of the prompt.
        grammar: a JSON schema (as text) that the output has to follow; "{}" is any JSON value.
        cache_salt: prefixes are only found again by requests of the same salt.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    cache_salt: str = ""
