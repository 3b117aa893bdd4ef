"""Filters over the table of attributes: SQL for each comparison, with bound parameters.

The table has a row for each attribute of each entry, sorted by name and text, with the number that
the text is, if it is one.
"""

import sqlite3
from bisect import bisect_left, bisect_right
from collections import Counter
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.search.entries import Keys
from listwise.search.filters import (
    CONTAINS,
    SIGNS,
    And,
    Comparison,
    Filter,
    Node,
    Not,
    Value,
    unknown_attribute,
)

TABLE = """CREATE TABLE attributes (
    name TEXT, text TEXT, position INTEGER, number REAL, PRIMARY KEY (name, text, position)
) WITHOUT ROWID"""
_PAIRS = """FROM entries,
    json_each(CASE WHEN json_valid(attributes) THEN attributes ELSE '{}' END) AS pairs"""
_AMONG = "position IN (SELECT value FROM json_each(?))"
_EXPECTED = f"SELECT pairs.key, pairs.value, position, number(pairs.value) {_PAIRS}"
_DROP = f"""DELETE FROM attributes WHERE (name, text, position) IN
    (SELECT pairs.key, pairs.value, position {_PAIRS} WHERE {_AMONG})"""
_PRESENT = "SELECT name, text, position, number FROM attributes"
_NAMED = "SELECT position FROM attributes WHERE name = ?"
_COLUMN = """SELECT {0}, position FROM attributes
    WHERE name = ? AND {0} IS NOT NULL ORDER BY {0}"""  # all values, in ascending order
_SCANS = 3  # comparisons of an attribute in one filter, before all of its values are read
_COMPARED = {
    (sign, column): f"{_NAMED} AND {column} {sign} ?"
    for sign in SIGNS
    for column in ("text", "number")
}


def add_attributes(connection: sqlite3.Connection, positions: str) -> None:
    """Add the attributes of entries that were written; `positions` is a JSON list."""
    connection.execute(f"INSERT INTO attributes {_EXPECTED} WHERE {_AMONG}", (positions,))


def drop_attributes(connection: sqlite3.Connection, positions: str) -> None:
    """Remove the attributes of entries before they change; `positions` is a JSON list."""
    connection.execute(_DROP, (positions,))


def rebuild_attributes(connection: sqlite3.Connection) -> None:
    """Fill the table again from the entries."""
    connection.execute("DELETE FROM attributes")
    connection.execute(f"INSERT INTO attributes {_EXPECTED}")


def attributes_agree(connection: sqlite3.Connection) -> bool:
    """Whether the table is what follows from the entries."""
    queries = (f"{_EXPECTED} EXCEPT {_PRESENT}", f"{_PRESENT} EXCEPT {_EXPECTED}")
    return not any(connection.execute(f"{query} LIMIT 1").fetchone() for query in queries)


def matching_positions(
    connection: sqlite3.Connection, where: Filter, alive: NDArray[np.bool_]
) -> Keys:
    """The positions in use [N] that match a filter, sorted."""
    for name in where.names:
        if not connection.execute(f"{_NAMED} LIMIT 1", (name,)).fetchone():
            known = connection.execute("SELECT DISTINCT name FROM attributes")
            raise unknown_attribute(name, (each for (each,) in known))
    attributes = _Attributes(connection, len(alive))

    def holds(node: Node) -> NDArray[np.bool_]:
        if isinstance(node, Not):
            return ~holds(node.part)
        if isinstance(node, Comparison):
            return attributes.mask(node)
        masks = map(holds, node.parts)
        return reduce(np.logical_and if isinstance(node, And) else np.logical_or, masks)

    return np.flatnonzero(holds(where.root) & alive)


class _Attributes:
    """Compares attributes of `count` positions with values."""

    def __init__(self, connection: sqlite3.Connection, count: int) -> None:
        self._connection = connection
        self._count = count
        self._compared: Counter[str] = Counter()
        self._columns: dict[tuple[str, str], tuple[list[Any], Keys]] = {}

    def mask(self, node: Comparison) -> NDArray[np.bool_]:
        """For which positions a comparison holds, bool [N]."""
        mask = np.zeros(self._count, bool)
        if node.value is None:
            mask[self._positions(_NAMED, node.name)] = True
            return ~mask
        for value in node.texts or (node.value,):
            mask[self._matching(node.name, node.sign, value)] = True
        return mask

    def _matching(self, name: str, sign: str, value: Value) -> Keys:
        column = "text" if isinstance(value, str) else "number"
        if (sign, column) != ("=", "text"):  # which finds its few rows at once
            self._compared[name] += 1
        if self._compared[name] <= _SCANS and sign != CONTAINS:
            return self._positions(_COMPARED[sign, column], name, value)
        if (name, column) not in self._columns:
            rows = self._connection.execute(_COLUMN.format(column), (name,)).fetchall()
            places = np.array([position for _, position in rows], np.int64)
            self._columns[name, column] = [value for value, _ in rows], places
        values, positions = self._columns[name, column]
        if sign == CONTAINS:
            return positions[[value in text.casefold() for text in values]]
        left, right = bisect_left(values, value), bisect_right(values, value)
        end = len(values)
        parts = {"=": (left, right), "<": (0, left), "<=": (0, right)}
        parts |= {">": (right, end), ">=": (left, end)}
        return positions[slice(*parts[sign])]

    def _positions(self, query: str, *values: object) -> Keys:
        rows = self._connection.execute(query, values)
        return np.fromiter((row[0] for row in rows), np.int64)
