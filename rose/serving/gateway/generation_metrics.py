"""Numbers of generated text, for Prometheus."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

_FIRST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)


class GenerationMetrics:
    """What a gateway counts of the choices that it delivers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tokens = Counter(
            "rose_generated_tokens", "Tokens generated.", ["model"], registry=registry
        )
        self.first_token_seconds = Histogram(
            "rose_time_to_first_token_seconds",
            "Time from a request's arrival to the first token of a choice.",
            ["model"],
            buckets=_FIRST_SECONDS,
            registry=registry,
        )
        self.token_seconds = Histogram(
            "rose_time_per_output_token_seconds",
            "Mean time between the tokens of a choice after its first.",
            ["model"],
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

    def count(self, model: str, tokens: int, arrived: float, started: float) -> None:
        """Counts a choice that has just ended, whatever ended it.

        Args:
            tokens: Of its output.
            arrived: When the request came, on the clock of `time.perf_counter`.
            started: When the first token came.
        """
        if not tokens:
            return
        self.tokens.labels(model).inc(tokens)
        self.first_token_seconds.labels(model).observe(started - arrived)
        if tokens > 1:
            spent = time.perf_counter() - started
            self.token_seconds.labels(model).observe(spent / (tokens - 1))
