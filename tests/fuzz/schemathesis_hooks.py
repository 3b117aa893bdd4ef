"""Loaded by schemathesis: photos in the place of files, and keys and boxes that are often right.

The environment variable ENTRY_KEYS has the keys of two entries. Nothing of the package is imported,
because that takes seconds.
"""

import json
import os
from typing import Any

import numpy as np
import schemathesis
from hypothesis import strategies as st
from mutations import encoded_photos, mutate
from schemathesis.transport.serialization import Binary

KEY, OTHER = os.environ["ENTRY_KEYS"].split()
photos = st.sampled_from([photo for seed in range(4) for photo in encoded_photos(seed)])
damaged = st.builds(
    lambda photo, seed: mutate(photo, np.random.default_rng(seed)), photos, st.integers(0, 999)
)
schemathesis.openapi.format("binary", (photos | damaged | st.binary()).map(Binary))
numbers = st.integers(0, 30)
boxes = st.none() | st.builds(
    lambda x, y, width, height: [x, y, x + 1 + width, y + 1 + height],
    *[numbers, numbers, numbers, numbers],
)


@schemathesis.hook
def flatmap_path_parameters(context: Any, path_parameters: Any) -> st.SearchStrategy[Any]:
    """An entry that exists, unless it would be removed."""
    if context.operation.method == "get" and "key" in (path_parameters or {}):
        return st.just(path_parameters) | st.just({"key": KEY})
    return st.just(path_parameters)


@schemathesis.hook
def flatmap_body(context: Any, body: Any) -> st.SearchStrategy[Any]:
    """Boxes for the photos of a search, and entries that exist."""
    if context.operation.path in ("/api/marks", "/api/labels") and isinstance(body, dict):
        right = {"entry": KEY, "same": OTHER, "keys": f"{KEY},{OTHER}", "ranks": '{"1": 2}'}
        known = {name: value for name, value in right.items() if name in body}
        return st.just(body) | st.just(body | known)
    if context.operation.path != "/api/search" or not isinstance(body, dict):
        return st.just(body)
    sent = body.get("photos")
    count = len(sent) if isinstance(sent, list) else 0
    right = {
        "boxes": st.lists(boxes, min_size=count, max_size=count).map(json.dumps),
        "keys": st.just(json.dumps([KEY])),
        "same": st.just(OTHER),
    }
    others = {name: value for name, value in body.items() if name not in right}
    chosen = st.fixed_dictionaries({}, optional=right).map(lambda fields: others | fields)
    return st.just(body) | chosen
