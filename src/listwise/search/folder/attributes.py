"""Evaluate a filter over the attributes of all entries of a folder, column by column."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray

from listwise.search.filters import And, Comparison, Filter, Node, Not

Mask = NDArray[np.bool_]


def matching_rows(where: Filter, texts: pa.Array) -> tuple[Mask, list[str]]:
    """Which entries match, from their attributes as JSON texts: n texts -> bool [n].

    The second result lists the attributes of the filter that no entry has.
    """
    columns = _columns(texts, where.names)
    values = {name: column.dictionary.to_pylist() for name, column in columns.items()}
    codes = {name: _codes(column) for name, column in columns.items()}

    def mask(node: Node) -> Mask:
        if isinstance(node, Comparison):
            # Each distinct text is compared once; the code of a missing attribute is -1, the last.
            holds = [node.matches(text) for text in values[node.name]] + [node.matches(None)]
            found: Mask = np.array(holds, bool)[codes[node.name]]
            return found
        if isinstance(node, Not):
            return ~mask(node.part)
        join = np.logical_and if isinstance(node, And) else np.logical_or
        total = mask(node.parts[0])
        for part in node.parts[1:]:
            total = join(total, mask(part))
        return total

    return mask(where.root), [name for name in where.names if not values[name]]


def _columns(texts: pa.Array, names: tuple[str, ...]) -> dict[str, pa.DictionaryArray]:
    """The values of some attributes, dictionary-encoded."""
    fields = [pa.field(name, pa.string()) for name in names]
    if not len(texts):
        none = pa.array([], pa.string()).dictionary_encode()
        return dict.fromkeys(names, none)
    lines = pc.binary_join_element_wise(texts, "", "\n").buffers()[2]
    found = pyarrow.json.read_json(
        pa.BufferReader(lines),
        # One block: a block must hold a whole line, and a line may be long.
        read_options=pyarrow.json.ReadOptions(block_size=len(lines) + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"
        ),
    )
    return {name: found[name].combine_chunks().dictionary_encode() for name in names}


def _codes(column: pa.DictionaryArray) -> NDArray[np.int64]:
    codes: NDArray[np.int64] = column.indices.fill_null(-1).to_numpy().astype(np.int64)
    return codes
