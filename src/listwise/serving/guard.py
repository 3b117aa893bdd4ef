"""Checks of every request, security headers of every response, and metrics."""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from listwise.serving.batching import QueueFullError
from listwise.serving.metrics import Metrics
from listwise.serving.settings import ServeSettings, host_name, is_loopback

CONTENT_POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# Addresses whose requests change the index, unless they only read.
CHANGING = ("/api/entries", "/api/marks", "/api/labels")
# The answer has paths of this machine.
NAMES_FILES = "/api/marks/labels"
SEARCH = "/api/search"
# A longer form of a search has photos: without them it is short, and 1,000 marked keys take 20 kB.
FIELD_BYTES = 32_768
# Other methods count as one, so that clients cannot create any number of metrics.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

logger = logging.getLogger(__name__)


class Guard:
    """ASGI middleware that refuses requests that are not allowed, and searches without room.

    `check_room` raises a `QueueFullError` if a search by photo from an address has to be refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        metrics: Metrics,
        check_room: Callable[[str], object],
    ) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics
        self._check_room = check_room
        self._open: Counter[str] = Counter()

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
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                failed = _error(500, "the server failed: its log has the reason")
                await failed(scope, receive, sending)
        finally:
            self._open[address] -= counted
            if not self._open[address]:
                del self._open[address]
            seconds = time.perf_counter() - started
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.answered(method, _route(scope), status or 500, seconds)

    def _refusal(self, scope: Scope, address: str) -> JSONResponse | None:
        headers = Headers(scope=scope)
        path, reading = scope["path"], scope["method"] in ("GET", "HEAD")
        # An attacker's DNS server could give this machine's address to the name of his page.
        host = host_name(headers.get("host", ""))
        if self.settings.local and not is_loopback(host or ""):
            return _error(403, "this server only accepts requests to localhost or 127.0.0.1")
        if host is None:
            return _error(400, "the Host header is not a host name or address")
        if self._open[address] > self.settings.limits.per_address:
            reason = "too many requests at the same time from your address: try again in a second"
            return _error(429, reason, {"Retry-After": "1"})
        elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if path.startswith("/api/") and elsewhere:
            return _error(403, "pages of other sites cannot use this server")
        writing = path.startswith(CHANGING) and not reading
        named = path == NAMES_FILES
        if (writing or named) and self.settings.token is None:
            what = "change the index" if writing else "read labels, which contain paths of photos"
            how = "start listwise serve with --token or LISTWISE_TOKEN"
            return _error(403, f"cannot {what}, because the server has no token: {how}")
        private = not self.settings.local and (path.startswith("/api/") or path == "/metrics")
        if (writing or named or private) and not self._has_token(headers):
            return _error(
                401,
                "a token is required: send the header Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )
        return self._without_room(scope, headers, address)

    def _without_room(self, scope: Scope, headers: Headers, address: str) -> JSONResponse | None:
        """Refuse a search by photo if the queue is full: here this takes the least time."""
        length = headers.get("content-length", "")
        long = length.isdecimal() and int(length) > FIELD_BYTES
        if scope["path"] == SEARCH and scope["method"] == "POST" and long:
            try:
                self._check_room(address)
            except QueueFullError as error:
                return _error(503, str(error), {"Retry-After": str(error.seconds)})
        return None

    def _has_token(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if self.settings.token is None or kind.lower() != "bearer":
            return False
        wanted = self.settings.token.get_secret_value()
        return secrets.compare_digest(given.strip().encode("latin-1"), wanted.encode())


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": reason}, status, headers)


def _route(scope: Scope) -> str:
    if scope["path"].startswith("/static/"):
        return "/static/{name}"
    if scope["path"] == SEARCH:  # a refused search has no route
        return SEARCH
    route: Any = scope.get("route")
    return getattr(route, "path", "other")
