"""Entries as rows of a Milvus collection, and filters as expressions of Milvus.

Every row has a JSON field with the attributes: `t` and the hexadecimal name of an attribute is the
key of its text, also hexadecimal, and `n` and the name is the key of its number if the text is one.
Hexadecimal texts sort like the texts themselves, and no name or value can change the meaning of an
expression. `c` and the name is the key of the text without case for `contains`, with a sign between
the bytes, so that no match begins in the middle of one.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from listwise.errors import InputError
from listwise.search.entries import SUMS, VALUES, NewEntries, new_rows
from listwise.search.filters import CONTAINS, And, Comparison, Filter, Node, Not, number_in
from listwise.search.milvus.connection import Field

FILTERS = "filters"
FIELDS = {"key", *VALUES, "thumbnail", "local", "descriptor", FILTERS, *SUMS}
MESSAGE = 16 << 20  # bytes per message; servers accept 64 MiB
_TEXT = 65535  # maximum bytes of a text in Milvus
THUMBNAIL_BYTES = _TEXT // 4 * 3  # as base64 text
_TEXTS = ["id", "path", "box", "digest", "attributes", "copies", "thumbnail", "local"]
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}


def fields(dim: int) -> list[Field]:
    """The fields of a collection of descriptors with `dim` dimensions: name, type and options."""
    numbers: list[Field] = [(name, "INT64", {}) for name in ("width", "height", *SUMS)]
    texts: list[Field] = [(name, "VARCHAR", {"max_length": _TEXT}) for name in _TEXTS]
    others: list[Field] = [
        (FILTERS, "JSON", {}),
        ("descriptor", "FLOAT_VECTOR", {"dim": dim}),
    ]
    return [("key", "INT64", {}), *texts, *numbers, *others]


def as_rows(new: NewEntries) -> Iterator[dict[str, Any]]:
    """Entries with their descriptors and thumbnails as rows."""
    for entry, row in zip(new.entries, new_rows(new), strict=True):
        for name in ("thumbnail", "local"):
            row[name] = base64.b64encode(row[name]).decode()
        for name in _TEXTS:
            if len(str(row[name]).encode()) > _TEXT:
                most = THUMBNAIL_BYTES if name == "thumbnail" else _TEXT
                raise InputError(f"the {name} of {entry.id[:100]} has more than {most} bytes")
        row[FILTERS] = filter_values(entry.attributes)
        if len(json.dumps(row[FILTERS])) > _TEXT:
            raise InputError(
                f"the attributes of {entry.id[:100]} are too long for the filters of Milvus, "
                f"which have at most {_TEXT} bytes: use shorter attributes"
            )
        yield row


def filter_values(attributes: Mapping[str, str]) -> dict[str, str | float]:
    """The content of the JSON field of an entry."""
    values: dict[str, str | float] = {}
    for name, text in attributes.items():
        values[f"t{_hex(name)}"] = _hex(text)
        values[f"c{_hex(name)}"] = _hex(text.casefold(), "-")
        number = number_in(text)
        if number is not None:
            values[f"n{_hex(name)}"] = number
    return values


def to_expression(where: Filter) -> str:
    """The expression of Milvus for a filter.

    Negations are moved to the comparisons, because versions of Milvus negate a comparison with a
    missing value differently.
    """
    return _write(where.root, negated=False)


def exists(name: str) -> str:
    """The expression that an entry has an attribute."""
    return f"exists {_place('t', name)}"


def _write(node: Node, negated: bool) -> str:
    if isinstance(node, Comparison):
        return _comparison(node, negated)
    if isinstance(node, Not):
        return _write(node.part, not negated)
    word = " and " if isinstance(node, And) != negated else " or "
    return _join(word, [_write(part, negated) for part in node.parts])


def _join(word: str, parts: list[str]) -> str:
    """Join expressions in pairs: Milvus parses a balanced tree with little recursion."""
    while len(parts) > 1:
        parts = [
            f"({word.join(parts[start : start + 2])})" if start + 1 < len(parts) else parts[start]
            for start in range(0, len(parts), 2)
        ]
    return parts[0]


def _comparison(node: Comparison, negated: bool) -> str:
    missing = f"not ({exists(node.name)})"
    if node.value is None:
        return f"({exists(node.name)})" if negated else f"({missing})"
    if node.sign == CONTAINS:
        found = f'({_place("c", node.name)} like "%{_hex(str(node.value), "-")}%")'
        return f"({missing} or not {found})" if negated else found
    if node.texts:
        place = _place("t", node.name)
        signed = [(node.sign, f'"{_hex(text)}"') for text in node.texts]
    else:
        place = _place("n", node.name)
        signed = [(node.sign, repr(node.value))]
        missing = f"not (exists {place})"
    if not negated:
        return _join(" or ", [f"({place} {_sign(sign)} {value})" for sign, value in signed])
    opposites = [
        # Not `!=`, which some versions evaluate to true for a missing value.
        f"(({place} < {value}) or ({place} > {value}))"
        if sign == "="
        else f"({place} {_OPPOSITE[sign]} {value})"
        for sign, value in signed
    ]
    return f"(({missing}) or {_join(' and ', opposites)})"


def _sign(sign: str) -> str:
    return "==" if sign == "=" else sign


def _place(kind: str, name: str) -> str:
    return f'{FILTERS}["{kind}{_hex(name)}"]'


def _hex(text: str, between: str = "") -> str:
    content = text.encode(errors="surrogatepass")
    return content.hex(between) if between else content.hex()
