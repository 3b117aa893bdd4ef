"""Multipart request bodies, read in pieces within the limits."""

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from fastapi import HTTPException, Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from listwise.serving.settings import Limits

FIELD_BYTES = 100_000
HEADER_BYTES = 8192  # maximum size of a header of a part
PARTS = 32  # maximum number of parts that are not photos


class Upload(io.BytesIO):
    """The content of an image file, and its name on the client's machine."""

    def __init__(self, name: str, content: bytes) -> None:
        super().__init__(content)
        self.name = name


@dataclass
class Form:
    """The photos and the other fields of a request."""

    photos: list[Upload] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)


class HeldBytes:
    """Counts the bytes of uploads in memory, in total and by address, up to a limit for each."""

    def __init__(self, limit: int, per_address: int) -> None:
        self.total = 0
        self._limit = limit
        self._per_address = per_address
        self._by_address: Counter[str] = Counter()

    def add(self, address: str, count: int) -> None:
        """Count more bytes; a 503 error if they are too many."""
        share = self._by_address[address] + count
        if self.total + count > self._limit or share > self._per_address:
            raise HTTPException(
                503, "too many uploads at the same time: try again", {"Retry-After": "1"}
            )
        self.total += count
        self._by_address[address] = share

    def release(self, address: str, count: int) -> None:
        """Count fewer bytes."""
        self.total -= count
        self._by_address[address] -= count
        if not self._by_address[address]:
            del self._by_address[address]


@asynccontextmanager
async def read_form(
    request: Request, limits: Limits, held: HeldBytes, on_photo: Callable[[], object]
) -> AsyncIterator[Form]:
    """Read the form of a request; its bytes count as held until the context ends.

    `on_photo` is called before each photo is read. If it raises an error, the rest of the form is
    not read.
    """
    address = request.client.host if request.client else ""
    reader = _Reader(_boundary(request), limits, partial(held.add, address), on_photo)
    try:
        await _read(request, reader, limits)
        yield reader.form
    finally:
        reader.close()
        held.release(address, reader.held)


async def _read(request: Request, reader: "_Reader", limits: Limits) -> None:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise _too_large("the request", limits.body_bytes)
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for piece in request.stream():
                reader.take(piece)
    except TimeoutError:
        reason = f"the upload took longer than {limits.upload_seconds:g} s"
        raise HTTPException(408, reason) from None
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
    """Collects the parts of a form while its bytes arrive.

    `hold` is called with the number of bytes, and `on_photo` before the content of a photo.
    """

    def __init__(
        self,
        boundary: bytes,
        limits: Limits,
        hold: Callable[[int], object],
        on_photo: Callable[[], object],
    ) -> None:
        self.form = Form()
        self.whole = False
        self.held = 0
        self._limits = limits
        self._hold = hold
        self._on_photo = on_photo
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
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    def take(self, piece: bytes) -> None:
        """Read the next piece of the body."""
        self._body += len(piece)
        if self._body > self._limits.body_bytes:
            raise _too_large("the request", self._limits.body_bytes)
        self._hold(len(piece))
        self.held += len(piece)
        self._parser.write(piece)

    def close(self) -> None:
        """Delete the parser, which refers to this reader, so that the photos are freed."""
        del self._parser

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > self._limits.photos + PARTS:
            raise HTTPException(400, "the form has too many parts")
        self._disposition = {}
        self._data = bytearray()
        self._header = (b"", b"")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._add_header(data[start:end], b"")

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._add_header(b"", data[start:end])

    def _add_header(self, name: bytes, value: bytes) -> None:
        self._header = (self._header[0] + name, self._header[1] + value)
        if sum(map(len, self._header)) > HEADER_BYTES:
            raise HTTPException(400, "the form has a part with a header that is too long")

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = parse_options_header(value)[1]
        self._header = (b"", b"")

    def _headers_finished(self) -> None:
        if self._is_photo:
            self._on_photo()

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
            raise HTTPException(400, f"{self._name} is in another field: send files as photos")
        # Browsers send a part without name and content for an empty file input.
        if self._data or self._disposition[b"filename"]:
            self.form.photos.append(Upload(self._name, bytes(self._data)))
        if len(self.form.photos) > self._limits.photos:
            raise HTTPException(
                413, f"the request has more than the {self._limits.photos} photos allowed"
            )

    def _end(self) -> None:
        self.whole = True

    @property
    def _is_photo(self) -> bool:
        return b"filename" in self._disposition

    @property
    def _name(self) -> str:
        """The name of the file, or of the field, as printable text on one line."""
        name = self._disposition.get(b"filename") or self._disposition.get(b"name", b"")
        shown = name.decode(errors="replace").replace("\\", "/").rpartition("/")[2]
        return "".join(c for c in shown if c.isprintable())[:200] or "photo"


def _too_large(what: str, limit: int) -> HTTPException:
    return HTTPException(413, f"{what} has more than the {limit / 1e6:g} MB allowed")
