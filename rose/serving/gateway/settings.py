"""What an operator can set about a gateway."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings of a gateway; every default is right for a first try on one machine.

    Attributes:
        api_keys: Bearer keys that are let in; empty: everybody is.
        public_metrics: Whether /metrics answers without a key.
        public_docs: Whether /docs and /openapi.json answer without a key.
        cors_origins: Origins whose pages may use the API; "*" is every one.
        max_body_bytes: Largest request body.
        max_body_bytes_in_flight: Sum of what has come of the bodies being served at one time.
        max_inputs: Most texts of one request.
        max_concurrent_requests: Requests with a body that are served at one time.
        body_timeout_s: Time for a body to arrive.
        request_timeout_s: Time for an answer; None is for ever.
        tokenizer_threads: Threads that parse, tokenise and encode; large bodies have half as many
            of their own, so that small ones do not wait for them.
        max_tokenize_chars: Longest text that /tokenize takes (an eighth of it with places of
            tokens), and most token ids that become text.
        strict_dimensions: Whether `dimensions` is refused for a model that does not declare
            Matryoshka training (and, for one that does, every width that it does not list).
        truncate: Whether input that is too long is cut when the request does not say.
        rank_by_cosine: Whether embedders answer /v1/rerank and /v1/score, by the cosine of their
            vectors.
        log_requests: Whether each request writes a line at INFO.
    """

    api_keys: tuple[str, ...] = ()
    public_metrics: bool = False
    public_docs: bool = False
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_body_bytes_in_flight: int = 512 << 20
    max_inputs: int = 2048
    max_concurrent_requests: int = 1024
    body_timeout_s: float = 60.0
    request_timeout_s: float | None = 600.0
    tokenizer_threads: int = max(2, min(8, os.cpu_count() or 2))
    max_tokenize_chars: int = 2 << 20
    strict_dimensions: bool = False
    truncate: bool = False
    rank_by_cosine: bool = False
    log_requests: bool = False
