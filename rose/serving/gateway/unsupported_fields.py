"""Fields of other servers' APIs that would change what is generated, and are not supported.

To ignore them would be to answer another question than was asked.
"""

from typing import Annotated, Any

from msgspec import Meta

from rose.serving.gateway.schemas import Request

_NotSupported = Annotated[Any, Meta(description="Not supported.")]

# Values that ask for nothing, beside null, false and what is empty.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "dry_multiplier": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (-1,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (0, 1),
    "penalty_alpha": (0,),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "typical_p": (0, 1),
    "xtc_probability": (0,),
}

# What is the same here by another name.
INSTEAD = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}


class UnsupportedFields(Request, kw_only=True):
    """What every request for text may hold, but not ask for."""

    use_beam_search: _NotSupported = None
    truncate_prompt_tokens: _NotSupported = None
    prompt_logprobs: _NotSupported = None
    guided_json: _NotSupported = None
    guided_regex: _NotSupported = None
    guided_choice: _NotSupported = None
    guided_grammar: _NotSupported = None
    structured_outputs: _NotSupported = None
    bad_words: _NotSupported = None
    logits_processors: _NotSupported = None
    allowed_token_ids: _NotSupported = None
    custom_logit_processor: _NotSupported = None
    dry_multiplier: _NotSupported = None
    ebnf: _NotSupported = None
    epsilon_cutoff: _NotSupported = None
    eta_cutoff: _NotSupported = None
    grammar: _NotSupported = None
    json_schema: _NotSupported = None
    max_new_tokens: _NotSupported = None
    min_new_tokens: _NotSupported = None
    mirostat: _NotSupported = None
    n_predict: _NotSupported = None
    no_repeat_ngram_size: _NotSupported = None
    num_beams: _NotSupported = None
    penalty_alpha: _NotSupported = None
    regex: _NotSupported = None
    repeat_penalty: _NotSupported = None
    stop_regex: _NotSupported = None
    stop_sequences: _NotSupported = None
    structural_tag: _NotSupported = None
    tfs_z: _NotSupported = None
    top_a: _NotSupported = None
    typical_p: _NotSupported = None
    xtc_probability: _NotSupported = None


UNSUPPORTED = tuple(
    name for name in UnsupportedFields.__struct_fields__ if name not in Request.__struct_fields__
)


def asks(name: str, value: object) -> bool:
    """Whether a field asks for anything. An empty object does, and so do 0 log-probabilities."""
    return value is not False and value not in (None, "", [], *_NEUTRAL.get(name, ()))
