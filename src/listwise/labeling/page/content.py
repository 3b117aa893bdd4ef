"""Choose what the page shows of a large collection."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from listwise.labeling.result import NO_MATCH, Labels, PhotoGroup

CLASSES = 40  # classes shown in pictures
ROWS = 500  # classes in the table
KEPT, SMALLER, DROPPED = 7, 4, 7  # photos shown of a group that was kept, of others, without match
GROUPS = 3  # smaller groups shown per class
MERGES = 40
COPIES = 40
COPIES_EACH = 4
ERRORS = 50


@dataclass(frozen=True)
class PhotoRow:
    """Some photos of a group or of those that were dropped.

    Attributes:
        title: what they are.
        photos: numbers of the photos shown.
        total: number of photos that there are.
        kept: whether they were kept.
    """

    title: str
    photos: tuple[int, ...]
    total: int
    kept: bool


@dataclass(frozen=True)
class ClassView:
    """A class before: its name, its number of photos, how many were kept, and its rows."""

    name: str
    total: int
    kept: int
    groups: int
    rows: tuple[PhotoRow, ...]

    @property
    def dropped(self) -> int:
        """Number of photos that were dropped."""
        return self.total - self.kept


def class_views(labels: Labels) -> list[ClassView]:
    """Return all classes, those with the largest share of dropped photos first.

    Without labels before, each group is a class.
    """
    return _found_classes(labels) if not labels.labelled else _cleaned_classes(labels)


def _cleaned_classes(labels: Labels) -> list[ClassView]:
    groups: dict[str, list[PhotoGroup]] = {}
    for group in labels.groups:
        groups.setdefault(group.given, []).append(group)
    total: dict[str, int] = {}
    kept: dict[str, int] = {}
    alone: dict[str, list[int]] = {}
    for number, photo in enumerate(labels.photos):
        total[photo.given] = total.get(photo.given, 0) + 1
        kept[photo.given] = kept.get(photo.given, 0) + bool(photo.label)
        if photo.reason == NO_MATCH:
            alone.setdefault(photo.given, []).append(number)
    views = []
    for name in total:
        rows = [_group_row(group) for group in groups.get(name, ())[: GROUPS + 1]]
        hidden = groups.get(name, [])[GROUPS + 1 :]
        if hidden:
            count = sum(len(group.photos) for group in hidden)
            rows.append(PhotoRow(f"{len(hidden)} further groups", (), count, False))
        if name in alone:
            rows.append(_alone_row(labels, alone[name], "No match: dropped"))
        views.append(
            ClassView(name, total[name], kept[name], len(groups.get(name, ())), tuple(rows))
        )
    return sorted(views, key=lambda view: (view.kept / view.total, -view.total, view.name))


def _found_classes(labels: Labels) -> list[ClassView]:
    views = []
    for group in labels.groups:
        if group.label:
            size = len(group.photos)
            views.append(ClassView(group.label, size, size, 1, (_group_row(group),)))
    views.sort(key=lambda view: (-view.total, view.name))
    alone = [i for i, photo in enumerate(labels.photos) if photo.reason == NO_MATCH]
    if alone:
        row = _alone_row(labels, alone, "Match no other photo: dropped")
        views.append(ClassView("(no class)", len(alone), 0, 0, (row,)))
    return views


def _group_row(group: PhotoGroup) -> PhotoRow:
    title = "Largest group" if group.number == 1 else f"Group {group.number}"
    if not group.given:
        title = "Kept"
    elif not group.label:
        title += ": dropped"
    else:
        title += ": kept" if group.label == group.given else f": kept as {group.label}"
    shown = KEPT if group.number == 1 or not group.given else SMALLER
    photos = group.photos
    # The photos with most matches and, of the largest group, those with the fewest.
    if len(photos) > shown and shown == KEPT:
        photos = photos[: shown - 3] + photos[-3:]
    return PhotoRow(title, photos[:shown], len(group.photos), bool(group.label))


def _alone_row(labels: Labels, numbers: Sequence[int], title: str) -> PhotoRow:
    nearest = sorted(numbers, key=lambda i: (-labels.photos[i].inliers, i))
    return PhotoRow(title, tuple(nearest[:DROPPED]), len(numbers), False)


def shown_pairs(labels: Labels, views: Iterable[ClassView]) -> list[tuple[int, int]]:
    """Return the pairs of photos whose matching points are drawn."""
    pairs: dict[tuple[int, int], None] = {}
    for view in views:
        for row in view.rows:
            for photo in row.photos:
                partner = labels.photos[photo].partner
                if partner >= 0:
                    pairs[photo, partner] = None
    for merge in labels.merges[:MERGES]:
        pairs[merge.photos] = None
    for numbers in labels.copies[:COPIES]:
        for copy in numbers[1:COPIES_EACH]:
            pairs[copy, numbers[0]] = None
    return list(pairs)


def unreadable(labels: Labels) -> list[str]:
    """Return the reasons of photos that cannot be read, at most fifty."""
    return [labels.errors[i] for i in sorted(labels.errors)][:ERRORS]
