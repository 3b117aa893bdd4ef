"""What `label` writes: labels to train on, what happened to each photo, and a page to look through.

The page shows what was kept, dropped, split, merged, and near-duplicates. A large collection is
shown in part, and the page tells how many of each are shown.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from listwise.data import Images, LabelledImages
from listwise.files import write_csv, write_text
from listwise.labeling.comparisons import matching_points
from listwise.labeling.result import (
    NO_MATCH,
    REASONS,
    LabelledPhoto,
    Labels,
    PhotoGroup,
    short_names,
)
from listwise.labeling.rounds import PhotoMatches
from listwise.pages import write_page
from listwise.pages.photos import thumbnails

# The most that the page shows: classes in pictures and in the table, and others.
MOST = {"classes": 40, "rows": 500, "merges": 40, "copies": 40, "copies_each": 4, "errors": 50}
KEPT, SMALLER, DROPPED = 7, 4, 7  # photos shown of a group that was kept, of others, without match
GROUPS = 3  # smaller groups shown per class
POINTS = 60  # points drawn for a pair of photos; more would be unreadable


def write_labels(labels: Labels, others: LabelledImages | None) -> None:
    """Write the photos that were kept: path, label, and split and box if there are any.

    Photos of `others`, which were not examined, follow with their own labels.
    """
    rows = [
        _table_row(labels.file, labels.images, i, photo.label)
        for i, photo in enumerate(labels.photos)
        if photo.label
    ]
    if others is not None:
        rows += [
            _table_row(labels.file, others, i, others.class_names[kind])
            for i, kind in enumerate(others.labels.tolist())
        ]
    used = [True, True, *(any(row[column] for row in rows) for column in (2, 3))]
    table = [("path", "label", "split", "box"), *rows]
    write_csv(labels.file, [[*compress(row, used)] for row in table])


def _table_row(out: Path, images: Images, number: int, label: str) -> tuple[str, ...]:
    """Return path, label, split and box of a photo; the last two may be empty."""
    splits = images.splits if isinstance(images, LabelledImages) else None
    box = ",".join(f"{edge:g}" for edge in images.box(number) or ())
    return _path(images, number, out), label, splits[number] if splits else "", box


def write_table(labels: Labels) -> None:
    """Write a table with a row for every photo, and a summary as JSON."""
    rows: list[list[object]] = [
        ["path", "given", "label", "status", "reason", "group", "matches", "partner", "inliers"]
    ]
    rows[0].append("copy_of")
    path = partial(_path, labels.images, out=labels.file)
    for i, photo in enumerate(labels.photos):
        status = "kept" if photo.label else "dropped"
        about = photo.given, photo.label, status, labels.errors.get(i, photo.reason)
        near = path(photo.partner), photo.inliers, path(photo.copy_of)
        rows.append([path(i), *about, photo.group, photo.matches, *near])
    write_csv(labels.table, rows)
    facts = {
        **labels.summary(),
        "settings": labels.settings.model_dump(),
        "reasons_explained": REASONS,
        "merges_found": [
            {**merge._asdict(), "photos": [labels.images.ids[i] for i in merge.photos]}
            for merge in labels.merges
        ],
        "copies_found": [[labels.images.ids[i] for i in each] for each in labels.copies],
        "unreadable": list(labels.errors.values()),
    }
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    write_text(labels.file.with_suffix(".json"), text)


def _path(images: Images, number: int, out: Path) -> str:
    """Return the path of a photo, relative to the folder of the table if it is inside it.

    The path is empty for -1.
    """
    if number < 0:
        return ""
    path, folder = images.paths[number], os.path.abspath(out.parent)
    return os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path


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


def class_views(labels: Labels) -> list[ClassView]:
    """Return all classes, those with the largest share of dropped photos first.

    Without labels before, each group is a class; the photos that were dropped come last.
    """

    def class_of(each: PhotoGroup | LabelledPhoto) -> str:
        return each.given if labels.labelled else each.label or "(no class)"

    groups: dict[str, list[PhotoGroup]] = {}
    for group in labels.groups:
        groups.setdefault(class_of(group), []).append(group)
    members: dict[str, list[int]] = {}
    for number, photo in enumerate(labels.photos):
        members.setdefault(class_of(photo), []).append(number)
    views = []
    for name, numbers in members.items():
        own = groups.get(name, [])
        rows = [_group_row(group) for group in own[: GROUPS + 1]]
        if hidden := own[GROUPS + 1 :]:
            count = sum(len(group.photos) for group in hidden)
            rows.append(PhotoRow(f"{len(hidden)} further groups", (), count, False))
        if alone := [i for i in numbers if labels.photos[i].reason == NO_MATCH]:
            nearest = sorted(alone, key=lambda i: (-labels.photos[i].inliers, i))[:DROPPED]
            rows.append(PhotoRow("No match: dropped", tuple(nearest), len(alone), False))
        kept = sum(bool(labels.photos[i].label) for i in numbers)
        views.append(ClassView(name, len(numbers), kept, len(own), tuple(rows)))

    def order(view: ClassView) -> tuple[bool, float, int, str]:
        dropped = not labels.labelled and not view.kept
        return dropped, view.kept / view.total, -view.total, view.name

    return sorted(views, key=order)


def _group_row(group: PhotoGroup) -> PhotoRow:
    title = "Largest group" if group.number == 1 else f"Group {group.number}"
    if not group.label:
        title += ": dropped"
    elif not group.given:
        title = "Kept"
    else:
        title += ": kept" if group.label == group.given else f": kept as {group.label}"
    shown = KEPT if group.number == 1 or not group.given else SMALLER
    photos = group.photos
    # The photos with most matches and, of the largest group, those with the fewest.
    if len(photos) > shown and shown == KEPT:
        photos = photos[: shown - 3] + photos[-3:]
    return PhotoRow(title, photos[:shown], len(group.photos), bool(group.label))


def shown_pairs(labels: Labels, views: Iterable[ClassView]) -> list[tuple[int, int]]:
    """Return the pairs of photos whose matching points are drawn."""
    shown = (photo for view in views for row in view.rows for photo in row.photos)
    pairs = [(photo, labels.photos[photo].partner) for photo in shown]
    pairs += [merge.photos for merge in labels.merges[: MOST["merges"]]]
    for numbers in labels.copies[: MOST["copies"]]:
        pairs += [(copy, numbers[0]) for copy in numbers[1 : MOST["copies_each"]]]
    return [pair for pair in dict.fromkeys(pairs) if pair[1] >= 0]


def write_label_page(
    labels: Labels,
    matches: PhotoMatches,
    command: str,
    on_progress: Callable[[int, int], object],
) -> None:
    """Write the page next to the table of labels."""
    views = class_views(labels)
    shown = views[: MOST["classes"]]
    pairs = shown_pairs(labels, shown)
    copies = labels.copies[: MOST["copies"]]
    numbers = sorted(
        {i for pair in pairs for i in pair}
        | {i for view in shown for row in view.rows for i in row.photos}
        | {i for each in copies for i in each[: MOST["copies_each"]]}
    )
    place = {number: index for index, number in enumerate(numbers)}
    paths = [labels.images.paths[i] for i in numbers]
    pictures = thumbnails(paths, [], paths, on_progress)
    names = short_names(labels.images.ids)
    write_page(
        labels.page,
        "labels.html",
        ["style.css", "matches.css", "labels.css"],
        ["matches.js", "labels.js"],
        title=f"Labels: {labels.file.name}",
        facts={
            "Photos": f"{len(labels):,}",
            "Date": f"{datetime.now():%Y-%m-%d %H:%M}",
            "Command": command,
        },
        summary=labels.summary(),
        reasons=REASONS,
        used=labels.settings,
        labelled=labels.labelled,
        views=views,
        merges=labels.merges,
        copies=[(each, len({labels.photos[i].given for i in each}) > 1) for each in labels.copies],
        photos=labels.photos,
        unreadable=[labels.errors[i] for i in sorted(labels.errors)],
        most=MOST,
        names=names,
        place=place,
        pairs={pair: number for number, pair in enumerate(pairs)},
        data={
            "photos": [pictures[path] for path in paths],
            "names": [names[i] for i in numbers],
            "pairs": _pairs(matches, pairs, place),
        },
    )


def _pairs(
    matches: PhotoMatches, pairs: Sequence[tuple[int, int]], place: dict[int, int]
) -> list[list[Any]]:
    """Return photos, number of inliers and points in thousandths of the sizes, for each pair."""
    sizes = matches.store.sizes.astype(np.float64)
    found = []
    for (one, two), match in zip(pairs, matching_points(matches.store, pairs), strict=True):
        points = np.concatenate([match.query_points, match.points], axis=1)
        kept = points[np.linspace(0, len(points) - 1, min(POINTS, len(points))).astype(int)]
        parts = np.clip((kept + 0.5) / np.concatenate([sizes[one], sizes[two]]), 0, 1)
        numbers = np.rint(1000 * parts).astype(int).ravel().tolist()
        found.append([place[one], place[two], match.inliers, numbers])
    return found
