"""Entries as rows of a Milvus collection."""

import base64
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from listwise.errors import InputError
from listwise.search.checksums import SUMS, new_sums
from listwise.search.entries import NewEntries, as_row

ENTRY = ["id", "path", "width", "height", "box", "digest", "attributes"]
OLD_FIELDS = {"key", *ENTRY, "thumbnail", "descriptor"}  # of versions without checksums
FIELDS = {*OLD_FIELDS, *SUMS}
MESSAGE = 16 << 20  # bytes per message; servers accept 64 MiB
_TEXT = 65535  # maximum bytes of a text in Milvus
THUMBNAIL_BYTES = _TEXT // 4 * 3  # as base64 text
_TEXTS = ["id", "path", "box", "digest", "attributes", "thumbnail"]


def schema(dim: int) -> Any:
    """The fields of a collection of descriptors with `dim` dimensions."""
    from pymilvus import DataType, MilvusClient

    fields = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    fields.add_field("key", DataType.INT64, is_primary=True)
    for name in _TEXTS:
        fields.add_field(name, DataType.VARCHAR, max_length=_TEXT)
    for name in ("width", "height"):
        fields.add_field(name, DataType.INT64)
    for name in SUMS:
        fields.add_field(name, DataType.INT64)
    fields.add_field("descriptor", DataType.FLOAT_VECTOR, dim=dim)
    return fields


def as_rows(new: NewEntries, with_sums: bool) -> Iterator[dict[str, Any]]:
    """Entries with their descriptors and thumbnails, and with their checksums if wanted."""
    descriptors = np.ascontiguousarray(new.descriptors, np.float32)
    sums = new_sums(new) if with_sums else {}
    parts = zip(new.entries, descriptors, new.thumbnails, strict=True)
    for number, (entry, descriptor, thumbnail) in enumerate(parts):
        row = as_row(entry) | {
            "thumbnail": base64.b64encode(thumbnail).decode(),
            "descriptor": descriptor,
            **{name: values[number] for name, values in sums.items()},
        }
        for name in _TEXTS:
            if len(str(row[name]).encode()) > _TEXT:
                most = THUMBNAIL_BYTES if name == "thumbnail" else _TEXT
                raise InputError(f"the {name} of {entry.id[:100]} has more than {most} bytes")
        yield row


def messages(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group rows into lists that fit into a message."""
    message: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        more = row["descriptor"].nbytes + sum(len(row[name].encode()) for name in _TEXTS)
        if message and size + more > MESSAGE:
            yield message
            message, size = [], 0
        message.append(row)
        size += more
    if message:
        yield message
