"""Send one HTTP request; files are read while they are sent, and never held in memory."""

import http.client
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

BLOCK = 2**18  # bytes of a file that are read at a time


@dataclass(frozen=True)
class Upload:
    """A multipart form: text fields, and image files in the field `photos`.

    A photo is a file, or the bytes of one.
    """

    fields: Mapping[str, str]
    photos: Sequence[Path | bytes]
    boundary: str

    @classmethod
    def of(cls, fields: Mapping[str, str], photos: Sequence[Path | bytes]) -> "Upload":
        """Create a form with a boundary that does not occur in a photo by chance."""
        return cls(fields, photos, secrets.token_hex(16))

    @property
    def content_type(self) -> str:
        """The value of the header `Content-Type`."""
        return f"multipart/form-data; boundary={self.boundary}"

    def size(self) -> int:
        """Return the length of the form in bytes; files are not read for it."""
        return sum(len(p) if isinstance(p, bytes) else os.path.getsize(p) for p in self._parts())

    def blocks(self) -> Iterator[bytes]:
        """Read the form block by block."""
        for part in self._parts():
            if isinstance(part, bytes):
                yield part
            else:
                with open(part, "rb") as file:
                    while block := file.read(BLOCK):
                        yield block

    def _parts(self) -> Iterator[Path | bytes]:
        start = f"--{self.boundary}\r\nContent-Disposition: form-data; name="
        for name, value in self.fields.items():
            yield f'{start}"{name}"\r\n\r\n{value}\r\n'.encode()
        for number, photo in enumerate(self.photos):
            name = str(number) if isinstance(photo, bytes) else _safe(photo.name)
            yield f'{start}"photos"; filename="{name}"\r\n\r\n'.encode(errors="surrogateescape")
            yield photo
            yield b"\r\n"
        yield f"--{self.boundary}--\r\n".encode()


@dataclass(frozen=True)
class Response:
    """The status, headers and content of an HTTP response."""

    status: int
    headers: Mapping[str, str]
    content: bytes


def send(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    upload: Upload | None = None,
    seconds: float = 60.0,
) -> Response:
    """Send a request over a connection of its own, and read the response.

    Raises:
        OSError: the server cannot be reached, or `seconds` have passed without a byte.
        http.client.HTTPException: the response is not HTTP.
    """
    address = urlsplit(url)
    secure = address.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(address.hostname or "", address.port, timeout=seconds)
    path = address.path + (f"?{address.query}" if address.query else "")
    sent = dict(headers or {})
    body = None
    if upload is not None:
        sent |= {"Content-Type": upload.content_type, "Content-Length": str(upload.size())}
        body = upload.blocks()
    try:
        try:
            connection.request(method, path, body, sent)
        except (BrokenPipeError, ConnectionResetError):
            if upload is None:
                raise
            # A server may refuse an upload before it has ended: the reason can be read.
        answer = connection.getresponse()
        return Response(answer.status, dict(answer.headers.items()), answer.read())
    finally:
        connection.close()


def _safe(name: str) -> str:
    """A file name without what would end its header."""
    return "".join("_" if c in '"\\' or ord(c) < 32 else c for c in name)
