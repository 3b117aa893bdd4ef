"""A client for servers that `listwise serve` starts. It needs only the standard library."""

import http.client
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from listwise.errors import InputError

Photo = Any  # Pillow is not needed here
Json = dict[str, Any]
Form = tuple[list[bytes | Path], dict[str, str]]
"""The parts of a form, of which files are read while they are sent, and its headers."""
Box = tuple[float, float, float, float]
Attributes = Mapping[str, str | float | bool | None]

RETRIES = 4
PAUSE = 0.5  # seconds before the first retry, if the server does not name a time; then twice that
LONGEST_PAUSE = 10.0
PAGE = 200


class ServerError(InputError):
    """A server refused a request, or could not be reached.

    Attributes:
        status: the HTTP status; None if the server did not respond.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Requests to a server that `listwise serve` started.

    Results are dictionaries with the fields that the reference at `/docs` of the server lists. A
    photo is the path of an image file, its bytes, a file opened in binary mode, or a Pillow image;
    several are a list. Each file is read when it is sent. A request is repeated if the server is
    busy or not reachable; each one may be repeated, because adding a photo twice adds it once. A
    request that takes longer than `seconds` is not repeated. Proxies of the environment are not
    used, and redirects are not followed. Threads may share a client.

    Args:
        url: the address of the server.
        token: the token of the server; needed to change the index, and for every request to a
            server for other machines.
        seconds: maximum time without a byte from the server.
        retries: how often a request is repeated at most.

    Attributes:
        headers: headers of every request.

    Raises:
        ServerError: `url` is not an address of a server, or `token` cannot be sent in a header.

    Examples:
        >>> client = Client("http://127.0.0.1:8000", token="secret")      # doctest: +SKIP
        >>> client.search("chair.jpg", k=5)["results"][0]["id"]         # doctest: +SKIP
        'photos/chair-17.jpg'
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        token: str | None = None,
        *,
        seconds: float = 60.0,
        retries: int = RETRIES,
    ) -> None:
        _check_address(url)
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ServerError("`token` must have only printable ASCII characters, on one line")
        self.url = url.rstrip("/")
        self.seconds = seconds
        self.retries = retries
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def info(self) -> Json:
        """Describe the index, the limits of a request, and what this client may do."""
        return self._get("/api/info")

    def search(
        self,
        query: Photo | Sequence[Photo] = (),
        k: int = 10,
        *,
        like: str | Sequence[str] = (),
        box: Box | Sequence[Box | None] | None = None,
        average: bool = False,
        **options: Any,
    ) -> Any:
        """Search by a photo, by entries, or by both together, as `Index.search` does.

        Args:
            query: a photo, or a list of photos, each of which is a query.
            k: the maximum number of results.
            like: keys of entries that are further examples, or the only ones.
            box: the part of the photo to search with, (x0, y0, x1, y1) in pixels; for several
                photos a box or None for each.
            average: several photos are one query, for one thing.
            **options: the other options of `listwise.search.SearchOptions`, such as `where`;
                entries are given by their keys.

        Returns:
            The results of the query, or a list with those of each photo.
        """
        several = isinstance(query, list | tuple)
        photos: Any = query if several else [query]
        boxes: Any = box if several else [box]
        if several and photos and not average:
            parts = zip(photos, boxes or [None] * len(photos), strict=True)
            return [self.search(photo, k, like=like, box=part, **options) for photo, part in parts]
        fields = _joined(options | {"k": k})
        if like:
            fields["keys"] = [like] if isinstance(like, str) else list(like)
        if boxes and any(boxes):
            fields["boxes"] = list(boxes)
        return self._json("POST", "/api/search", _form(photos, fields))

    def similar(self, key: str, **options: Any) -> Json:
        """Search by an entry, with the `options` of `search`."""
        return self._get(f"{_entry(key)}/similar", **_joined(options))

    def entries(self, start: int = 0, count: int = PAGE, where: str = "") -> Json:
        """List a page of the entries, and the total number of entries."""
        return self._get("/api/entries", start=start, count=count, where=where)

    def all_entries(self, where: str = "") -> Iterator[Json]:
        """Iterate over all entries; do not change the index meanwhile."""
        start = 0
        while page := self.entries(start, where=where)["entries"]:
            yield from page
            start += len(page)

    def entry(self, key: str) -> Json:
        """Return an entry."""
        return self._get(_entry(key))

    def thumbnail(self, key: str) -> bytes:
        """Return a small JPEG file of the photo of an entry."""
        return self._send("GET", f"{_entry(key)}/thumbnail")

    def photo(self, key: str) -> bytes:
        """Return a JPEG file of the photo of an entry, reduced to 1600 pixels."""
        return self._send("GET", f"{_entry(key)}/photo")

    def add(
        self,
        photos: Photo | Sequence[Photo],
        attributes: Attributes | Sequence[Attributes | None] | None = None,
        *,
        exif: bool = False,
    ) -> Json:
        """Add photos to the index, and return their keys and the errors. Requires the token.

        Args:
            photos: one photo or several.
            attributes: attributes of all photos, or for each photo its attributes or None.
            exif: add what the camera wrote into a photo as attributes: date, latitude, longitude
                and camera.
        """
        fields = {"attributes": attributes, "exif": exif or None}
        return self._json("POST", "/api/entries", _form(photos, fields))

    def set_attributes(self, key: str, attributes: Attributes) -> Json:
        """Change attributes of an entry, and return the entry. Requires the token.

        None removes an attribute, and those that are not given stay.
        """
        return self._json("PATCH", _entry(key), _form((), {"attributes": attributes}))

    def remove(self, key: str) -> bool:
        """Remove an entry from the index; return whether it was in it. Requires the token.

        False also if the connection broke before the response arrived, the server had removed the
        entry, and the client repeated the request.
        """
        try:
            return bool(self._json("DELETE", _entry(key))["removed"])
        except ServerError as error:
            if error.status != http.client.NOT_FOUND:
                raise
            return False

    def restore(self, key: str) -> Json:
        """Add an entry again that was removed, and return it. Requires the token."""
        return self._json("POST", f"{_entry(key)}/restore")

    def duplicates(self, **options: Any) -> Json:
        """List groups of duplicates, with `threshold`, `mirrored`, `start` and `count`."""
        return self._get("/api/duplicates", **options)

    def facets(self) -> Json:
        """List the attributes: numbers, dates or texts, with their values if they are few."""
        return self._get("/api/facets")

    def mark(
        self,
        query: Photo | None = None,
        *,
        entry: str | None = None,
        box: Box | None = None,
        same: Sequence[str] = (),
        different: Sequence[str] = (),
        by: str = "",
        ranks: Mapping[str, int] | None = None,
    ) -> Json:
        """Store which results of a query show the same thing as it. Requires the token.

        Args:
            query: the photo that was searched for.
            entry: the key of the entry that was searched for, instead of a photo.
            box: the part of the photo that was searched for, (x0, y0, x1, y1) in pixels.
            same: keys of entries that show the same thing.
            different: keys of entries that show something else.
            by: the name of the person who marks.
            ranks: the places of marked entries in the results, from 1, by key.
        """
        fields = _joined({"same": same, "different": different})
        fields |= {"entry": entry, "box": box, "by": by or None, "ranks": ranks}
        photos: Any = () if query is None else query
        return self._json("POST", "/api/marks", _form(photos, fields))

    def marks(self, start: int = 0, count: int = PAGE, entry: str | None = None) -> Json:
        """List a page of the marks, of all queries or of one entry, and the conflicts."""
        return self._get("/api/marks", start=start, count=count, entry=entry)

    def unmark(self, id: str) -> bool:
        """Undo a mark; return whether it was active. Requires the token."""
        return bool(self._json("DELETE", f"/api/marks/{quote(id, safe='')}")["undone"])

    def query_photo(self, id: str) -> bytes:
        """Return a small JPEG file of the query photo of a mark."""
        return self._send("GET", f"/api/marks/{quote(id, safe='')}/photo")

    def labels(self) -> str:
        """Return the classes as a CSV table of labels for training. Requires the token."""
        return self._send("GET", "/api/marks/labels").decode()

    def label(self, name: str, keys: Sequence[str]) -> int:
        """Name the class of entries, and return their number. Requires the token.

        An empty name removes the label.
        """
        form = _form((), {"name": name} | _joined({"keys": keys}))
        return int(self._json("POST", "/api/labels", form)["labelled"])

    def classes(self, start: int = 0, count: int = PAGE) -> Json:
        """List a page of the classes with their progress, and the total number of classes."""
        return self._get("/api/classes", start=start, count=count)

    def suggestions(self, count: int = 20) -> Json:
        """List pairs of entries that are worth marking next, the most uncertain first."""
        return self._get("/api/suggestions", count=count)

    def _get(self, path: str, **options: Any) -> Json:
        given = {name: _text(value) for name, value in options.items() if value not in (None, "")}
        return self._json("GET", path + (f"?{urlencode(given)}" if given else ""))

    def _json(self, method: str, path: str, form: Form | None = None) -> Json:
        content = self._send(method, path, form)
        try:
            found: Json = json.loads(content)
            return found
        except ValueError as error:
            place = self.url + path.partition("?")[0]
            message = f"{place} did not return JSON: {self.url} is not a server of listwise serve"
            raise ServerError(message, http.client.OK) from error

    def _send(self, method: str, path: str, form: Form | None = None) -> bytes:
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            pause = min(PAUSE * 2**attempt, LONGEST_PAUSE)
            try:
                answer, content = self._exchange(method, path, form)
            except TimeoutError as error:
                # The server may still be working on the request: repeating it adds to the load.
                message = f"{self.url} did not respond within {self.seconds:g} seconds"
                raise ServerError(message) from error
            except (OSError, http.client.HTTPException) as error:
                if last:
                    raise ServerError(f"{self.url} cannot be reached: {error}") from error
            else:
                if answer.status == http.client.OK:
                    return content
                if answer.status != http.client.SERVICE_UNAVAILABLE or last:
                    raise _refusal(answer.status, content)
                named = answer.getheader("Retry-After", "")
                pause = min(float(named), LONGEST_PAUSE) if named.isdecimal() else pause
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _exchange(
        self, method: str, path: str, form: Form | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a request over a connection of its own, and read the response."""
        address = urlsplit(self.url + path)
        secure = address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=self.seconds)
        parts, headers = form or ([], {})
        # One file at a time is in memory.
        body = (part if isinstance(part, bytes) else part.read_bytes() for part in parts)
        target = address.path + (f"?{address.query}" if address.query else "")
        try:
            try:
                connection.request(method, target, body if parts else None, self.headers | headers)
            except (BrokenPipeError, ConnectionResetError):
                if form is None:
                    raise
                # A server may refuse an upload before it has ended: the reason can be read.
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()


def _form(photos: Photo | Sequence[Photo], fields: Mapping[str, Any]) -> Form:
    """A multipart form: text fields, and image files or their bytes in the field `photos`."""
    boundary = secrets.token_hex(16)  # does not occur in a photo by chance
    start = f"--{boundary}\r\nContent-Disposition: form-data; name="
    given = {name: _text(value) for name, value in fields.items() if value is not None}
    text = [f'{start}"{name}"\r\n\r\n{value}\r\n' for name, value in given.items()]
    first = "".join(text).encode()
    parts: list[bytes | Path] = [first]
    length = len(first)
    for number, photo in enumerate(photos if isinstance(photos, list | tuple) else [photos]):
        file = _file(photo)
        name = str(number) if isinstance(file, bytes) else file.name
        # Without what would end the header.
        name = "".join("_" if c in '"\\' or ord(c) < 32 else c for c in name)
        header = f'{start}"photos"; filename="{name}"\r\n\r\n'.encode(errors="surrogateescape")
        length += len(header) + (len(file) if isinstance(file, bytes) else _size(file)) + 2
        parts += [header, file, b"\r\n"]
    parts.append(f"--{boundary}--\r\n".encode())
    kind = f"multipart/form-data; boundary={boundary}"
    return parts, {"Content-Type": kind, "Content-Length": str(length + len(boundary) + 6)}


def _file(photo: Photo) -> Path | bytes:
    """The path of a photo, or the content of an image file."""
    if isinstance(photo, str | Path):
        return Path(photo)
    if hasattr(photo, "getexif"):  # a Pillow image; Pillow itself is not needed here
        content = BytesIO()
        kind = "JPEG" if photo.mode in ("RGB", "L", "CMYK") else "PNG"
        photo.save(content, kind, exif=photo.getexif(), quality=95)
        return content.getvalue()
    given = photo.read() if hasattr(photo, "read") else photo
    if isinstance(given, bytes):
        return given
    kind = type(photo).__name__
    raise ServerError(f"a photo must be a file, its bytes or a Pillow image, not {kind}")


def _size(file: Path) -> int:
    try:
        with file.open("rb") as opened:
            return os.fstat(opened.fileno()).st_size
    except FileNotFoundError as error:
        raise ServerError(f"{file} does not exist") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ServerError(f"{file} cannot be read: {reason}") from error


def _check_address(url: str) -> None:
    try:
        address = urlsplit(url)
        usable = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        usable = False
    # http.client refuses an address with spaces or other letters than ASCII while it sends.
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise ServerError(f"{url!r} is not an address: expected http://HOST:PORT")


def _refusal(status: int, content: bytes) -> ServerError:
    try:
        reason = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        reason = http.client.responses.get(status, "unknown error")
    return ServerError(f"{reason} (status {status})", status)


def _entry(key: str) -> str:
    return f"/api/entries/{quote(str(key), safe='')}"


def _joined(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the lists of keys that a server reads as text with commas."""
    return {
        name: ",".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in options.items()
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=dict)
