"""Multipart bodies, read piece by piece within the limits."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fastapi import HTTPException, Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from listwise.serving.settings import Limits

FIELD_BYTES = 100_000
PARTS = 32  # beside the photos


class Upload(io.BytesIO):
    """An image file's content, with the name it had."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = name


@dataclass
class Form:
    """The photos and the other fields of a request."""

    photos: list[Upload] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)


@dataclass
class Held:
    """How many bytes of uploads are in memory, over all requests."""

    limit: int
    bytes: int = 0


@asynccontextmanager
async def form_of(request: Request, limits: Limits, held: Held) -> AsyncIterator[Form]:
    """The form that a request brings; its bytes count as held until the end of the context."""
    reader = _Reader(_boundary(request), limits, held)
    try:
        await _read(request, reader, limits)
        yield reader.form
    finally:
        held.bytes -= reader.held_here


async def _read(request: Request, reader: "_Reader", limits: Limits) -> None:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise _too_large("the request", limits.body_bytes)
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for piece in request.stream():
                reader.take(piece)
    except TimeoutError:
        raise HTTPException(408, f"the upload took over {limits.upload_seconds:g} s") from None
    except FormParserError as error:
        raise HTTPException(400, f"the form cannot be read: {error}") from None
    if not reader.whole:
        raise HTTPException(400, "the form ends before its last boundary")


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
        raise HTTPException(400, "send the photos as multipart/form-data (curl -F photos=@FILE)")
    return boundary


class _Reader:
    """Gathers the parts of a form as their bytes come in."""

    def __init__(self, boundary: bytes, limits: Limits, held: Held) -> None:
        self.form = Form()
        self.whole = False
        self.held_here = 0
        self._limits = limits
        self._held = held
        self._body = 0
        self._parts = 0
        self._header = (b"", b"")
        self._disposition: dict[bytes, bytes] = {}
        self._data = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    def take(self, piece: bytes) -> None:
        """Read some more of the body."""
        self._body += len(piece)
        if self._body > self._limits.body_bytes:
            raise _too_large("the request", self._limits.body_bytes)
        if self._held.bytes + len(piece) > self._held.limit:
            raise HTTPException(503, "too many uploads at once: try again", {"Retry-After": "1"})
        self._held.bytes += len(piece)
        self.held_here += len(piece)
        self._parser.write(piece)

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > self._limits.photos + PARTS:
            raise HTTPException(400, "the form has too many parts")
        self._disposition = {}
        self._data = bytearray()
        self._header = (b"", b"")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = (name + data[start:end], value)

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = (name, value + data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = parse_options_header(value)[1]
        self._header = (b"", b"")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        limit = self._limits.upload_bytes if self._is_photo else FIELD_BYTES
        if len(self._data) + end - start > limit:
            raise _too_large(self._name, limit)
        self._data += data[start:end]

    def _part_end(self) -> None:
        if not self._is_photo:
            self.form.fields[self._name] = self._data.decode(errors="replace")
            return
        if self._disposition.get(b"name") != b"photos":
            raise HTTPException(400, f"{self._name} is not in the field photos, where files belong")
        # A form with an empty file input sends a part without name and content.
        if self._data or self._disposition[b"filename"]:
            self.form.photos.append(Upload(self._name, bytes(self._data)))
        if len(self.form.photos) > self._limits.photos:
            raise HTTPException(
                413, f"more than the {self._limits.photos} photos allowed in a request"
            )

    def _end(self) -> None:
        self.whole = True

    @property
    def _is_photo(self) -> bool:
        return b"filename" in self._disposition

    @property
    def _name(self) -> str:
        """A file's own name, or that of a field, fit to be shown in a line."""
        name = self._disposition.get(b"filename") or self._disposition.get(b"name", b"")
        shown = name.decode(errors="replace").replace("\\", "/").rpartition("/")[2]
        return "".join(c for c in shown if c.isprintable())[:200] or "photo"


def _too_large(what: str, limit: int) -> HTTPException:
    return HTTPException(413, f"{what} has more than the {limit / 1e6:g} MB allowed")
