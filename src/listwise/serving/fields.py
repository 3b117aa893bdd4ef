"""The fields of a search form, and their checks."""

import json
import math
from collections.abc import Sequence
from typing import Any, cast

from listwise.data.images import Box
from listwise.errors import InputError
from listwise.search.filters import Filter, parse_filter
from listwise.search.refinement import REFINEMENTS, RefineMethod
from listwise.serving.engine import SearchRequest
from listwise.serving.settings import Limits
from listwise.serving.uploads import Form

K = 60
"""Default number of results."""
MARKS = 1000
"""Maximum number of entries that are marked or labelled together."""
LONGEST_NAME = 200
"""Maximum number of characters in the name of a person or of a class."""
_KEYS = r"[0-9]{1,19}(,[0-9]{1,19})*"

SAME: dict[str, Any] = {
    "type": "string",
    "pattern": f"^({_KEYS})?$",
    "description": "Keys of entries that show the same thing as the query, separated by commas; "
    f"at most {MARKS} in `same` and `different` together.",
    "examples": ["123,456"],
}
DIFFERENT = SAME | {"description": "Keys of entries that show something else, as in `same`."}

FORM: dict[str, Any] = {
    "photos": {
        "type": "array",
        "items": {"type": "string", "format": "binary"},
        "description": "Image files: JPEG, PNG, WebP, TIFF or GIF.",
    },
    "boxes": {
        "type": "string",
        "description": "JSON list: for each photo [x0, y0, x1, y1] in pixels of the upright photo, "
        "or null for the whole photo.",
        "examples": ["[[10, 20, 300, 400]]"],
    },
    "keys": {
        "type": "string",
        "description": "JSON list: keys of entries that are further examples.",
        "examples": ['["123", "456"]'],
    },
    "k": {"type": "integer", "default": K, "description": "Maximum number of results."},
    "start": {
        "type": "integer",
        "default": 0,
        "description": "Number of results to skip, for the next page of results.",
    },
    "min_score": {"type": "number", "description": "Minimum score of a result."},
    "min_probability": {
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "description": "Minimum probability that a result shows the same thing as the query. "
        "The model of the index must be calibrated. It cannot be combined with `expand`.",
    },
    "where": {
        "type": "string",
        "description": "Filter on the attributes of the results.",
        "examples": ["price < 100 and color = 'red'"],
    },
    "expand": {
        "type": "boolean",
        "description": "Expand the query with its first results (αQE). By default if the model of "
        "the index was tuned to it, and neither `refine` nor `min_probability` is given.",
    },
    "refine": {
        "type": "string",
        "enum": list(REFINEMENTS),
        "description": "Re-rank the first results by their global descriptors.",
    },
    "rerank": {
        "type": "boolean",
        "default": False,
        "description": "Re-rank the results by spatial verification.",
    },
    "same": SAME,
    "different": DIFFERENT,
}
"""The OpenAPI description of the form, without the limits of a server."""


def form_fields(limits: Limits) -> dict[str, Any]:
    """The OpenAPI description of the form on a server with these limits."""
    most = limits.results
    return FORM | {
        "photos": FORM["photos"] | {"maxItems": limits.photos},
        "k": FORM["k"] | {"default": min(K, most), "minimum": 1, "maximum": most},
        "start": FORM["start"] | {"minimum": 0, "maximum": most},
    }


class BadRequestError(InputError):
    """A mistake in a request, in contrast to an error of the server."""


def search_request(form: Form, limits: Limits) -> SearchRequest:
    """The search that a form describes.

    Raises:
        BadRequestError: a field is wrong; the message names it.
    """
    fields = form.fields
    check_fields(form, list(FORM))
    if "photos" in fields:
        raise BadRequestError("photos are files: send them with a file name (curl -F photos=@FILE)")
    keys = _keys(fields.get("keys", ""))
    examples = len(form.photos) + len(keys)
    if not examples:
        raise BadRequestError("nothing to search for: send photos, or keys of entries")
    if examples > limits.photos:
        raise BadRequestError(f"{examples} examples are more than the {limits.photos} allowed")
    return SearchRequest(
        form.photos,
        _boxes(fields.get("boxes", ""), len(form.photos)),
        keys,
        _k(fields.get("k", ""), limits),
        _switch("expand", fields["expand"]) if fields.get("expand") else None,
        _switch("rerank", fields.get("rerank", "")),
        filter_in(fields.get("where", "")),
        _number("min_score", fields.get("min_score", "")),
        _number("min_probability", fields.get("min_probability", "")),
        _start(fields.get("start", ""), limits),
        _refine(fields.get("refine", "")),
        *marked_keys(fields.get("same", ""), fields.get("different", "")),
    )


def marked_keys(same: str, different: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The keys of entries that are marked as same and as different.

    Raises:
        BadRequestError: a text is not a list of keys, or the lists are too long or overlap.
    """
    found = listed_keys("same", same), listed_keys("different", different)
    if sum(map(len, found)) > MARKS:
        raise BadRequestError(f"same and different have more than {MARKS} keys together")
    both = set(found[0]).intersection(found[1])
    if both:
        raise BadRequestError(f"{min(both)} is in same and in different: give it in one of them")
    return found


def listed_keys(name: str, text: str) -> tuple[int, ...]:
    """The keys of entries in a text, separated by commas; each one once."""
    keys = [key_in(part.strip()) for part in text.split(",")] if text.strip() else []
    if None in keys:
        raise BadRequestError(f"{name} must be keys of entries, separated by commas: 123,456")
    found = tuple(dict.fromkeys(key for key in keys if key is not None))
    if len(found) > MARKS:
        raise BadRequestError(f"{name} has more than {MARKS} keys")
    return found


def check_fields(form: Form, known: Sequence[str]) -> None:
    """Refuse a form with a field that is not known, instead of ignoring it."""
    unknown = sorted(set(form.fields) - set(known))
    if unknown:
        raise BadRequestError(f"unknown field {unknown[0]!r}: use {', '.join(known)}")


def filter_in(text: str) -> Filter | None:
    """The filter in a text; None if it is empty."""
    try:
        return parse_filter(text) if text.strip() else None
    except InputError as error:
        raise BadRequestError(str(error)) from None


def key_in(text: str) -> int | None:
    """The key of an entry in a text; None if the text is not a key."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def box_in(text: str) -> Box | None:
    """The box in a JSON text; None if it is empty."""
    return _box(_json("box", text))


def ranks_in(text: str) -> dict[str | int, int]:
    """The places of entries in the results, by key, from a JSON object."""
    found = _json("ranks", text)
    given = found if isinstance(found, dict) else {}
    ranks = {key_in(key): rank for key, rank in given.items()}
    right = all(type(rank) is int and 0 < rank < 2**31 for rank in ranks.values())
    if not isinstance(found, dict | None) or None in ranks or not right:
        raise BadRequestError('ranks must be a JSON object with the place of each key: {"123": 1}')
    return {key: rank for key, rank in ranks.items() if key is not None}


def name_in(field: str, text: str) -> str:
    """The name of a person or of a class: one line of text."""
    name = text.strip()
    if len(name) > LONGEST_NAME or not all(c.isprintable() for c in name):
        raise BadRequestError(f"{field} must be one line of at most {LONGEST_NAME} characters")
    return name


def class_in(field: str, text: str) -> str:
    """The name of a class, which spreadsheets do not take for a formula in the table of labels."""
    name = name_in(field, text)
    if name.startswith(("=", "+", "-", "@")):
        raise BadRequestError(
            f"{field} must not begin with {name[0]}, which spreadsheets read as a formula"
        )
    return name


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
            f"boxes must be a JSON list with a box or null for each of the {photos} photos"
        )
    return [_box(box) for box in found]


def _box(box: Any) -> Box | None:
    if box is None:
        return None
    if not (isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))):
        raise BadRequestError(f"a box is [x0, y0, x1, y1] in pixels, or null, not {str(box)[:60]}")
    left, top, right, bottom = map(float, box)
    if not (left < right and top < bottom):
        raise BadRequestError(f"the box {box} is empty: x0 < x1 and y0 < y1 are required")
    return left, top, right, bottom


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9 and math.isfinite(value)


def _keys(text: str) -> list[int]:
    found = _json("keys", text)
    if found is None:
        return []
    keys = [key_in(key) for key in found if isinstance(key, str)] if isinstance(found, list) else []
    if not isinstance(found, list) or len(keys) != len(found) or None in keys:
        raise BadRequestError('keys must be a JSON list of keys as text: ["123", "456"]')
    return list(dict.fromkeys(key for key in keys if key is not None))


def _k(text: str, limits: Limits) -> int:
    if not text:
        return min(K, limits.results)
    number = key_in(text)
    if number is None or not 1 <= number <= limits.results:
        raise BadRequestError(f"k must be a number from 1 to {limits.results}, not {text[:60]!r}")
    return number


def _start(text: str, limits: Limits) -> int:
    number = key_in(text or "0")
    if number is None or number > limits.results:
        raise BadRequestError(
            f"start must be a number from 0 to {limits.results}, not {text[:60]!r}"
        )
    return number


def _number(name: str, text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise BadRequestError(f"{name} must be a number, not {text[:60]!r}") from None


def _refine(text: str) -> RefineMethod | None:
    if text and text not in REFINEMENTS:
        raise BadRequestError(f"refine must be {' or '.join(REFINEMENTS)}, not {text[:60]!r}")
    return cast(RefineMethod, text) if text else None


def _switch(name: str, text: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0", ""):
        return False
    raise BadRequestError(f"{name} must be true or false, not {text[:60]!r}")
