"""Checks of every request, security headers of every response, and the metrics of a server."""

import logging
import re
import secrets
import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse
from h11 import LocalProtocolError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from listwise.serving.server import ServeSettings

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# Names of this machine in the header `Host`.
LOCAL_HOST = re.compile(
    r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE | re.ASCII
)
# Addresses whose requests change the index, unless they only read.
CHANGING = ("/api/entries", "/api/marks", "/api/labels")
# The answer has paths of this machine.
NAMES_FILES = "/api/marks/labels"
# Other methods count as one, so that clients cannot create any number of metrics.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
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

logger = logging.getLogger(__name__)


class Metrics:
    """Metrics of one server; `text` returns them in the format of Prometheus.

    Attributes:
        batches: photos of searches that the network got together.
        first_scores: scores of the first results.
        undone_marks: number of marks that were undone.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        count = partial(Counter, registry=self._registry)
        measure = partial(Histogram, registry=self._registry)
        self._requests = count(
            "listwise_requests", "Requests answered", ("method", "route", "status")
        )
        self._seconds = measure(
            "listwise_request_seconds",
            "Time from the header of a request to the end of its answer",
            ("route",),
            buckets=SECONDS,
        )
        self._rejected = count("listwise_rejected", "Requests refused", ("reason",))
        about = "Photos of searches that the network got together"
        self.batches = measure("listwise_batch_size", about, buckets=(1, 2, 4, 8, 16, 32))
        about = "Score of the first result of a search; its change over time shows drift"
        self.first_scores = measure("listwise_first_score", about, buckets=SCORES)
        self._marks = count("listwise_marks", "Marks stored", ("kind",))
        about = "Marks stored of results that were among the first ten"
        self._first_marks = count("listwise_first_marks", about, ("kind",))
        self.undone_marks = count("listwise_undone_marks", "Marks undone")
        for kind in ("same", "different"):  # rates need the zero before the first mark
            self._marks.labels(kind)
            self._first_marks.labels(kind)

    def watch(self, name: str, description: str, value: Callable[[], float]) -> None:
        """Add a metric whose value a function returns."""
        Gauge(f"listwise_{name}", description, registry=self._registry).set_function(value)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if status in REASONS:
            self._rejected.labels(REASONS[status]).inc()

    def marked(self, same: bool, rank: int | None) -> None:
        """Count a stored mark of a result, with its place from 1."""
        kind = "same" if same else "different"
        self._marks.labels(kind).inc()
        if rank is not None and rank <= FIRST:
            self._first_marks.labels(kind).inc()

    def text(self) -> bytes:
        """All metrics in the text format."""
        return generate_latest(self._registry)


class Guard:
    """ASGI middleware that refuses requests that are not allowed."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self._open: Counts[str] = Counts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        address = scope["client"][0] if scope["client"] else ""
        counted = scope["path"].startswith("/api/")
        self._open[address] += counted
        try:
            refusal = self._refusal(scope, address)
            await (refusal or self.app)(scope, receive, sending)
        except LocalProtocolError:  # uvicorn has refused a malformed body already
            status = 400
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                failed = failure(500, "the server failed: its log has the reason")
                await failed(scope, receive, sending)
        finally:
            self._open[address] -= counted
            self._open = +self._open  # without addresses that have no request
            seconds = time.perf_counter() - started
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.answered(method, _route(scope), status or 500, seconds)

    def _refusal(self, scope: Scope, address: str) -> JSONResponse | None:
        headers = Headers(scope=scope)
        path, reading = scope["path"], scope["method"] in ("GET", "HEAD")
        # An attacker's DNS server could give this machine's address to the name of his page.
        if self.settings.local and not LOCAL_HOST.fullmatch(headers.get("host", "")):
            return failure(403, "this server only accepts requests to localhost or 127.0.0.1")
        if self._open[address] > self.settings.limits.per_address:
            reason = "too many requests at the same time from your address: try again in a second"
            return failure(429, reason, {"Retry-After": "1"})
        elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if path.startswith("/api/") and elsewhere:
            return failure(403, "pages of other sites cannot use this server")
        writing = path.startswith(CHANGING) and not reading
        named = path == NAMES_FILES
        if (writing or named) and self.settings.token is None:
            what = "change the index" if writing else "read labels, which contain paths of photos"
            how = "start listwise serve with --edit, --token or LISTWISE_TOKEN"
            return failure(403, f"cannot {what}, because the server has no token: {how}")
        private = not self.settings.local and (path.startswith("/api/") or path == "/metrics")
        if (writing or named or private) and not self._has_token(headers):
            reason = "a token is required: send the header Authorization: Bearer TOKEN"
            return failure(401, reason, {"WWW-Authenticate": "Bearer"})
        return None

    def _has_token(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if self.settings.token is None or kind.lower() != "bearer":
            return False
        wanted = self.settings.token.get_secret_value()
        return secrets.compare_digest(given.strip().encode("latin-1"), wanted.encode())


def failure(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that fails: one line in JSON."""
    return JSONResponse({"error": " ".join(reason.split())}, status, headers)


def _route(scope: Scope) -> str:
    if scope["path"].startswith("/static/"):
        return "/static/{name}"
    route: Any = scope.get("route")
    return getattr(route, "path", "other")
