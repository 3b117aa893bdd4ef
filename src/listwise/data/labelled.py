"""Sets of images, with and without labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from listwise.data.images import Box
from listwise.data.photos import PhotoFile
from listwise.errors import InputError


@dataclass(frozen=True, eq=False)
class Images:
    """N image files.

    `paths` are absolute, `ids` are the paths as the source writes them (relative to the folder
    in case of a folder), `boxes` are the parts of the images to use, None for all of one.
    `attributes` are the other columns of a source for each image, as text.
    """

    paths: tuple[str, ...]
    ids: tuple[str, ...]
    boxes: tuple[Box | None, ...] | None
    attributes: tuple[Mapping[str, str], ...] | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.paths)

    def box(self, index: int) -> Box | None:
        """The part of image `index` that is meant, None for all of it."""
        return None if self.boxes is None else self.boxes[index]

    def file(self, index: int) -> PhotoFile:
        """The file of image `index`, with its box."""
        return PhotoFile(self.paths[index], self.box(index))

    def files(self) -> list[PhotoFile]:
        """The files of all images, with their boxes."""
        return [self.file(index) for index in range(len(self))]

    def subset(self, indices: npt.ArrayLike) -> Self:
        """The images at these positions, in this order."""
        chosen = np.asarray(indices, dtype=np.int64).tolist()
        return replace(
            self,
            paths=tuple(self.paths[i] for i in chosen),
            ids=tuple(self.ids[i] for i in chosen),
            boxes=None if self.boxes is None else tuple(self.boxes[i] for i in chosen),
            attributes=self.attributes and tuple(self.attributes[i] for i in chosen),
        )


@dataclass(frozen=True, eq=False)
class LabelledImages(Images):
    """N image files of K classes.

    `labels` is int64 [N] with values 0 to K-1, `class_names` names them and is sorted; every
    class has an image. `splits` names the part each image belongs to (train, val ...), None
    where the source does not say.
    """

    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    splits: tuple[str, ...] | None

    @classmethod
    def from_names(
        cls, images: Images, labels: Sequence[str], splits: Sequence[str] | None
    ) -> "LabelledImages":
        """Images with the name of each one's class, and its split if there are any."""
        names, numbers = np.unique(np.array(labels, dtype=str), return_inverse=True)
        return cls(
            images.paths,
            images.ids,
            images.boxes,
            labels=numbers.reshape(-1).astype(np.int64),
            class_names=tuple(names.tolist()),
            splits=tuple(splits) if splits else None,
        )

    def class_sizes(self) -> npt.NDArray[np.int64]:
        """Number of images of each class: int64 [K]."""
        return np.bincount(self.labels, minlength=len(self.class_names)).astype(np.int64)

    def subset(self, indices: npt.ArrayLike) -> Self:
        """The images at these positions, in this order, the classes left renumbered from 0."""
        chosen = np.asarray(indices, dtype=np.int64)
        kept, labels = np.unique(self.labels[chosen], return_inverse=True)
        return replace(
            super().subset(chosen),
            labels=labels.reshape(-1).astype(np.int64),
            class_names=tuple(self.class_names[k] for k in kept),
            splits=None if self.splits is None else tuple(self.splits[i] for i in chosen),
        )

    def of_split(self, name: str) -> Self:
        """The images of one split."""
        if self.splits is None:
            raise InputError(
                f"the images have no split column, so no split {name!r}; "
                "add one to the table or leave the split out"
            )
        chosen = [i for i, split in enumerate(self.splits) if split == name]
        if not chosen:
            seen = ", ".join(sorted(set(self.splits)))
            raise InputError(f"no image has the split {name!r}; the splits are: {seen}")
        return self.subset(chosen)


def hold_out_classes(
    images: LabelledImages, fraction: float, seed: int
) -> tuple[LabelledImages, LabelledImages]:
    """Divide into training and validation images by whole classes, drawn by seed.

    About `fraction` of the classes are held out, never one with a single image, which has
    nothing to be found. Each side keeps at least two classes of two or more images.
    """
    if not 0.0 < fraction < 1.0:
        raise InputError(f"the fraction of classes to hold out must lie in (0, 1), not {fraction}")
    several = np.flatnonzero(images.class_sizes() >= 2)
    if len(several) < 4:
        raise InputError(
            "to hold out classes for validation, at least 4 classes of two or more images are "
            f"needed; there are {len(several)}"
        )
    count = min(max(round(fraction * len(images.class_names)), 2), len(several) - 2)
    held_out = np.random.default_rng(seed).choice(several, size=count, replace=False)
    val = np.isin(images.labels, held_out)
    return images.subset(np.flatnonzero(~val)), images.subset(np.flatnonzero(val))
