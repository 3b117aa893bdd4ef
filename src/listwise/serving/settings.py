"""Settings of a server: its limits, and who may use it."""

import ipaddress
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from listwise.servers import new_instance

MAX_SIDE = 1024
"""Long side that photos are reduced to where the index has no maximum of its own."""

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+))(?::\d{1,5})?", re.IGNORECASE | re.ASCII)


class Limits(BaseModel):
    """Limits of a server; requests that exceed one are refused.

    Attributes:
        upload_bytes: bytes of a photo.
        pixels: pixels that the header of a photo declares, and pixels of all photos that are
            decoded at one time.
        max_side: long side in pixels that the network gets; larger photos are reduced. By default
            the index's own `max_side`, or 1024 if it has none.
        photos: photos of a request.
        results: results of a search.
        seconds: time from the last byte of a request to its answer.
        upload_seconds: time to receive the body of a request.
        header_seconds: time to receive the header of a request.
        read_seconds: time for a client to read an answer that is ready.
        waiting: requests in a queue.
        batch: photos that the network gets together.
        held_bytes: bytes of all uploads in memory.
        per_address: requests of one address at one time.
        connections: open connections.
        connections_per_address: open connections of one address.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    upload_bytes: int = Field(20_000_000, ge=1)
    pixels: int = Field(50_000_000, ge=1)
    max_side: int | None = Field(None, ge=16)
    photos: int = Field(8, ge=1)
    results: int = Field(1000, ge=1)
    seconds: float = Field(10.0, gt=0)
    upload_seconds: float = Field(60.0, gt=0)
    header_seconds: float = Field(10.0, gt=0)
    read_seconds: float = Field(30.0, gt=0)
    waiting: int = Field(64, ge=0)
    batch: int = Field(16, ge=1)
    held_bytes: int = Field(512_000_000, ge=1)
    per_address: int = Field(48, ge=1)
    connections: int = Field(512, ge=2)
    connections_per_address: int = Field(128, ge=1)

    @property
    def body_bytes(self) -> int:
        """Maximum bytes of a whole request: its photos and its text fields."""
        return self.photos * self.upload_bytes + 256_000

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
    instance: str = Field(default_factory=new_instance)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def can_write(self) -> bool:
        """Whether clients can add photos."""
        return self.token is not None and self.uploads is not None


def is_loopback(host: str) -> bool:
    """Whether a name or address belongs to this machine and cannot be reached from others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(header: str) -> str | None:
    """The host in a `Host` header without brackets and port; None if the header is malformed."""
    found = _HOST.fullmatch(header)
    return None if found is None else found[1] or found[2]
