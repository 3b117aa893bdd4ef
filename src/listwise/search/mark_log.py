"""The log of the marks of an index: lines that are only appended.

A line is a JSON object with a record and the checksum of the record. A record is a mark, or the id
of a mark that was undone. The log does not belong to a generation, so upgrades and rollbacks keep
it.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from listwise.search.marks import Mark, MarkedQuery


class LogLine(NamedTuple):
    """A line of the log; `name` is where it is, for messages and for `MarkLog.drop`."""

    name: str
    text: str


class MarkLog(ABC):
    """Where the marks of an index are stored. Several threads and processes may use it."""

    @abstractmethod
    def append(self, texts: Sequence[str]) -> None:
        """Write lines; when it returns, they survive a kill and a power failure."""

    @abstractmethod
    def read(self) -> list[LogLine]:
        """Read all lines in the order in which they were written."""

    @abstractmethod
    def drop(self, names: Sequence[str]) -> None:
        """Remove damaged lines by name and keep the others."""

    @abstractmethod
    def keep_photo(self, path: str, content: bytes | None) -> str:
        """Keep a query photo beside the index and return the path of the copy.

        Args:
            path: the file of the photo; its ending is that of the copy.
            content: the bytes of the photo file.
        """

    def stamp(self) -> Hashable | None:
        """Return a value that changes when lines are written; None if this cannot be known."""
        return None

    def find_photo(self, path: str) -> str:
        """Return where a kept query photo is now; an index may have been moved."""
        return path

    def damaged(self) -> list[str]:
        """Names of the lines that are not what was written."""
        return [line.name for line in self.read() if parse_line(line.text) is None]


def mark_line(mark: Mark) -> str:
    """Write a mark as a line."""
    query = mark.query
    asked = {"id": query.id, "path": query.path, "box": query.box, "digest": query.digest}
    values = {"id": mark.id, "query": asked, "entry": mark.entry, "same": mark.same}
    values |= {"by": mark.by, "time": mark.time, "rank": mark.rank, "digest": mark.digest}
    return _line({"mark": values})


def undo_line(mark: str, by: str, time: str, number: str) -> str:
    """Write as a line that a mark was undone; `number` identifies the line."""
    return _line({"undo": {"id": number, "mark": mark, "by": by, "time": time}})


def parse_line(text: str) -> Mark | str | None:
    """Read a line: a mark, the id of a mark that was undone, or None if it is damaged."""
    try:
        line = json.loads(text)
        record = line["record"]
        if line["checksum"] != _checksum(_canonical(record)):
            return None
        return str(record["undo"]["mark"]) if "undo" in record else _mark(record["mark"])
    except (ValueError, KeyError, TypeError):
        return None


def line_id(text: str) -> tuple[str, str]:
    """The time and the id of a line that was just written."""
    (record,) = json.loads(text)["record"].values()
    return record["time"], record["id"]


def _mark(values: Mapping[str, Any]) -> Mark:
    query = values["query"]
    box = None if query["box"] is None else tuple(query["box"])
    asked = MarkedQuery(query["id"], query["path"], box, query["digest"])
    rest = (values[name] for name in ("entry", "same", "by", "time", "rank", "digest"))
    return Mark(values["id"], asked, *rest)


def _line(record: Mapping[str, Any]) -> str:
    content = _canonical(record)
    return f'{{"checksum":"{_checksum(content)}","record":{content}}}'


def _canonical(record: Any) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def _checksum(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
