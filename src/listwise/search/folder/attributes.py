"""Evaluate a filter over the attributes of all entries of a folder, column by column."""

from bisect import bisect_left, bisect_right
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from numpy.typing import NDArray

from listwise.search.filters import COMPARE, And, Comparison, Filter, Node, Not, number_in

Mask = NDArray[np.bool_]


def matching_rows(where: Filter, texts: pa.Array) -> tuple[Mask, list[str]]:
    """Which entries match, from their attributes as JSON texts: n texts -> bool [n].

    The second result lists the attributes of the filter that no entry has.
    """
    columns = {name: _Column(found) for name, found in _columns(texts, where.names).items()}

    def mask(node: Node) -> Mask:
        if isinstance(node, Comparison):
            return columns[node.name].mask(node)
        if isinstance(node, Not):
            return ~mask(node.part)
        join = np.logical_and if isinstance(node, And) else np.logical_or
        total = mask(node.parts[0])
        for part in node.parts[1:]:
            total = join(total, mask(part))
        return total

    return mask(where.root), [name for name in where.names if not columns[name].texts]


class _Column:
    """The values of an attribute: d distinct texts, and the number of its text for each entry.

    What a kind of comparison needs is computed once: a filter may have hundreds of comparisons.
    """

    def __init__(self, column: pa.DictionaryArray) -> None:
        self.texts: list[str] = column.dictionary.to_pylist()
        self._codes: NDArray[np.int64] = column.indices.fill_null(-1).to_numpy().astype(np.int64)

    def mask(self, node: Comparison) -> Mask:
        """For which entries a comparison holds: bool [n]."""
        # The code of a missing attribute is -1, the last.
        holds = np.append(self._holds(node), node.matches(None))
        found: Mask = holds[self._codes]
        return found

    def _holds(self, node: Comparison) -> Mask:
        """For which texts a comparison holds: bool [d]."""
        holds = np.zeros(len(self.texts), bool)
        value = node.value
        if isinstance(value, float):
            holds |= COMPARE[node.sign](self._numbers, value)
        elif node.sign == "=":
            holds[[self._places[text] for text in node.texts if text in self._places]] = True
        elif isinstance(value, str):
            texts, order = self._sorted
            if node.sign in ("<", "<="):
                cut = bisect_left if node.sign == "<" else bisect_right
                holds[order[: cut(texts, value)]] = True
            else:
                cut = bisect_right if node.sign == ">" else bisect_left
                holds[order[cut(texts, value) :]] = True
        return holds

    @cached_property
    def _places(self) -> dict[str, int]:
        return {text: place for place, text in enumerate(self.texts)}

    @cached_property
    def _numbers(self) -> NDArray[np.float64]:
        """The texts as numbers [d]; NaN, for which no comparison holds, if a text is not one."""
        found = (number_in(text) for text in self.texts)
        return np.array([np.nan if number is None else number for number in found], np.float64)

    @cached_property
    def _sorted(self) -> tuple[list[str], NDArray[np.int64]]:
        """The texts in ascending order, and their places [d]."""
        order = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        return [self.texts[place] for place in order], np.array(order, np.int64)


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
