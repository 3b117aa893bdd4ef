"""The marks of an index: their photos, the classes, and pairs of photos worth marking next."""

import io
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from listwise.calibration import Calibration
from listwise.data import PhotoFile
from listwise.data.images import Box, clip_box
from listwise.data.photos import Photo, open_photo
from listwise.errors import InputError
from listwise.search.entries import (
    LABEL,
    Entry,
    Names,
    NoEntryError,
    damage,
    entry_key,
    key_of,
    spread,
)
from listwise.search.filters import FilterError, parse_filter
from listwise.search.generation import Generation
from listwise.search.hits import (
    Query,
    QueryError,
    QueryPhoto,
    find_entries,
    find_marked,
    nearest_others,
)
from listwise.search.mark_log import parse_line
from listwise.search.marks import QUERY, Mark, MarkedQuery, Marks, Pair, Undo, pair_of
from listwise.search.store import Store

Item = TypeVar("Item")
NEAREST = 20  # neighbors of an entry that are candidates
SEARCHED = 200  # entries that are searched by
_LONGEST = 200  # characters of the name of a person or a class
CLEAR = 0.4  # a pair is clear if its probability is at least this far from one half


@dataclass(frozen=True)
class ClassProgress:
    """A class of an index, and how far it is labelled.

    Attributes:
        name: the attribute `label` of its photos; for photos that only "same" marks connect, the id
            of the first one.
        photos: the number of its photos, with marked query photos that are not entries.
        labelled: the number of its photos that have the attribute `label`.
        marks: the number of active marks of its photos.
        open: the number of suggested pairs of its photos that are not clear yet.
    """

    name: str
    photos: int
    labelled: int
    marks: int
    open: int


@dataclass(frozen=True)
class Suggestion:
    """Two entries that are worth marking, because it is unclear whether they show the same thing.

    Attributes:
        one: an entry, of the class if the pair has one.
        other: the other entry.
        score: the dot product of their descriptors.
        probability: the probability that they show the same thing; None without a calibration.
        name: the class of the first entry; empty if it is in none.
    """

    one: Entry
    other: Entry
    score: float
    probability: float | None
    name: str


class IndexMarks:
    """The marks of an index and the classes that follow from them; `Index.marks`.

    Args:
        generation: returns the current generation of the index.
    """

    def __init__(self, generation: Callable[[], Generation]) -> None:
        self._generation = generation

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
        store = self._generation().store
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
        return read_marks(self._generation().store)

    def undo(self, ids: str | Iterable[str], *, by: str = "") -> int:
        """Undo marks and return their number; the log keeps them as history.

        An earlier mark of the same photos by the same person then counts again if it was the
        other one.

        Args:
            ids: ids of marks. Those that are undone already are not counted.
            by: the name of the person who undoes them.
        """
        by = checked_text("by", by)
        store = self._generation().store
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
        current = self._generation()
        return find_classes(current.store, self.read(), current.calibration)

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
        current = self._generation()
        return find_suggestions(current.store, self.read(), current.calibration, count)


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


def find_query(
    store: Store, query: QueryPhoto | int, box: Box | None = None, *, keep: bool = False
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
            raise QueryError("`box` is for a photo: leave it out for an entry")
        if isinstance(query, int):
            raise NoEntryError(f"the index has no entry {query}: give the key of an entry")
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


def stored_marks(store: Store, query: Query) -> tuple[list[int], list[int]]:
    """Find the keys of the entries that are marked "same" and "different" in the log of an index.

    The query is one photo or one entry.
    """
    if query.entries:
        marked = as_query(find_entries(store, query.entries)[0])
    else:
        (photo,), (box,) = query.photos, query.boxes
        # A text is the path of a file where it cannot be the id of an entry.
        marked = find_query(store, Path(photo) if isinstance(photo, str) else photo, box)
    same, different = read_marks(store, all_labels=False).of(marked.id)
    return list(map(entry_key, same)), list(map(entry_key, different))


def as_query(entry: Entry) -> MarkedQuery:
    """The entry as the photo of a mark."""
    return MarkedQuery(entry.id, entry.path, entry.box, entry.digest)


def read_marks(store: Store, *, all_labels: bool = True) -> Marks:
    """Read the log of an index, and find the photos of the marks in it.

    A photo is found by its id, or by its digest under another id. A photo that was replaced by
    another one under the same id is not found.

    Args:
        store: the store of the index.
        all_labels: also read the labels of entries without marks, which belong to the classes.
    """
    marks: list[Mark] = []
    undone: set[str] = set()
    for line, text in store.mark_log.read().items():
        record = parse_line(text)
        if record is None:
            raise damage(store.uri, f"{line} changed after it was written")
        if isinstance(record, Mark):
            marks.append(record)
        else:
            undone.add(record.mark)
    named = {(mark.entry, mark.digest) for mark in marks}
    named |= {(mark.query.id, mark.query.digest) for mark in marks}
    present = _present(store, named)
    entries = [*present.values(), *(_labelled(store) if all_labels else ())]
    labels = {entry.id: entry.attributes.get(LABEL, "").strip() for entry in entries}
    # By the id and the digest that marks have.
    photos = {name: as_query(entry) for name, entry in present.items()}
    for query in dict.fromkeys(mark.query for mark in marks):
        name = query.id, query.digest
        if query.id.startswith(QUERY) and name not in photos:
            path = store.mark_log.find_photo(query.path)
            if Path(path).is_file():
                photos[name] = replace(query, path=path)
    history = []
    for mark in marks:
        query = photos.get((mark.query.id, mark.query.digest), mark.query)
        entry = present.get((mark.entry, mark.digest))
        history.append(replace(mark, query=query, entry=entry.id if entry else mark.entry))
    return Marks(
        history,
        frozenset(undone),
        {photo.id: photo for photo in [*photos.values(), *map(as_query, entries)]},
        {name: text for name, text in labels.items() if text},
    )


def _labelled(store: Store) -> Iterator[Entry]:
    """The entries that have the attribute `label`."""
    try:
        yield from store.entries(parse_filter(f"{LABEL} != null"))
    except FilterError:  # no entry has this attribute
        return


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


def _photo_file(query: Any, box: Box | None) -> PhotoFile:
    """A photo as a file with its content; that of an image without a file is PNG."""
    if isinstance(query, str | Path):
        path = str(Path(query).expanduser().absolute())
        return PhotoFile(path, box).read()
    if isinstance(query, io.BytesIO):
        return PhotoFile(getattr(query, "name", "query"), box, query.getvalue())
    if isinstance(query, Image.Image | np.ndarray):
        content = io.BytesIO()
        open_photo(query).save(content, "PNG")
        return PhotoFile("query.png", box, content.getvalue())
    raise InputError("`query` must be one photo, or the id or key of an entry")


def find_classes(
    store: Store, marks: Marks, calibration: Calibration | None
) -> list[ClassProgress]:
    """Return the classes of two or more photos or with a label, the largest first.

    Args:
        store: the store of an index.
        marks: its marks with all labels.
        calibration: the calibration of its model.
    """
    name_of = marks.class_names
    labelled = Counter(name_of[photo] for photo in marks.labels if photo in name_of)
    touched: Counter[str] = Counter()
    for mark in marks:
        touched.update({name_of[photo] for photo in mark.pair if photo in name_of})
    pairs = _unknown_pairs(store, marks, calibration)
    unclear = Counter(pair.name for certainty, pair in pairs if certainty < CLEAR)
    found = [
        ClassProgress(name, count, labelled[name], touched[name], unclear[name])
        for name, count in Counter(name_of.values()).items()
        if count > 1 or labelled[name]
    ]
    return sorted(found, key=lambda each: (-each.photos, each.name))


def find_suggestions(
    store: Store, marks: Marks, calibration: Calibration | None, count: int
) -> list[Suggestion]:
    """Return the pairs of entries that are most uncertain, in turn from different classes.

    Args:
        store: the store of an index.
        marks: its marks with all labels.
        calibration: the calibration of its model.
        count: the maximum number of pairs.
    """
    if count < 1:
        raise InputError(f"`count` must be 1 or more, not {count}")
    by_class: dict[str, list[Suggestion]] = defaultdict(list)
    for _, pair in _unknown_pairs(store, marks, calibration):
        by_class[pair.name].append(pair)
    return list(_rounds(by_class.values()))[:count]


def _unknown_pairs(
    store: Store, marks: Marks, calibration: Calibration | None
) -> list[tuple[float, Suggestion]]:
    """Find neighbors whose relation is not known from marks and labels, most uncertain first.

    Each comes with its certainty, from 0 to 0.5: how far its probability is from one half.
    """
    name_of = marks.class_names
    searched = _entries_to_search(store, name_of)
    if not searched:
        return []
    found = list(nearest_others(store, np.array([entry.key for entry in searched]), NEAREST))
    others = store.get(sorted({key for row in found for key, _ in row}))
    is_unknown = _unknown(marks)
    pairs: dict[Pair, Suggestion] = {}
    for own, row in zip(searched, found, strict=True):
        for key, score in row:
            if key not in others or not is_unknown(own.id, others[key].id):
                continue
            one, other = own, others[key]
            if one.id not in name_of and other.id in name_of:
                one, other = other, one
            chance = None if calibration is None else float(calibration.probability(score))
            pair = Suggestion(one, other, score, chance, name_of.get(one.id, ""))
            pairs.setdefault(pair_of(one.id, other.id), pair)
    certainties = _certainties(store, marks, list(pairs.values()))
    ranked = zip(certainties, pairs.values(), strict=True)
    return sorted(ranked, key=lambda each: (each[0], each[1].one.id, each[1].other.id))


def _entries_to_search(store: Store, name_of: Mapping[str, str]) -> list[Entry]:
    """Entries of all classes in turn; without classes a sample of all entries."""
    members: dict[str, list[str]] = defaultdict(list)
    for photo, name in sorted(name_of.items()):
        if not photo.startswith(QUERY):
            members[name].append(photo)
    wanted = [entry_key(photo) for photo in _rounds(members.values())][:SEARCHED]
    if not wanted:
        wanted = spread(np.sort(store.keys()), SEARCHED).tolist()
    found = store.get(wanted)
    return [found[key] for key in wanted if key in found]


def _unknown(marks: Marks) -> Callable[[str, str], bool]:
    """Whether neither marks nor labels show if two entries are of one class."""
    name_of = marks.class_names
    marked = {mark.pair for mark in marks}
    # Classes whose photos are marked as different from each other.
    apart = {
        pair_of(*(name_of.get(photo, "") for photo in mark.pair)) for mark in marks if not mark.same
    }

    def unknown(one: str, other: str) -> bool:
        if one == other or pair_of(one, other) in marked:
            return False
        first, second = name_of.get(one), name_of.get(other)
        if first is None or second is None:
            return True
        labelled = {one, other} <= marks.labels.keys()
        return first != second and not labelled and pair_of(first, second) not in apart

    return unknown


def _certainties(store: Store, marks: Marks, pairs: Sequence[Suggestion]) -> list[float]:
    """How certain it is whether pairs show the same thing: from 0, the most uncertain, to 0.5."""
    known = [pair.probability for pair in pairs if pair.probability is not None]
    if known or not pairs:
        return [abs(probability - 0.5) for probability in known]
    scores = np.array([pair.score for pair in pairs])
    away = np.abs(scores - _boundary(store, marks, scores))
    found: list[float] = (0.5 * away / (away.max() or 1.0)).tolist()
    return found


def _boundary(store: Store, marks: Marks, scores: NDArray[np.float64]) -> float:
    """The score between pairs marked same and different; else the median of the candidates."""
    marked = [mark for mark in marks if not mark.query.id.startswith(QUERY)]
    if not marked:
        return float(np.median(scores))
    one, other = (store.vectors([entry_key(mark.pair[i]) for mark in marked]) for i in (0, 1))
    found = (one * other).sum(axis=1)
    same = np.array([mark.same for mark in marked])
    if same.all() or not same.any():
        return float(found.min() if same.all() else found.max())
    return float((found[same].mean() + found[~same].mean()) / 2)


def _rounds(lists: Iterable[Sequence[Item]]) -> Iterator[Item]:
    """Yield the first of each list, then the second of each, and so on."""
    for row in zip_longest(*lists):
        yield from (each for each in row if each is not None)
