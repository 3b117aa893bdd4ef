"""A server: its limits, who may use it, its socket, and running it until a signal arrives."""

import errno
import ipaddress
import logging
import math
import secrets
import signal
import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from listwise.data.images import MAX_PIXELS
from listwise.errors import InputError


class Limits(BaseModel):
    """Limits of a server; requests that exceed one are refused.

    Attributes:
        upload_bytes: bytes of a photo.
        pixels: pixels of a photo, and of all photos that are decoded at one time, as
            `decoding_pixels` counts them; at most `MAX_PIXELS`, the limit of all commands.
        photos: photos of a request.
        results: results of a search.
        seconds: time from the last byte of a request to its answer.
        upload_seconds: time to receive the body of a request.
        waiting: requests in a queue.
        batch: photos that the network gets together.
        held_bytes: bytes of all uploads in memory.
        per_address: requests of one address at one time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    upload_bytes: int = Field(20_000_000, ge=1)
    pixels: int = Field(MAX_PIXELS, ge=1, le=MAX_PIXELS)
    photos: int = Field(8, ge=1)
    results: int = Field(1000, ge=1)
    seconds: float = Field(10.0, gt=0)
    upload_seconds: float = Field(60.0, gt=0)
    waiting: int = Field(64, ge=0)
    batch: int = Field(16, ge=1)
    held_bytes: int = Field(512_000_000, ge=1)
    per_address: int = Field(48, ge=1)

    @property
    def waiting_reranks(self) -> int:
        """Maximum number of results that wait for re-ranking, with their decoded photos."""
        return self.waiting // 8

    @property
    def body_bytes(self) -> int:
        """Maximum bytes of a whole request: its photos and its text fields."""
        return min(self.photos * self.upload_bytes + 256_000, self.held_bytes)

    @property
    def held_bytes_per_address(self) -> int:
        """Maximum bytes of uploads of one address; it leaves room for a request of another."""
        spare = self.held_bytes - self.body_bytes
        return spare if spare >= self.body_bytes else self.held_bytes


class ServeSettings(BaseModel):
    """Settings of a server.

    Attributes:
        host: address to listen on. Any other than this machine's own requires a token for every
            request.
        token: secret that clients send to add and remove photos; without one nobody can.
        uploads: folder for photos that clients add.
        limits: limits of the server.
        instance: a random text by which the server is recognized.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    token: SecretStr | None = None
    uploads: Path | None = None
    limits: Limits = Limits()
    instance: str = Field(default_factory=lambda: secrets.token_hex(8))

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server: no others can reach its address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    @property
    def can_write(self) -> bool:
        """Whether clients can add photos."""
        return self.token is not None and self.uploads is not None


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens; port 0 chooses a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            reason = "the port is in use: choose another with `port`"
        raise InputError(f"cannot listen on {host}, port {port}: {reason}") from None
    # Header and body of an answer are two pieces. Without this option, which connections inherit,
    # the system holds the second back until the client confirms the first, which takes 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def server_config(app: FastAPI, limits: Limits) -> uvicorn.Config:
    """Settings of the uvicorn server that runs the app within its limits."""
    return uvicorn.Config(
        app,
        http="h11",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=math.ceil(limits.seconds) + 1,
    )


def run_server(app: FastAPI, listening: socket.socket, limits: Limits) -> None:
    """Serve until SIGINT or SIGTERM; running requests are completed first."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    server = uvicorn.Server(server_config(app, limits))

    def stop(*_: object) -> None:
        """Called for a signal that arrives before uvicorn handles them.

        uvicorn also raises a signal again after it has stopped, which is not an error here.
        """
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    server.run(sockets=[listening])
