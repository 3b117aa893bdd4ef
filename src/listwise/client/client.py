"""The client: a method for each address of the HTTP interface."""

import http.client
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlencode, urlsplit

from listwise.client.answers import (
    AddedView,
    Answer,
    Classes,
    Duplicates,
    EntryView,
    Facets,
    Info,
    Labelled,
    MarksAdded,
    MarksPage,
    Page,
    Removed,
    Suggestions,
    Unmarked,
)
from listwise.client.requests import Response, Upload, send
from listwise.errors import InputError

Photo = str | Path | bytes
Box = tuple[float, float, float, float]

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

    Results are dictionaries with the fields that the reference at `/docs` of the server lists;
    `listwise.client.answers` has their types. A photo is the path of an image file, or its bytes.
    Files are sent while they are read. A request is repeated if the server is busy or not
    reachable; each one may be repeated, because adding a photo twice adds it once. A request that
    takes longer than `seconds` is not repeated. Proxies of the environment are not used, and
    redirects are not followed. Threads may share a client.

    Args:
        url: the address of the server.
        token: the token of the server; needed to change the index, and for every request to a
            server for other machines.
        seconds: maximum time without a byte from the server.
        retries: how often a request is repeated at most.

    Raises:
        ServerError: `url` is not an address of a server, or `token` cannot be sent in a header.

    Examples:
        >>> client = Client("http://127.0.0.1:8000", token="secret")      # doctest: +SKIP
        >>> client.search(["chair.jpg"], k=5)["results"][0]["id"]         # doctest: +SKIP
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
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def info(self) -> Info:
        """Describe the index, the limits of a request, and what this client may do."""
        return cast(Info, self._json("GET", "/api/info"))

    def search(
        self,
        photos: Photo | Sequence[Photo] = (),
        *,
        keys: Sequence[str] = (),
        boxes: Sequence[Box | None] | None = None,
        **options: Any,
    ) -> Answer:
        """Search by photos, by entries, or by both together.

        Args:
            photos: one photo or several.
            keys: keys of entries that are further examples.
            boxes: for each photo the part to search with, (x0, y0, x1, y1) in pixels, or None.
            **options: further fields of the form: `k`, `start`, `min_score`, `min_probability`,
                `where`, `expand`, `refine`, `rerank`, and the keys of marked entries, `same`
                and `different`.
        """
        fields = _joined(options)
        if keys:
            fields["keys"] = list(keys)
        if boxes is not None:
            fields["boxes"] = list(boxes)
        return cast(Answer, self._json("POST", "/api/search", _form(photos, fields)))

    def similar(self, key: str, **options: Any) -> Answer:
        """Search by an entry, with the `options` of `search`."""
        return cast(Answer, self._json("GET", _path(key, "/similar", _joined(options))))

    def entries(self, start: int = 0, count: int = PAGE, where: str = "") -> Page:
        """List a page of the entries, and the total number of entries."""
        options = {"start": start, "count": count, "where": where}
        return cast(Page, self._json("GET", "/api/entries" + _query(options)))

    def all_entries(self, where: str = "") -> Iterator[EntryView]:
        """Iterate over all entries; do not change the index meanwhile."""
        start = 0
        while page := self.entries(start, where=where)["entries"]:
            yield from page
            start += len(page)

    def entry(self, key: str) -> EntryView:
        """Return an entry."""
        return cast(EntryView, self._json("GET", _path(key)))

    def thumbnail(self, key: str) -> bytes:
        """Return a small JPEG file of the photo of an entry."""
        return self._send("GET", _path(key, "/thumbnail")).content

    def photo(self, key: str) -> bytes:
        """Return a JPEG file of the photo of an entry, reduced to 1600 pixels."""
        return self._send("GET", _path(key, "/photo")).content

    def add(self, photos: Photo | Sequence[Photo]) -> AddedView:
        """Add photos to the index, and return their keys and the errors. Requires the token."""
        return cast(AddedView, self._json("POST", "/api/entries", _form(photos, {})))

    def remove(self, key: str) -> bool:
        """Remove an entry from the index; return whether it was in it. Requires the token.

        False also if the connection broke before the response arrived, the server had removed the
        entry, and the client repeated the request.
        """
        try:
            return cast(Removed, self._json("DELETE", _path(key)))["removed"] > 0
        except ServerError as error:
            if error.status != http.client.NOT_FOUND:
                raise
            return False

    def duplicates(self, **options: Any) -> Duplicates:
        """List groups of duplicates, with the options `threshold`, `start` and `count`."""
        return cast(Duplicates, self._json("GET", "/api/duplicates" + _query(options)))

    def facets(self) -> Facets:
        """List the attributes with few distinct values, with the count of each value."""
        return cast(Facets, self._json("GET", "/api/facets"))

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
    ) -> MarksAdded:
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
        photos = () if query is None else query
        return cast(MarksAdded, self._json("POST", "/api/marks", _form(photos, fields)))

    def marks(self, start: int = 0, count: int = PAGE, entry: str | None = None) -> MarksPage:
        """List a page of the marks, of all queries or of one entry, and the conflicts."""
        options = {"start": start, "count": count, "entry": entry}
        return cast(MarksPage, self._json("GET", "/api/marks" + _query(options)))

    def unmark(self, id: str) -> bool:
        """Undo a mark; return whether it was active. Requires the token."""
        path = f"/api/marks/{quote(id, safe='')}"
        return cast(Unmarked, self._json("DELETE", path))["undone"] > 0

    def query_photo(self, id: str) -> bytes:
        """Return a small JPEG file of the query photo of a mark."""
        return self._send("GET", f"/api/marks/{quote(id, safe='')}/photo").content

    def labels(self) -> str:
        """Return the classes as a CSV table of labels for training. Requires the token."""
        return self._send("GET", "/api/marks/labels").content.decode()

    def label(self, name: str, keys: Sequence[str]) -> int:
        """Name the class of entries, and return their number. Requires the token.

        An empty name removes the label.
        """
        form = _form((), {"name": name} | _joined({"keys": keys}))
        return cast(Labelled, self._json("POST", "/api/labels", form))["labelled"]

    def classes(self, start: int = 0, count: int = PAGE) -> Classes:
        """List a page of the classes with their progress, and the total number of classes."""
        options = {"start": start, "count": count}
        return cast(Classes, self._json("GET", "/api/classes" + _query(options)))

    def suggestions(self, count: int = 20) -> Suggestions:
        """List pairs of entries that are worth marking next, the most uncertain first."""
        return cast(Suggestions, self._json("GET", f"/api/suggestions?count={count}"))

    def _json(self, method: str, path: str, upload: Upload | None = None) -> Any:
        content = self._send(method, path, upload).content
        try:
            return json.loads(content)
        except ValueError as error:
            place = self.url + path.partition("?")[0]
            message = f"{place} did not return JSON: {self.url} is not a server of listwise serve"
            raise ServerError(message, http.client.OK) from error

    def _send(self, method: str, path: str, upload: Upload | None = None) -> Response:
        if upload is not None:
            _check_files(upload)
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            pause = min(PAUSE * 2**attempt, LONGEST_PAUSE)
            try:
                answer = send(
                    method,
                    self.url + path,
                    headers=self._headers,
                    upload=upload,
                    seconds=self.seconds,
                )
            except TimeoutError as error:
                # The server may still be working on the request: repeating it adds to the load.
                message = f"{self.url} did not respond within {self.seconds:g} seconds"
                raise ServerError(message) from error
            except (OSError, http.client.HTTPException) as error:
                if last:
                    raise ServerError(f"{self.url} cannot be reached: {error}") from error
            else:
                if answer.status != http.client.SERVICE_UNAVAILABLE or last:
                    return _checked(answer)
                pause = _named_pause(answer) or pause
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


def _check_address(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ServerError(f"{url!r} is not an address: it starts with http:// or https://")
    try:
        address = urlsplit(url)
        usable = bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    # http.client refuses an address with spaces or other letters than ASCII while it sends.
    if not usable or not url.isascii() or not url.isprintable() or " " in url:
        raise ServerError(f"{url!r} is not an address: expected http://HOST:PORT")


def _check_files(upload: Upload) -> None:
    """Refuse photos that cannot be read before a connection is opened."""
    for photo in upload.photos:
        if isinstance(photo, Path):
            try:
                with photo.open("rb"):
                    pass
            except FileNotFoundError as error:
                raise ServerError(f"{photo} does not exist") from error
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ServerError(f"{photo} cannot be read: {reason}") from error


def _checked(answer: Response) -> Response:
    if answer.status == http.client.OK:
        return answer
    try:
        reason = str(json.loads(answer.content)["error"])
    except (ValueError, KeyError, TypeError):
        reason = http.client.responses.get(answer.status, "unknown error")
    raise ServerError(f"{reason} (status {answer.status})", answer.status)


def _named_pause(answer: Response) -> float | None:
    """The seconds that the server asks a client to wait."""
    text = {name.lower(): value for name, value in answer.headers.items()}.get("retry-after", "")
    return min(float(text), LONGEST_PAUSE) if text.isdecimal() else None


def _form(photos: Photo | Sequence[Photo], fields: Mapping[str, Any]) -> Upload:
    several: Iterable[Photo] = [photos] if isinstance(photos, str | Path | bytes) else photos
    files = [photo if isinstance(photo, bytes) else Path(photo) for photo in several]
    return Upload.of({name: _text(value) for name, value in _given(fields)}, files)


def _path(key: str, below: str = "", options: Mapping[str, Any] | None = None) -> str:
    return f"/api/entries/{quote(str(key), safe='')}{below}{_query(options or {})}"


def _query(options: Mapping[str, Any]) -> str:
    given = {name: _text(value) for name, value in _given(options) if value != ""}
    return f"?{urlencode(given)}" if given else ""


def _given(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in options.items() if value is not None)


def _joined(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the lists of keys that a server reads as text with commas."""
    lists = ("same", "different", "keys")
    return {
        name: ",".join(value) if name in lists and not isinstance(value, str | None) else value
        for name, value in options.items()
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
