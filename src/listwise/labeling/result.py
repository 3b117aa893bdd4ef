"""The labels that `label` found, and what happened to each photo."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from listwise.data import Images, LabelledImages
from listwise.settings import LabelSettings

Progress = Callable[[str, int, int], object]
"""A function of a stage, the number of steps done, and their total number."""

NO_MATCH = "no match"
SMALLER_GROUP = "smaller group"
FEW_PHOTOS = "few photos"
UNREADABLE = "unreadable"
REASONS = {
    NO_MATCH: "matches no other photo of its class",
    SMALLER_GROUP: "matches other photos of its class, but not those of the largest group",
    FEW_PHOTOS: "its group has fewer photos than a class needs",
    UNREADABLE: "cannot be read",
}


class LabelledPhoto(NamedTuple):
    """What happened to a photo.

    Attributes:
        given: the label before; empty if the photos had none.
        label: the label now; empty for a photo that was dropped.
        reason: why it was dropped, one of `REASONS`; empty for a photo that was kept.
        group: number of its group within its class, 1 for the largest; 0 if it matches no photo.
        matches: number of photos of its class that it matched.
        partner: number of the photo with most inliers of those it was compared with; -1 for none.
        inliers: number of inliers with that photo.
        copy_of: number of a photo that is the same or almost the same; -1 for none.
    """

    given: str
    label: str
    reason: str
    group: int
    matches: int
    partner: int
    inliers: int
    copy_of: int = -1


class PhotoGroup(NamedTuple):
    """Photos that match each other.

    Attributes:
        given: the label of its photos before; empty if they had none.
        number: 1 for the largest group of its class.
        photos: numbers of its photos, those with most matches first.
        label: the label now; empty for a group that was dropped.
    """

    given: str
    number: int
    photos: tuple[int, ...]
    label: str


class ClassMerge(NamedTuple):
    """Two classes that seem to show the same thing.

    Attributes:
        one: label of the larger class.
        two: label of the other class.
        photos: numbers of the two photos that match best, one of each class.
        inliers: their number of inliers.
        matches: number of pairs of photos of the two classes that match.
        merged: whether the classes were merged.
    """

    one: str
    two: str
    photos: tuple[int, int]
    inliers: int
    matches: int
    merged: bool


@dataclass(frozen=True, eq=False)
class Labels:
    """Labels from geometry; `label` returns them.

    Attributes:
        images: the N photos that were examined.
        photos: what happened to each of them.
        groups: groups of photos that match each other, by class and size.
        merges: pairs of classes that seem to show the same thing.
        copies: numbers of photos that are the same or almost the same, for each set of copies.
        errors: number of each photo that cannot be read -> reason.
        settings: the thresholds that were used.
        file: the table of labels that was written.
        compared: number of pairs of photos that were compared.
    """

    images: Images
    photos: tuple[LabelledPhoto, ...]
    groups: tuple[PhotoGroup, ...]
    merges: tuple[ClassMerge, ...]
    copies: tuple[tuple[int, ...], ...]
    errors: dict[int, str]
    settings: LabelSettings
    file: Path
    compared: int

    @property
    def labelled(self) -> bool:
        """Whether the photos had labels before."""
        return isinstance(self.images, LabelledImages)

    def __len__(self) -> int:
        return len(self.photos)

    @property
    def classes(self) -> dict[str, list[str]]:
        """Label -> paths of the photos that were kept."""
        found: dict[str, list[str]] = {}
        for path, photo in zip(self.images.paths, self.photos, strict=True):
            if photo.label:
                found.setdefault(photo.label, []).append(path)
        return dict(sorted(found.items()))

    @property
    def page(self) -> Path:
        """The page to look through."""
        return self.file.with_suffix(".html")

    @property
    def table(self) -> Path:
        """The table with a row for every photo, kept or dropped."""
        return self.file.with_suffix(".photos.csv")

    def summary(self) -> dict[str, Any]:
        """Return the counts that matter, by name."""
        kept = [photo for photo in self.photos if photo.label]
        dropped = Counter(photo.reason for photo in self.photos if not photo.label)
        return {
            "photos": len(self),
            "kept": len(kept),
            "dropped": len(self) - len(kept),
            "reasons": {reason: dropped[reason] for reason in REASONS if dropped[reason]},
            "classes_before": len({photo.given for photo in self.photos if photo.given}),
            "classes": len({photo.label for photo in kept}),
            "split": sum(group.number > 1 and bool(group.label) for group in self.groups)
            if self.labelled
            else 0,
            "merges": len(self.merges),
            "copies": sum(len(numbers) - 1 for numbers in self.copies),
            "pairs_compared": self.compared,
        }


def short_names(ids: Sequence[str]) -> list[str]:
    """Return ids without the folder that all of them share."""
    lowest, highest = min(ids), max(ids)  # what these two share, all share
    alike = [i for i in range(len(lowest) + 1) if highest.startswith(lowest[:i])]
    start = lowest[: alike[-1]].rfind("/") + 1
    return [name[start:] for name in ids]
