"""Classes of an index, from labels and marks, and pairs of photos that are worth marking next."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import numpy as np

from listwise.errors import InputError
from listwise.models.calibration import Calibration
from listwise.search.entries import LABEL, Entry, entry_key
from listwise.search.filters import FilterError, parse_filter
from listwise.search.mark_groups import Pair, pair_of, split_into_groups
from listwise.search.marks import Mark
from listwise.search.store import Store

Item = TypeVar("Item")
NEAREST = 20  # neighbors of an entry that are candidates
SEARCHED = 200  # entries that are searched by
UNCERTAIN = 0.1, 0.9  # a pair whose probability is between these is an open suggestion
_BLOCK = 1000  # entries that are read together


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


def labels_of(store: Store) -> dict[str, str]:
    """Return the attribute `label` of the entries that have it, by id."""
    found = labelled_entries(store)
    return {photo: entry.attributes[LABEL].strip() for photo, entry in found.items()}


def labelled_entries(store: Store) -> dict[str, Entry]:
    """Return the entries that have the attribute `label`, by id."""
    where = parse_filter(f"{LABEL} != null")
    found: dict[str, Entry] = {}
    start = 0
    try:
        while page := store.page(start, _BLOCK, where):
            start += len(page)
            found.update((entry.id, entry) for entry in page if entry.attributes[LABEL].strip())
    except FilterError:  # no entry has this attribute
        return {}
    return found


class Assignment(NamedTuple):
    """The classes of photos.

    Attributes:
        classes: the name of the class by the id of the photo.
        left_out: ids of the photos that have no class because of a conflict.
    """

    classes: dict[str, str]
    left_out: set[str]


def assign_classes(marks: Iterable[Mark], labels: Mapping[str, str]) -> Assignment:
    """Find the class of each labelled or marked photo, without photos in conflict.

    Photos that "same" marks connect are a class, and so are photos with the same label. A photo
    that is only marked "different" is a class of its own.

    Args:
        marks: the active marks.
        labels: the labels of entries, by id.
    """
    groups, conflicts = split_into_groups(list(marks), labels)
    left_out = {photo for _, _, photos in conflicts for photo in photos}
    classes = {photo: name for photo, name in labels.items() if photo not in left_out}
    classes |= {photo: name for name, group in groups.items() for photo in group}
    return Assignment(classes, left_out)


def find_classes(
    store: Store, marks: Sequence[Mark], calibration: Calibration | None
) -> list[ClassProgress]:
    """Return the classes of two or more photos or with a label, the largest first."""
    labels = labels_of(store)
    classes = assign_classes(marks, labels).classes
    photos = Counter(classes.values())
    labelled = Counter(classes[photo] for photo in labels if photo in classes)
    touched: Counter[str] = Counter()
    for mark in marks:
        touched.update({classes[photo] for photo in mark.pair if photo in classes})
    pairs = _Candidates(store, marks, labels, classes, calibration).open_pairs()
    unclear = Counter(pair.name for pair in pairs if pair.name)
    found = [
        ClassProgress(name, count, labelled[name], touched[name], unclear[name])
        for name, count in photos.items()
        if count > 1 or labelled[name]
    ]
    return sorted(found, key=lambda each: (-each.photos, each.name))


def find_suggestions(
    store: Store, marks: Sequence[Mark], calibration: Calibration | None, count: int
) -> list[Suggestion]:
    """Return the pairs of entries that are most uncertain, in turn from different classes."""
    if count < 1:
        raise InputError(f"`count` must be 1 or more, not {count}")
    labels = labels_of(store)
    classes = assign_classes(marks, labels).classes
    pairs = _Candidates(store, marks, labels, classes, calibration).pairs()
    chosen = _in_turn(pairs)[:count]
    entries = store.get(sorted({entry_key(photo) for pair in chosen for photo in pair.photos}))
    return [
        Suggestion(
            entries[entry_key(pair.photos[0])],
            entries[entry_key(pair.photos[1])],
            pair.score,
            None if calibration is None else float(calibration.probability(pair.score)),
            pair.name,
        )
        for pair in chosen
        if all(entry_key(photo) in entries for photo in pair.photos)
    ]


@dataclass(frozen=True)
class _Candidate:
    """A pair of entries, the first one of the class `name` if that is not empty."""

    photos: Pair
    score: float
    doubt: float  # 0 is the most uncertain, 0.5 is certain
    name: str


class _Candidates:
    """Neighbors in an index whose relation is not known from marks and labels."""

    def __init__(
        self,
        store: Store,
        marks: Sequence[Mark],
        labels: Mapping[str, str],
        classes: Mapping[str, str],
        calibration: Calibration | None,
    ) -> None:
        self._store = store
        self._labels = labels
        self._classes = classes
        self._calibration = calibration
        self._marks = marks
        self._marked = {mark.pair for mark in marks}
        # Classes whose photos are marked as different from each other.
        self._apart = {
            pair_of(classes[mark.pair[0]], classes[mark.pair[1]])
            for mark in marks
            if not mark.same and all(photo in classes for photo in mark.pair)
        }

    def open_pairs(self) -> list[_Candidate]:
        """The pairs that are not clear."""
        low, high = UNCERTAIN
        return [pair for pair in self.pairs() if pair.doubt < (high - low) / 2]

    def pairs(self) -> list[_Candidate]:
        """The unknown pairs among the nearest neighbors of some entries, most uncertain first."""
        known = self._known_entries()
        if not known:
            return []
        keys = np.array(list(known), np.int64)
        scores, found = self._store.search(self._store.vectors(keys), NEAREST + 1)
        others = self._store.get(np.unique(found[found >= 0]).tolist())
        scored: dict[Pair, tuple[str, str, float]] = {}
        for own, row, values in zip(known.values(), found.tolist(), scores.tolist(), strict=True):
            for key, score in zip(row, values, strict=True):
                if key in others and self._is_unknown(own.id, others[key].id):
                    pair = pair_of(own.id, others[key].id)
                    scored.setdefault(pair, (own.id, others[key].id, float(score)))
        doubt = self._doubt([score for *_, score in scored.values()])
        pairs = [self._candidate(*each, doubt) for each in scored.values()]
        return sorted(pairs, key=lambda pair: (pair.doubt, pair.photos))

    def _known_entries(self) -> dict[int, Entry]:
        """Entries to search by, from all classes; without classes from all entries."""
        members: dict[str, list[str]] = defaultdict(list)
        for photo, name in sorted(self._classes.items()):
            members[name].append(photo)
        wanted = list(_rounds(members.values()))
        found: dict[int, Entry] = {}
        # Query photos that are not entries are among the members.
        for start in range(0, len(wanted), SEARCHED):
            part = [entry_key(photo) for photo in wanted[start : start + SEARCHED]]
            known = self._store.get(part)
            found.update((key, known[key]) for key in part if key in known)
            if len(found) >= SEARCHED:
                break
        if not found:
            keys = np.sort(self._store.versions()[0])  # hashes of ids, so these are a sample
            places = np.linspace(0, len(keys) - 1, min(SEARCHED, len(keys))).astype(np.int64)
            found = self._store.get(keys[places].tolist())
        return dict(list(found.items())[:SEARCHED])

    def _is_unknown(self, one: str, other: str) -> bool:
        """Whether neither marks nor labels show if two entries are of one class."""
        if one == other or pair_of(one, other) in self._marked:
            return False
        first, second = self._classes.get(one), self._classes.get(other)
        if first is None or second is None:
            return True
        labelled = one in self._labels and other in self._labels
        return first != second and not labelled and pair_of(first, second) not in self._apart

    def _doubt(self, scores: Sequence[float]) -> Callable[[float], float]:
        """How far a score is from the boundary: from 0, the most uncertain, to 0.5."""
        calibration = self._calibration
        if calibration is not None:
            return lambda score: abs(float(calibration.probability(score)) - 0.5)
        boundary = self._boundary(scores)
        width = max((abs(score - boundary) for score in scores), default=0.0) or 1.0
        return lambda score: min(0.5, 0.5 * abs(score - boundary) / width)

    def _boundary(self, scores: Sequence[float]) -> float:
        """The score between pairs marked same and different; else the median of the candidates."""
        keys = {photo: entry_key(photo) for mark in self._marks for photo in mark.pair}
        present = self._store.get(list(keys.values()))
        pairs = [mark for mark in self._marks if all(keys[each] in present for each in mark.pair)]
        if not pairs:
            return float(np.median(scores)) if len(scores) else 0.0
        ends = [self._store.vectors([keys[mark.pair[i]] for mark in pairs]) for i in (0, 1)]
        found = (ends[0] * ends[1]).sum(axis=1)
        same = np.array([mark.same for mark in pairs])
        if same.all() or not same.any():
            return float(found.min() if same.all() else found.max())
        return float((found[same].mean() + found[~same].mean()) / 2)

    def _candidate(
        self, own: str, other: str, score: float, doubt: Callable[[float], float]
    ) -> _Candidate:
        name = self._classes.get(own, "")
        if not name and other in self._classes:
            own, other, name = other, own, self._classes[other]
        return _Candidate((own, other), score, doubt(score), name)


def _in_turn(pairs: Sequence[_Candidate]) -> list[_Candidate]:
    """Take one pair of each class in turn; pairs and classes keep their order."""
    by_class: dict[str, list[_Candidate]] = defaultdict(list)
    for pair in pairs:
        by_class[pair.name].append(pair)
    return list(_rounds(by_class.values()))


def _rounds(lists: Iterable[Sequence[Item]]) -> Iterator[Item]:
    """Yield the first of each list, then the second of each, and so on."""
    for row in zip_longest(*lists):
        yield from (each for each in row if each is not None)
