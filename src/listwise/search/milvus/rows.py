"""Entries as rows of a Milvus collection."""

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from listwise.errors import InputError
from listwise.search.checksums import LOCAL_SUM, NO_LOCAL, SUMS, local_sum, new_sums
from listwise.search.entries import NewEntries, as_row
from listwise.search.milvus import filters

ENTRY = ["id", "path", "width", "height", "box", "digest", "attributes"]
OLDEST_FIELDS = {"key", *ENTRY, "thumbnail", "descriptor"}  # of versions without checksums
OLD_FIELDS = {*OLDEST_FIELDS, *SUMS}  # of versions without filters and local features
FIELDS = {*OLD_FIELDS, filters.FIELD, "local", LOCAL_SUM}
MESSAGE = 16 << 20  # bytes per message; servers accept 64 MiB
_TEXT = 65535  # maximum bytes of a text in Milvus
THUMBNAIL_BYTES = _TEXT // 4 * 3  # as base64 text
_TEXTS = ["id", "path", "box", "digest", "attributes", "thumbnail", "local"]


def schema(dim: int) -> Any:
    """The fields of a collection of descriptors with `dim` dimensions."""
    from pymilvus import DataType, MilvusClient

    fields = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    fields.add_field("key", DataType.INT64, is_primary=True)
    for name in _TEXTS:
        fields.add_field(name, DataType.VARCHAR, max_length=_TEXT)
    for name in ("width", "height"):
        fields.add_field(name, DataType.INT64)
    for name in (*SUMS, LOCAL_SUM):
        fields.add_field(name, DataType.INT64)
    fields.add_field(filters.FIELD, DataType.JSON)
    fields.add_field("descriptor", DataType.FLOAT_VECTOR, dim=dim)
    return fields


def as_rows(new: NewEntries, fields: set[str]) -> Iterator[dict[str, Any]]:
    """Entries with their descriptors and thumbnails as rows with these fields."""
    descriptors = np.ascontiguousarray(new.descriptors, np.float32)
    sums = new_sums(new)
    codes = new.local or [b""] * len(new.entries)
    parts = zip(new.entries, descriptors, new.thumbnails, codes, strict=True)
    for number, (entry, descriptor, thumbnail, local) in enumerate(parts):
        row = as_row(entry) | {
            "thumbnail": base64.b64encode(thumbnail).decode(),
            "local": base64.b64encode(local).decode(),
            LOCAL_SUM: local_sum(entry.key, local) if local else NO_LOCAL,
            "descriptor": descriptor,
            **{name: values[number] for name, values in sums.items()},
        }
        for name in _TEXTS:
            if len(str(row[name]).encode()) > _TEXT:
                most = THUMBNAIL_BYTES if name == "thumbnail" else _TEXT
                raise InputError(f"the {name} of {entry.id[:100]} has more than {most} bytes")
        if filters.FIELD in fields:
            row[filters.FIELD] = filters.filter_values(entry.attributes)
            if len(json.dumps(row[filters.FIELD])) > _TEXT:
                raise InputError(
                    f"the attributes of {entry.id[:100]} are too long for the filters of Milvus, "
                    f"which have at most {_TEXT} bytes: use shorter attributes"
                )
        yield {name: value for name, value in row.items() if name in fields}


def messages(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group rows into lists that fit into a message."""
    message: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        more = row["descriptor"].nbytes + sum(len(row.get(name, "").encode()) for name in _TEXTS)
        more += 3 * len(row["attributes"])  # its filter values
        if message and size + more > MESSAGE:
            yield message
            message, size = [], 0
        message.append(row)
        size += more
    if message:
        yield message
