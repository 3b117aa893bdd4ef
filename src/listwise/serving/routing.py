"""What the routes of the HTTP interface share."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from listwise.search.entries import NoEntryError
from listwise.serving.batching import Client
from listwise.serving.fields import key_in

CACHE_CONTROL = (
    "private, no-cache"  # browsers ask whether their copy is current: a photo may be replaced
)
JPEG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}, "description": "A JPEG file."},
    304: {"description": "The copy of the browser is current."},
}


def form_body(fields: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """The OpenAPI description of a multipart body."""
    schema: dict[str, Any] = {"type": "object", "properties": fields}
    if required:
        schema["required"] = list(required)
    body = {"content": {"multipart/form-data": {"schema": schema}}, "required": True}
    return {"requestBody": body}


def client_of(request: Request) -> Client:
    """The sender of a request."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return Client(request.client.host if request.client else "", gone)


def key_of(text: str) -> int:
    """The key of an entry in an address; `NoEntryError` if the text is not a key."""
    key = key_in(text)
    if key is None:
        raise NoEntryError(f"{text[:40]!r} is not the key of an entry")
    return key


def jpeg(request: Request, content: bytes) -> Response:
    """A response with a JPEG file; without the content for a browser that has it."""
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    headers = {"Cache-Control": CACHE_CONTROL, "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="image/jpeg", headers=headers)
