"""The marks of an index: which results of a query show the same thing as it, and which do not."""

import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from listwise.data.images import Box
from listwise.data.photos import Photo
from listwise.errors import InputError
from listwise.search.entries import Names, key_of
from listwise.search.hits import QueryError, find_marked
from listwise.search.marks import Mark, Marks, Undo
from listwise.search.stored_marks import (
    ClassProgress,
    Suggestion,
    find_classes,
    find_query,
    find_suggestions,
    read_marks,
)

if TYPE_CHECKING:
    from listwise.search.index import Index

_LONGEST = 200  # characters of the name of a person or a class


class IndexMarks:
    """The marks of an index and the classes that follow from them; `Index.marks`."""

    def __init__(self, index: "Index") -> None:
        self._index = index

    def add(
        self,
        query: Photo | int,
        *,
        same: Names = (),
        different: Names = (),
        box: Box | None = None,
        by: str = "",
        ranks: Mapping[str | int, int] | None = None,
    ) -> list[Mark]:
        """Store which results of a query show the same thing as it, and which do not.

        The marks are written to the log of the index before the call returns. A later mark of
        the same person replaces an earlier one of the same two photos. In a folder, a copy of a
        photo that is not an entry is kept in `queries`.

        Args:
            query: the id or key of an entry; or a photo, as in `search`. In Milvus, which keeps no
                copies, a photo must be a file.
            same: ids or keys of entries that show the same thing.
            different: ids or keys of entries that show something else.
            box: the part of the photo that was searched for, x0, y0, x1, y1 in pixels.
            by: the name of the person.
            ranks: the places of entries in the results, from 1, by id or key.

        Returns:
            The marks. An entry that is the query itself gets none.

        Example:
            >>> index.marks.add("chair.jpg", same=["chairs/7.jpg"], by="ann")     # doctest: +SKIP
            [Mark(id='5f0c2a6e9b1d4c38', ...)]
        """
        store = self._index.store
        by = checked_text("by", by)
        chosen = find_marked(store, same, different)
        if not any(chosen):
            raise QueryError("nothing to mark: give `same` or `different`")
        places = {key_of(name): rank for name, rank in (ranks or {}).items()}
        if any(rank < 1 for rank in places.values()):
            raise InputError("`ranks` must be 1 or more")
        asked = find_query(store, query, box, keep=True)
        if asked.id in {entry.id for entry in chosen[1]}:
            raise QueryError(f"{asked.id} is the query itself: it cannot be `different`")
        time = _now()
        marks = [
            Mark(_new_id(), asked, each.id, is_same, by, time, places.get(each.key), each.digest)
            for entries, is_same in zip(chosen, (True, False), strict=True)
            for each in entries
            if each.id != asked.id
        ]
        if marks:
            store.mark_log.append(marks)
        return marks

    def read(self) -> Marks:
        """Read the marks of the index, with their conflicts and classes.

        Example:
            >>> index.marks.read().write("labels.csv")  # doctest: +SKIP
            MarkTable(classes=12, photos=240, conflicting=0, missing=0)
        """
        return read_marks(self._index.store)

    def undo(self, ids: str | Iterable[str], *, by: str = "") -> int:
        """Undo marks and return their number; the log keeps them as history.

        An earlier mark of the same photos by the same person then counts again if it was the
        other one.

        Args:
            ids: ids of marks. Those that are undone already are not counted.
            by: the name of the person who undoes them.
        """
        by = checked_text("by", by)
        store = self._index.store
        marks = read_marks(store, all_labels=False)
        wanted = dict.fromkeys([ids] if isinstance(ids, str) else ids)
        for name in wanted.keys() - {mark.id for mark in marks.history}:
            raise InputError(f"{store.uri} has no mark {name}: give the id of a mark")
        undone = [name for name in wanted if name not in marks.undone_ids]
        if undone:
            store.mark_log.append([Undo(_new_id(), name, by, _now()) for name in undone])
        return len(undone)

    def classes(self) -> list[ClassProgress]:
        """List the classes of the index, the largest first: from labels and from "same" marks.

        Example:
            >>> index.marks.classes()[0]  # doctest: +SKIP
            ClassProgress(name='chair', photos=12, labelled=9, marks=14, open=3)
        """
        return find_classes(self._index.store, self.read(), self._index.calibration)

    def suggest(self, count: int = 20) -> list[Suggestion]:
        """Suggest pairs of entries to mark: the most uncertain ones.

        The pairs are neighbors of labelled and marked photos, taken from the classes in turn;
        without such photos, neighbors of any photos. The least clear ones have a probability near
        one half by the calibration of the model. Without a calibration, their scores are near the
        middle between those of pairs marked "same" and "different".

        Args:
            count: the maximum number of pairs.

        Example:
            >>> for pair in index.marks.suggest(5):  # doctest: +SKIP
            ...     print(pair.one.id, pair.other.id, pair.probability)
        """
        found = self.read()
        return find_suggestions(self._index.store, found, self._index.calibration, count)


def checked_text(argument: str, text: str) -> str:
    """Check the name of a person or a class: one line."""
    text = text.strip()
    if len(text) > _LONGEST or re.search(r"[\x00-\x1f\x7f]", text):
        raise InputError(f"`{argument}` must be one line of at most {_LONGEST} characters")
    return text


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _new_id() -> str:
    return secrets.token_hex(8)
