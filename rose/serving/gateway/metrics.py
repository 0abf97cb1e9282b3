"""Numbers for Prometheus. Each gateway has a registry of its own."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rose.serving.gateway.generation_metrics import GenerationMetrics
from rose.serving.gateway.models import ModelTable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MODEL = ["model"]
_ENGINE_NUMBERS: dict[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str]] = {
    "ready": (GaugeMetricFamily, "Engines (replicas) that take work."),
    "requests_running": (GaugeMetricFamily, "Requests being computed."),
    "requests_queued": (GaugeMetricFamily, "Requests that no step has begun with."),
    "tokens_queued": (GaugeMetricFamily, "Tokens in the queue."),
    "steps": (CounterMetricFamily, "Batches computed."),
    "tokens": (CounterMetricFamily, "Tokens computed."),
    "sequences_running": (GaugeMetricFamily, "Sequences being generated."),
    "sequences_waiting": (GaugeMetricFamily, "Sequences that wait for pages or a place."),
    "kv_pages_used": (GaugeMetricFamily, "KV pages that sequences hold."),
    "kv_pages_total": (GaugeMetricFamily, "KV pages that there are."),
    "prefix_hit_tokens": (CounterMetricFamily, "Prompt tokens found in the prefix cache."),
    "preemptions": (CounterMetricFamily, "Sequences that gave up their pages for a while."),
    "graph_hits": (CounterMetricFamily, "Batches that replayed a device graph."),
    "graph_captures": (CounterMetricFamily, "Device graphs captured."),
    "graph_evictions": (CounterMetricFamily, "Device graphs that made room for others."),
    "padding_tokens": (CounterMetricFamily, "Tokens computed to fill up device graphs."),
}
# Counting much in a row is quicker than between other work, whose data and code push that of the
# metrics out of the caches.
COUNTS_IN_A_ROW = 48
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Metrics:
    """What a gateway counts."""

    def __init__(self, table: ModelTable) -> None:
        self.registry = registry = CollectorRegistry()
        self._waiting: list[Callable[[], None]] = []
        self.requests = Counter(
            "rose_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "rose_request_seconds",
            "Time from a request's arrival to its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "rose_requests_in_flight", "Requests being served.", registry=registry
        )
        self.disconnects = Counter(
            "rose_disconnects",
            "Clients that left before their answer.",
            ["route"],
            registry=registry,
        )
        self.tokens = Counter(
            "rose_prompt_tokens", "Tokens fed to models.", ["model"], registry=registry
        )
        self.truncated = Counter(
            "rose_truncated_tokens",
            "Tokens cut off too long input.",
            ["model"],
            registry=registry,
        )
        self.batch_size = Histogram(
            "rose_request_batch_size",
            "Texts in a request.",
            ["model"],
            buckets=_COUNTS,
            registry=registry,
        )
        self.tokenize_seconds = self._seconds("tokenize", "Time a request was tokenised.")
        self.queue_seconds = self._seconds("queue", "Time a request waited at the engine.")
        self.compute_seconds = self._seconds("compute", "Time a request was computed.")
        self.generation = GenerationMetrics(registry)
        registry.register(_Engines(table))

    def later(self, count: Callable[[], None]) -> None:
        """Counts once there is much to count, or somebody asks for the numbers."""
        self._waiting.append(count)
        if len(self._waiting) % COUNTS_IN_A_ROW == 0:
            asyncio.get_running_loop().call_soon(self._catch_up)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Counts an answer."""
        self.requests.labels(route, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def fed(
        self,
        model: str,
        texts: int,
        tokens: int,
        truncated: int,
        queued_s: float,
        computed_s: float,
    ) -> None:
        """Counts texts that an engine has computed for one request."""
        self.tokens.labels(model).inc(tokens)
        self.truncated.labels(model).inc(truncated)
        self.batch_size.labels(model).observe(texts)
        self.queue_seconds.labels(model).observe(queued_s)
        self.compute_seconds.labels(model).observe(computed_s)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        self._catch_up()
        return generate_latest(self.registry)

    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, []
        for count in waiting:
            count()

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"rose_{name}_seconds", text, ["model"], buckets=_SECONDS, registry=self.registry
        )


class _Engines:
    """What the engines last said of themselves, asked when somebody looks."""

    def __init__(self, table: ModelTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("rose_model_ready", "1 if its engine takes work.", labels=_MODEL)
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: kind(f"rose_engine_{name}", text, labels=_MODEL)
            for name, (kind, text) in _ENGINE_NUMBERS.items()
        }
        for model in self._table:
            ready.add_metric([model.name], float(model.client.ready))
            stats = msgspec.structs.asdict(model.client.stats)
            for name, family in families.items():
                family.add_metric([model.name], float(stats[name]))
        yield from (ready, *families.values())

    def describe(self) -> Iterable[Metric]:
        return ()
