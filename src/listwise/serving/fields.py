"""The fields of a search form, checked."""

import json
import math
from typing import Any

from listwise.data.images import Box
from listwise.errors import InputError
from listwise.serving.engine import SearchRequest
from listwise.serving.settings import Limits
from listwise.serving.uploads import Form

K = 60
"""Results when a client does not say how many."""

FORM: dict[str, Any] = {
    "photos": {
        "type": "array",
        "items": {"type": "string", "format": "binary"},
        "description": "Image files: JPEG, PNG, WebP, TIFF or GIF.",
    },
    "boxes": {
        "type": "string",
        "description": "JSON: for each photo [x0, y0, x1, y1], in pixels of the upright photo, "
        "or null for all of it.",
    },
    "keys": {"type": "string", "description": "JSON: keys of entries that are examples too."},
    "k": {"type": "integer", "default": K, "description": "Results at most."},
    "expand": {"type": "boolean", "default": False, "description": "Expand the query (αQE)."},
    "rerank": {"type": "boolean", "default": False, "description": "Re-rank by geometry."},
}
"""The form in the words of OpenAPI."""


class BadRequestError(InputError):
    """A request that cannot be answered; other errors are the server's own."""


def search_request(form: Form, limits: Limits) -> SearchRequest:
    """The search that a form describes; a `BadRequestError` names a field that is wrong."""
    fields = form.fields
    unknown = sorted(set(fields) - set(FORM))
    if unknown:
        raise BadRequestError(f"unknown field {unknown[0]!r}: there are {', '.join(FORM)}")
    if "photos" in fields:
        raise BadRequestError("photos are files: send them with a file name (curl -F photos=@FILE)")
    keys = _keys(fields.get("keys", ""))
    examples = len(form.photos) + len(keys)
    if not examples:
        raise BadRequestError("there is nothing to search for: send photos, or keys of entries")
    if examples > limits.photos:
        raise BadRequestError(f"{examples} examples are more than the {limits.photos} allowed")
    return SearchRequest(
        form.photos,
        _boxes(fields.get("boxes", ""), len(form.photos)),
        keys,
        _k(fields.get("k", ""), limits),
        _switch("expand", fields.get("expand", "")),
        _switch("rerank", fields.get("rerank", "")),
    )


def key_in(text: str) -> int | None:
    """The entry key that a text holds; None if it is not a key."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        raise BadRequestError(f"{name} is not JSON: {text[:60]!r}") from None


def _boxes(text: str, photos: int) -> list[Box | None]:
    found = _json("boxes", text)
    if found is None:
        return [None] * photos
    if not isinstance(found, list) or len(found) != photos:
        raise BadRequestError(
            f"boxes is a JSON list, a box or null for each of the {photos} photos"
        )
    return [_box(box) for box in found]


def _box(box: Any) -> Box | None:
    if box is None:
        return None
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        raise BadRequestError(f"a box is [x0, y0, x1, y1] in pixels, or null, not {str(box)[:60]}")
    left, top, right, bottom = map(float, box)
    if not (left < right and top < bottom):
        raise BadRequestError(f"the box {box} is empty: x0 < x1 and y0 < y1 are needed")
    return left, top, right, bottom


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9 and math.isfinite(value)


def _keys(text: str) -> list[int]:
    found = _json("keys", text)
    if found is None:
        return []
    keys = [key_in(key) for key in found if isinstance(key, str)] if isinstance(found, list) else []
    if not isinstance(found, list) or len(keys) != len(found) or None in keys:
        raise BadRequestError('keys is a JSON list of entries\' keys as text: ["123", "456"]')
    return list(dict.fromkeys(key for key in keys if key is not None))


def _k(text: str, limits: Limits) -> int:
    if not text:
        return min(K, limits.results)
    number = key_in(text)
    if number is None or not 1 <= number <= limits.results:
        raise BadRequestError(f"k is a number from 1 to {limits.results}, not {text[:60]!r}")
    return number


def _switch(name: str, text: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0", ""):
        return False
    raise BadRequestError(f"{name} is true or false, not {text[:60]!r}")
