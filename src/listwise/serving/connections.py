"""Connections with time limits: clients that send or read slowly are disconnected."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from listwise.serving.settings import Limits

# Time for a refused client to read its answer while it still sends a body.
LINGER_SECONDS = 2.0
# Bodies up to this many bytes are read to the end, so that the connection can be used again.
SHORT_BODY = 65536


def bounded_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class that a uvicorn server with these limits uses for its connections."""

    class Protocol(BoundedProtocol):
        pass

    Protocol.limits = limits
    Protocol.by_address = Counter()
    return Protocol


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP connection with limits of its own.

    - The header of a request has to arrive within `limits.header_seconds`.
    - When a request is answered before its body has arrived, the answer announces that the
      connection will be closed, and the rest of the body is discarded. Short bodies are read to the
      end instead.
    - A client that does not read its answer within `limits.read_seconds` is disconnected.
    - When there are too many connections, in total or of one address, the oldest one without a
      request is closed, so that new clients are always answered.
    """

    limits = Limits()
    by_address: ClassVar[Counter[str]] = Counter()
    """Number of connections of each address, including those that are being closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answer = self.app
        self.app = self._announcing
        self.opened = time.monotonic()
        self.refused = False
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def closed(self) -> bool:
        """Whether the socket is closed; it is still open while a refused client lingers."""
        return self._wire.is_closing()

    @property
    def address(self) -> str:
        """Address of the client."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first header."""
        self._wire = transport
        # Header and body of an answer are two pieces. Without this option the system holds the
        # second back until the client confirms the first, which takes 40 ms. asyncio only sets it
        # on sockets that were created with the number of the protocol.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(_Closing(transport, self))  # type: ignore[arg-type]
        self._start("header", self.limits.header_seconds, self._end)
        self.by_address[self.address] += 1
        # Counting all open connections takes long; these numbers are never too low.
        many = self.by_address[self.address] > self.limits.connections_per_address
        if many or len(self.connections) > self.limits.connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all time limits."""
        for name in list(self._timers):
            self._stop(name)
        self.by_address[self.address] -= 1
        if not self.by_address[self.address]:
            del self.by_address[self.address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a piece of a request."""
        if self.refused:
            return
        super().data_received(data)
        if not self.idle:
            self._stop("header")
        elif "header" not in self._timers:
            self._start("header", self.limits.header_seconds, self._end)

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request and close the connection.

        If its beginning was well-formed, it may already be processed or answered: work on it stops.
        """
        if not self.idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    async def _announcing(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; say so if the connection will be closed after it."""

        async def sending(message: Any) -> None:
            early = self.conn.their_state is h11.SEND_BODY and not self._has_short_body()
            if message["type"] == "http.response.start" and early:
                message = message | {"headers": [*message["headers"], CLOSE_HEADER]}
            await send(message)

        await self._answer(scope, receive, sending)

    def linger(self) -> bool:
        """Before closing: whether the client still sends, so that it needs time to read its answer.

        Closing immediately would make the client's system discard the answer.
        """
        if self.refused or self.conn.their_state is not h11.SEND_BODY or not self.idle:
            return self.refused
        self.refused = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._start("linger", LINGER_SECONDS, self.transport.abort)
        return True

    def _has_short_body(self) -> bool:
        """Whether the request declares a body of at most SHORT_BODY bytes."""
        length = dict(self.cycle.scope["headers"]).get(b"content-length")
        return length is not None and int(length) <= SHORT_BODY

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no further request arrives."""
        self._end()

    def pause_writing(self) -> None:
        """Start the time limit for a client that does not read."""
        super().pause_writing()
        self._start("read", self.limits.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the time limit for a client that does not read."""
        super().resume_writing()
        self._stop("read")

    def _make_room(self) -> None:
        """Close the oldest idle connections while there are too many."""
        open_now = [
            each
            for each in self.connections
            if isinstance(each, BoundedProtocol) and not each.closed
        ]
        counts = Counter(each.address for each in open_now)
        crowded = self.address
        if counts[crowded] <= self.limits.connections_per_address:
            if len(open_now) <= self.limits.connections:
                return
            crowded = counts.most_common(1)[0][0]
        idle = [each for each in open_now if each.address == crowded and each.idle]
        oldest = min(idle, key=lambda each: each.opened, default=self)
        oldest.transport.abort()

    def _end(self) -> None:
        """Close the connection; at the latest when the client has had time to read its answer."""
        if not self.transport.is_closing():
            self.transport.close()
            self._start("read", self.limits.read_seconds, self.transport.abort)

    def _start(self, name: str, seconds: float, action: Callable[[], object]) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, action)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


class _Closing:
    """A transport that closes when its client has had time to read the last answer."""

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is read or written."""
        return self._protocol.refused or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection, immediately unless the client still sends."""
        if self._transport.is_closing() or not self._protocol.linger():
            self._transport.close()
