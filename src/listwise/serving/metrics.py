"""Metrics of a server for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SCORES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
FIRST = 10
"""Marks of results up to this place are counted apart."""
REASONS = {
    400: "bad_input",
    401: "token",
    403: "forbidden",
    408: "slow_upload",
    413: "too_large",
    429: "too_many",
    503: "queue_full",
    504: "too_slow",
}


class Metrics:
    """Metrics of one server; `text` returns them in the format of Prometheus."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "listwise_requests",
            "Requests answered",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "listwise_request_seconds",
            "Time from the header of a request to the end of its answer",
            ("route",),
            buckets=SECONDS,
            registry=self._registry,
        )
        self._rejected = Counter(
            "listwise_rejected", "Requests refused", ("reason",), registry=self._registry
        )
        self._batches = Histogram(
            "listwise_batch_size",
            "Photos of searches that the network got together",
            buckets=(1, 2, 4, 8, 16, 32),
            registry=self._registry,
        )

        self._scores = Histogram(
            "listwise_first_score",
            "Score of the first result of a search; its change over time shows drift",
            buckets=SCORES,
            registry=self._registry,
        )

        self._marks = self._marks_by_kind("listwise_marks", "Marks stored")
        self._first_marks = self._marks_by_kind(
            "listwise_first_marks", "Marks stored of results that were among the first ten"
        )
        self._undone = Counter("listwise_undone_marks", "Marks undone", registry=self._registry)

    def _marks_by_kind(self, name: str, description: str) -> Counter:
        counter = Counter(name, description, ("kind",), registry=self._registry)
        for kind in ("same", "different"):
            counter.labels(kind)  # rates need the zero before the first mark
        return counter

    def watch(self, name: str, description: str, value: Callable[[], float]) -> None:
        """Add a metric whose value a function returns."""
        Gauge(f"listwise_{name}", description, registry=self._registry).set_function(value)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if status in REASONS:
            self._rejected.labels(REASONS[status]).inc()

    def batch(self, size: int) -> None:
        """Count a batch of photos."""
        self._batches.observe(size)

    def searched(self, score: float) -> None:
        """Count a search by the score of its first result."""
        self._scores.observe(score)

    def marked(self, same: bool, rank: int | None) -> None:
        """Count a stored mark of a result, with its place from 1."""
        kind = "same" if same else "different"
        self._marks.labels(kind).inc()
        if rank is not None and rank <= FIRST:
            self._first_marks.labels(kind).inc()

    def unmarked(self, count: int) -> None:
        """Count marks that were undone."""
        self._undone.inc(count)

    def text(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self._registry)
