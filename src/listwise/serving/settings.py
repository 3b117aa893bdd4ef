"""What a server allows, and to whom."""

import ipaddress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class Limits(BaseModel):
    """How much a server takes on; what is more is refused, never queued without end.

    `pixels` counts those a photo's header declares; `seconds` is the time from a request's last
    byte to its answer, `upload_seconds` that from its first byte to its last; `waiting` counts
    queries, `held_bytes` those of all uploads at one time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    upload_bytes: int = Field(20_000_000, ge=1)
    pixels: int = Field(50_000_000, ge=1)
    photos: int = Field(8, ge=1)
    results: int = Field(1000, ge=1)
    seconds: float = Field(10.0, gt=0)
    upload_seconds: float = Field(60.0, gt=0)
    waiting: int = Field(64, ge=0)
    batch: int = Field(16, ge=1)
    held_bytes: int = Field(512_000_000, ge=1)

    @property
    def body_bytes(self) -> int:
        """Bytes of a whole request at most: its photos, and as much text as it needs."""
        return self.photos * self.upload_bytes + 256_000


class ServeSettings(BaseModel):
    """How an index is served.

    Without a `token` nothing can be written; a host that is not this machine itself needs one for
    every request. Added photos are stored in the folder `uploads`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    token: SecretStr | None = None
    uploads: Path | None = None
    limits: Limits = Limits()

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def can_write(self) -> bool:
        """Whether photos can be added."""
        return self.token is not None and self.uploads is not None


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, out of others' reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
