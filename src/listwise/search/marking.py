"""Mark results, undo marks, and label entries: the methods of `Index` for it."""

import io
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from listwise.data import PhotoFile
from listwise.data.given import Photo, open_photo
from listwise.data.images import Box, clip_box
from listwise.errors import InputError
from listwise.search.checksums import damage
from listwise.search.classes import labelled_entries
from listwise.search.entries import (
    LABEL,
    Entry,
    Names,
    NoEntryError,
    entry_key,
    key_of,
    list_names,
)
from listwise.search.generation import Generation
from listwise.search.mark_groups import QUERY
from listwise.search.mark_log import mark_line, parse_line, undo_line
from listwise.search.marks import Mark, MarkedQuery, Marks
from listwise.search.store import Store

Result = TypeVar("Result")
_LONGEST = 200  # characters of the name of a person or a class


class MarkingMethods:
    """What `Index` does with marks and labels."""

    generation: Generation
    _change: Callable[[Callable[[], Result]], Result]

    def mark(
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
            >>> index.mark("chair.jpg", same=["chairs/7.jpg"], by="ann")     # doctest: +SKIP
            [Mark(id='5f0c2a6e9b1d4c38', ...)]
        """
        return write_marks(
            self.generation.store, query, same, different, box=box, by=by, ranks=ranks
        )

    def marks(self) -> Marks:
        """Read the marks of the index, with their conflicts and classes.

        Example:
            >>> index.marks().write("labels.csv")            # doctest: +SKIP
            MarkTable(classes=12, photos=240, conflicting=0, missing=0)
        """
        return read_marks(self.generation.store, all_labels=True)

    def unmark(self, ids: str | Iterable[str], *, by: str = "") -> int:
        """Undo marks and return their number; the log keeps them as history.

        An earlier mark of the same photos by the same person then counts again if it was the
        other one.

        Args:
            ids: ids of marks. Those that are undone already are not counted.
            by: the name of the person who undoes them.
        """
        return undo_marks(self.generation.store, [ids] if isinstance(ids, str) else ids, by)

    def label(self, entries: Names, name: str) -> int:
        """Name the class of entries in their attribute `label`, and return their number.

        Photos are not described again, and adding them again keeps the label, unless their table
        has a column `label`.

        Args:
            entries: ids or keys of entries.
            name: the name of the class; "" removes the label.

        Example:
            >>> index.label(["a.jpg", "b.jpg"], "eiffel tower")              # doctest: +SKIP
            2
        """
        text = _checked_text("name", name)
        keys = [entry.key for entry in _entries(self.generation.store, entries)]
        return self._change(lambda: self.generation.store.set_attribute(keys, LABEL, text))


def write_marks(
    store: Store,
    query: Photo | int,
    same: Names,
    different: Names,
    *,
    box: Box | None = None,
    by: str = "",
    ranks: Mapping[str | int, int] | None = None,
) -> list[Mark]:
    """Append marks to the log of an index; see `Index.mark`."""
    by = _checked_text("by", by)
    chosen = {entry.key: (entry, True) for entry in _entries(store, same)}
    for entry in _entries(store, different):
        if entry.key in chosen and chosen[entry.key][1]:
            raise InputError(f"{entry.id} is in `same` and in `different`: give it in one of them")
        chosen[entry.key] = entry, False
    if not chosen:
        raise InputError("nothing to mark: give `same` or `different`")
    places = {key_of(name): rank for name, rank in (ranks or {}).items()}
    if any(rank < 1 for rank in places.values()):
        raise InputError("`ranks` must be 1 or more")
    asked = find_query(store, query, box, keep=True)
    time = datetime.now(UTC).isoformat(timespec="microseconds")
    marks = []
    for key, (entry, is_same) in chosen.items():
        if entry.id == asked.id:
            if not is_same:
                raise InputError(f"{entry.id} is the query itself: it cannot be `different`")
            continue
        rank = places.get(key)
        new = secrets.token_hex(8)
        marks.append(Mark(new, asked, entry.id, is_same, by, time, rank, entry.digest))
    if marks:
        store.mark_log.append([mark_line(mark) for mark in marks])
    return marks


def find_query(
    store: Store, query: Photo | int, box: Box | None = None, *, keep: bool = False
) -> MarkedQuery:
    """Find the photo that marks belong to: an entry, or a photo that is not an entry.

    Args:
        store: the store of an index.
        query: the id or key of an entry, or a photo. A photo that is an entry is found by its
            content.
        box: the part of the photo that was searched for.
        keep: keep a copy of a photo that is not an entry.
    """
    if isinstance(query, str | int):
        found = store.get([key_of(query)])
        if found and box is None:
            return as_query(found[key_of(query)])
        if isinstance(query, int) and found:
            raise InputError("`box` is for a photo: leave it out for an entry")
        if isinstance(query, int):
            raise NoEntryError(f"{store.uri} has no entry {query}: give the key of an entry")
    file = _photo_file(query, box)
    size = file.size()  # refuses a file that is not a photo
    if box is not None:
        clip_box(file.path, box, size)
    digest = file.digest()
    known = store.with_digests([digest])
    if known:
        return as_query(known[digest])
    path = store.mark_log.keep_photo(file.path, file.content) if keep else file.path
    return MarkedQuery(f"{QUERY}{digest}", path, box, digest)


def find_marked(
    store: Store,
    query: Any,
    like: Names,
    box: Any,
    same: Names,
    different: Names,
    *,
    stored: bool = False,
) -> tuple[list[int], list[int]]:
    """Find the keys of the entries that a search uses as marked "same" and "different".

    The arguments are those of `Index.search`; `stored` adds the marks in the log of the index.
    """
    found, others = _keys(same), _keys(different)
    if not (found or others or stored):
        return found, others
    try:
        store.vectors(np.array([*found, *others], np.int64))  # faster than reading the entries
    except NoEntryError:
        _entries(store, [*list_names(same), *list_names(different)])
        raise
    for key in set(found) & set(others):
        name = store.get([key])[key].id
        raise InputError(f"{name} is in `same` and in `different`: give it in one of them")
    if stored:
        known = list_names(like)
        several = isinstance(query, Sequence) and not isinstance(query, str)
        given = list(query) if several else [] if query is None else [query]
        if len(given) + len(known) != 1:
            raise InputError("`marks` needs one photo or one entry: marks belong to one photo")
        part = next(iter(box or ()), None) if several else box
        one = (
            as_query(_entries(store, known)[0])
            if known
            else find_query(store, _as_path(given[0]), part)
        )
        taken = {*found, *others}
        mine, theirs = (
            [entry_key(name) for name in names] for names in read_marks(store).of(one.id)
        )
        found += [key for key in mine if key not in taken]
        others += [key for key in theirs if key not in taken]
    return found, others


def as_query(entry: Entry) -> MarkedQuery:
    """The entry as the photo of a mark."""
    return MarkedQuery(entry.id, entry.path, entry.box, entry.digest)


def read_marks(store: Store, *, all_labels: bool = False) -> Marks:
    """Read the log of an index, and find the photos of the marks in it.

    A photo is found by its id, or by its digest under another id. A photo that was replaced by
    another one under the same id is not found.

    Args:
        store: the store of the index.
        all_labels: also read the labels of entries without marks, which belong to the classes.
    """
    marks: list[Mark] = []
    undone: set[str] = set()
    damaged = []
    for line in store.mark_log.read():
        found = parse_line(line.text)
        if found is None:
            damaged.append(line.name)
        elif isinstance(found, str):
            undone.add(found)
        else:
            marks.append(found)
    if damaged:
        raise damage(store.uri, f"{damaged[0]} changed after it was written")
    named = {(mark.entry, mark.digest) for mark in marks}
    named |= {(mark.query.id, mark.query.digest) for mark in marks}
    entries = _present(store, named)
    photos = {entry.id: as_query(entry) for entry in entries.values()}
    labels = {entry.id: entry.attributes.get(LABEL, "").strip() for entry in entries.values()}
    labelled = labelled_entries(store) if all_labels else {}
    labels |= {name: entry.attributes[LABEL].strip() for name, entry in labelled.items()}
    history = []
    for mark in marks:
        name = mark.query.id, mark.query.digest
        query = as_query(entries[name]) if name in entries else mark.query
        if query.id.startswith(QUERY) and name not in entries:
            if query.id not in photos:
                query = replace(query, path=store.mark_log.find_photo(query.path))
                if Path(query.path).is_file():
                    photos[query.id] = query
            query = photos.get(query.id, query)
        entry = entries.get((mark.entry, mark.digest))
        history.append(replace(mark, query=query, entry=entry.id if entry else mark.entry))
    return Marks(
        history,
        frozenset(undone),
        photos,
        {name: text for name, text in labels.items() if text},
        {name: as_query(entry) for name, entry in labelled.items()},
    )


def undo_marks(store: Store, ids: Iterable[str], by: str = "") -> int:
    """Append to the log of an index that marks were undone; see `Index.unmark`."""
    by = _checked_text("by", by)
    marks = read_marks(store)
    known = {mark.id: mark for mark in marks.history}
    lines = []
    for name in dict.fromkeys(ids):
        if name not in known:
            raise InputError(f"{store.uri} has no mark {name}: give the id of a mark")
        if not marks.is_undone(known[name]):
            time = datetime.now(UTC).isoformat(timespec="microseconds")
            lines.append(undo_line(name, by, time, secrets.token_hex(8)))
    if lines:
        store.mark_log.append(lines)
    return len(lines)


def _present(store: Store, named: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Entry]:
    """The entries with these ids and digests, or with these digests under other ids."""
    wanted = sorted(named)
    by_key = store.get(sorted({entry_key(name) for name, _ in wanted}))
    found: dict[tuple[str, str], Entry] = {}
    for name, digest in wanted:
        entry = by_key.get(entry_key(name))
        if entry is not None and digest in ("", entry.digest):
            found[name, digest] = entry
    left = [each for each in wanted if each not in found]
    by_digest = store.with_digests([digest for _, digest in left if digest])
    return found | {each: by_digest[each[1]] for each in left if each[1] in by_digest}


def _as_path(query: Any) -> Any:
    """A text is the path of a file where it cannot be the id of an entry."""
    return Path(query) if isinstance(query, str) else query


def _photo_file(query: Any, box: Box | None) -> PhotoFile:
    """A photo as a file with its content; that of an image without a file is PNG."""
    if isinstance(query, str | Path):
        path = str(Path(query).expanduser().absolute())
        return PhotoFile(path, box).read()
    if isinstance(query, Image.Image | np.ndarray):
        content = io.BytesIO()
        open_photo(query).save(content, "PNG")
        return PhotoFile("query.png", box, content.getvalue())
    raise InputError("`query` must be one photo, or the id or key of an entry")


def _entries(store: Store, names: Names) -> list[Entry]:
    """The entries with these ids or keys; `NoEntryError` if one does not exist."""
    given = list_names(names)
    found = store.get(sorted({key_of(name) for name in given}))
    for name in given:
        if key_of(name) not in found:
            raise NoEntryError(
                f"{store.uri} has no photo {name}: give an id or a key of the index; "
                "listwise index list shows the ids"
            )
    return [found[key] for key in dict.fromkeys(map(key_of, given))]


def _keys(names: Names) -> list[int]:
    """The keys of entries, each once."""
    return list(dict.fromkeys(map(key_of, list_names(names))))


def _checked_text(argument: str, text: str) -> str:
    text = text.strip()
    if len(text) > _LONGEST or re.search(r"[\x00-\x1f\x7f]", text):
        raise InputError(f"`{argument}` must be one line of at most {_LONGEST} characters")
    return text
