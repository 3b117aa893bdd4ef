"""Choose the label of each photo from the groups of photos that match."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from listwise.data import Images, LabelledImages
from listwise.labeling.candidates import Numbers
from listwise.labeling.result import (
    FEW_PHOTOS,
    NO_MATCH,
    SMALLER_GROUP,
    UNREADABLE,
    ClassMerge,
    LabelledPhoto,
    Labels,
    PhotoGroup,
    short_names,
)
from listwise.labeling.rounds import PhotoMatches, class_groups
from listwise.settings import LabelSettings


def choose_labels(
    images: Images, matches: PhotoMatches, settings: LabelSettings, out: Path
) -> Labels:
    """Keep the largest group of each class, or all groups, and merge classes by choice."""
    given = images.class_names if isinstance(images, LabelledImages) else ("",)
    groups = _groups(images, given, matches, settings)
    merges = _merges(matches, groups, settings)
    if settings.merge:
        names = _merged_names(merges)
        groups = [group._replace(label=names.get(group.label, group.label)) for group in groups]
        merges = [merge._replace(merged=True) for merge in merges]
    errors = matches.store.errors()
    return Labels(
        images=images,
        photos=tuple(_photos(given, matches, groups, errors, settings)),
        groups=tuple(groups),
        merges=tuple(merges),
        copies=matches.copies,
        errors=errors,
        settings=settings,
        file=out,
        compared=len(matches.record),
    )


def _groups(
    images: Images, given: Sequence[str], matches: PhotoMatches, settings: LabelSettings
) -> list[PhotoGroup]:
    """Number and name the groups of two or more photos, by class and size."""
    used, names = set(given), short_names(images.ids)

    def unused(wanted: str) -> str:
        """Return a name that no class has yet, if necessary with a number."""
        found, number = wanted, 2
        while found in used:
            found, number = f"{wanted}-{number}", number + 1
        used.add(found)
        return found

    found = []
    for kind, groups in class_groups(matches, settings).items():
        for number, photos in enumerate(groups, 1):
            name = ""
            if len(photos) < settings.min_photos:
                pass
            elif not isinstance(images, LabelledImages):
                name = unused(str(PurePosixPath(names[photos[0]]).with_suffix("")))
            elif number == 1:
                name = given[kind]
            elif settings.all_groups:
                name = unused(f"{given[kind]}/{number}")
            found.append(PhotoGroup(given[kind], number, tuple(photos), name))
    return found


def _merges(
    matches: PhotoMatches, groups: list[PhotoGroup], settings: LabelSettings
) -> list[ClassMerge]:
    """Return pairs of classes whose photos match, best first.

    One strong match or two weaker ones are needed: a single weak match may be chance.
    """
    place = np.full(len(matches.labels), -1, np.int64)
    for number, group in enumerate(groups):
        if group.label:
            place[list(group.photos)] = number
    pairs, inliers = matches.record.links(settings.inliers)
    copy = np.arange(len(matches.labels))
    for numbers in matches.copies:  # a photo with two labels does not show that they mean the same
        copy[list(numbers)] = numbers[0]
    between = (
        (place[pairs[:, 0]] != place[pairs[:, 1]])
        & (copy[pairs[:, 0]] != copy[pairs[:, 1]])
        & (place[pairs].min(axis=1) >= 0)
        & (matches.labels[pairs[:, 0]] != matches.labels[pairs[:, 1]])
    )
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for (one, two), count in zip(pairs[between].tolist(), inliers[between].tolist(), strict=True):
        ends = sorted((one, two), key=lambda photo: (-len(groups[place[photo]].photos), photo))
        key = int(place[ends[0]]), int(place[ends[1]])
        if (key[1], key[0]) in found:
            key, ends = (key[1], key[0]), ends[::-1]
        found.setdefault(key, []).append((count, ends[0], ends[1]))
    merges = []
    for (first, second), links in found.items():
        best = max(links, key=lambda link: (link[0], -link[1], -link[2]))
        if best[0] >= settings.strong or len(links) > 1:
            names = groups[first].label, groups[second].label
            merges.append(ClassMerge(*names, best[1:], best[0], len(links), False))
    return sorted(merges, key=lambda merge: (-merge.inliers, merge.one, merge.two))


def _merged_names(merges: list[ClassMerge]) -> dict[str, str]:
    """Return the new name of each class that is merged: the name of the first class."""
    names: dict[str, str] = {}
    for merge in merges:
        one, two = (names.get(name, name) for name in (merge.one, merge.two))
        names |= {name: one for name, now in [*names.items(), (two, two)] if now == two}
    return names


def _photos(
    given: Sequence[str],
    matches: PhotoMatches,
    groups: list[PhotoGroup],
    errors: dict[int, str],
    settings: LabelSettings,
) -> Iterator[LabelledPhoto]:
    """Tell what happened to each photo."""
    group_of = {photo: group for group in groups for photo in group.photos}
    original = {copy: numbers[0] for numbers in matches.copies for copy in numbers[1:]}
    links, _ = matches.links(settings.inliers)
    number = np.bincount(links.ravel(), minlength=len(matches.labels)).tolist()
    partner, most = _best_partners(matches)
    for photo, kind in enumerate(matches.labels.tolist()):
        group = group_of.get(photo)
        reason = ""
        if photo in errors:
            reason = UNREADABLE
        elif group is None:
            reason = NO_MATCH
        elif not group.label:
            reason = FEW_PHOTOS if len(group.photos) < settings.min_photos else SMALLER_GROUP
        yield LabelledPhoto(
            given[kind],
            group.label if group else "",
            reason,
            group.number if group else 0,
            number[photo],
            int(partner[photo]),
            int(most[photo]),
            original.get(photo, -1),
        )


def _best_partners(matches: PhotoMatches) -> tuple[Numbers, Numbers]:
    """Return the partner of each photo with most inliers, and their number: both [N]."""
    pairs, inliers = matches.links(1)
    partner = np.full(len(matches.labels), -1, np.int64)
    most = np.zeros(len(matches.labels), np.int64)
    pairs, inliers = np.concatenate([pairs, pairs[:, ::-1]]), np.tile(inliers, 2)
    order = np.argsort(inliers, kind="stable")  # the last one written to a place stays
    partner[pairs[order, 0]], most[pairs[order, 0]] = pairs[order, 1], inliers[order]
    return partner, most
