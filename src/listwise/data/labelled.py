"""`Images` and `LabelledImages`: lists of image files, without and with labels, and their check."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from listwise.data.images import Box, ImageError, image_size
from listwise.data.memory import Table, cell_text, table_rows
from listwise.data.photos import PhotoFile
from listwise.errors import InputError
from listwise.progress import count_of


@dataclass(frozen=True, eq=False)
class Images:
    """N image files.

    Attributes:
        paths: N absolute paths.
        ids: N paths as written in the source; relative to the folder if the source is a folder.
        boxes: the part of each image to use, None for the whole image; None if no image has one.
        attributes: the other columns of the source for each image, as text.
        ignored: how many other files a folder contains, by their endings.
        folder: the absolute path of the folder that was read; empty for other sources.
    """

    paths: tuple[str, ...]
    ids: tuple[str, ...]
    boxes: tuple[Box | None, ...] | None
    attributes: tuple[Mapping[str, str], ...] | None = field(default=None, kw_only=True)
    ignored: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    folder: str = field(default="", kw_only=True)

    def __len__(self) -> int:
        return len(self.paths)

    def box(self, index: int) -> Box | None:
        """Return the box of image `index`, None for the whole image."""
        return None if self.boxes is None else self.boxes[index]

    def file(self, index: int) -> PhotoFile:
        """Return the file of image `index`, with its box."""
        return PhotoFile(self.paths[index], self.box(index))

    def files(self) -> list[PhotoFile]:
        """Return the files of all images, with their boxes."""
        return [self.file(index) for index in range(len(self))]

    def named(self, ids: Sequence[str] | None = None, attributes: Any = None) -> Self:
        """Return the images with other ids, and with further attributes.

        Args:
            ids: N different ids.
            attributes: the attributes of all images, or N of them, also as a DataFrame.
        """
        of_all = attributes is None or isinstance(attributes, Mapping)
        new: Table = [attributes or {}] * len(self) if of_all else table_rows(attributes)
        names = self.ids if ids is None else tuple(map(str, ids))
        for name, count in (("ids", len(names)), ("attributes", len(new))):
            if count != len(self):
                what = f"{count} values for {count_of(len(self), 'photo')}"
                raise InputError(f"`{name}` has {what}: give one per photo")
        if ids is not None and len(set(names)) < len(names):
            raise InputError("`ids` has the same id twice: give each photo its own")
        texts = (
            {str(name): text for name in each if (text := cell_text(each[name]))} for each in new
        )
        old: Sequence[Mapping[str, str]] = self.attributes or [{}] * len(self)
        merged = tuple(dict(each) | text for each, text in zip(old, texts, strict=True))
        # A folder with other ids cannot be read again.
        folder = self.folder if ids is None else ""
        attributes = merged if any(merged) else None
        return replace(self, ids=names, attributes=attributes, folder=folder)

    def subset(self, indices: npt.ArrayLike) -> Self:
        """Return the images at these positions, in this order."""
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

    Attributes:
        labels: the class of each image, int64 [N] with values 0 to K-1.
        class_names: K names, sorted; every class has at least one image.
        splits: the split of each image ("train", "val" ...), None if the source has no splits.
    """

    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    splits: tuple[str, ...] | None

    @classmethod
    def from_names(
        cls, images: Images, labels: Sequence[str], splits: Sequence[str] | None
    ) -> "LabelledImages":
        """Combine N images with the names of their classes, and their splits if given."""
        names, numbers = np.unique(np.array(labels, dtype=str), return_inverse=True)
        return cls(
            images.paths,
            images.ids,
            images.boxes,
            labels=numbers.reshape(-1).astype(np.int64),
            class_names=tuple(names.tolist()),
            splits=tuple(splits) if splits else None,
            ignored=images.ignored,
        )

    def class_sizes(self) -> npt.NDArray[np.int64]:
        """Return the number of images of each class: int64 [K]."""
        return np.bincount(self.labels, minlength=len(self.class_names)).astype(np.int64)

    def subset(self, indices: npt.ArrayLike) -> Self:
        """Return the images at these positions; the remaining classes are renumbered from 0."""
        chosen = np.asarray(indices, dtype=np.int64)
        kept, labels = np.unique(self.labels[chosen], return_inverse=True)
        return replace(
            super().subset(chosen),
            labels=labels.reshape(-1).astype(np.int64),
            class_names=tuple(self.class_names[k] for k in kept),
            splits=None if self.splits is None else tuple(self.splits[i] for i in chosen),
        )

    def of_split(self, name: str) -> Self:
        """Return the images of one split."""
        if self.splits is None:
            raise InputError(
                f"the photos have no splits, but the split {name!r} was given: add a split column "
                "to the table, or leave `split` out"
            )
        chosen = [i for i, split in enumerate(self.splits) if split == name]
        if not chosen:
            seen = ", ".join(sorted(set(self.splits)))
            raise InputError(f"no photo has the split {name!r}; the splits are: {seen}")
        return self.subset(chosen)


def label_levels(class_names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the groups of classes whose names have levels, such as `bird/sparrow`.

    Args:
        class_names: K names, each with the same number L of parts that "/" separates.

    Returns:
        Int64 [K, L]: for each class and level, the number of its group, from the coarsest level to
        the class itself. Groups of different coarser groups have different numbers.

    Examples:
        >>> label_levels(["bird/sparrow", "bird/wren", "fish/cod"])
        array([[0, 0],
               [0, 1],
               [1, 2]])
    """
    parts = [name.split("/") for name in class_names]
    depth = len(parts[0])
    for name, each in zip(class_names, parts, strict=True):
        if len(each) != depth or not all(part.strip() for part in each):
            raise InputError(
                f"labels differ in their number of levels: {name!r} has {len(each)}, "
                f"{class_names[0]!r} has {depth}: "
                "give all labels the same number of levels, such as bird/sparrow"
            )
    groups = [["/".join(each[: level + 1]) for each in parts] for level in range(depth)]
    numbers = [np.unique(names, return_inverse=True)[1].reshape(-1) for names in groups]
    return np.stack(numbers, axis=1).astype(np.int64)


def hold_out_classes(
    images: LabelledImages, fraction: float, seed: int
) -> tuple[LabelledImages, LabelledImages]:
    """Divide images into training and validation images by whole classes, at random.

    Classes with a single image are not held out, because a search cannot find another image of
    them. Each side has at least two classes of two or more images. If there are only two or three
    such classes, images of each class are held out instead.

    Args:
        images: the labelled images.
        fraction: share of the classes or images to hold out, between 0 and 1.
        seed: seed of the random choice.

    Returns:
        Training images, validation images.
    """
    if not 0.0 < fraction < 1.0:
        raise InputError(f"`fraction` must be between 0 and 1, not {fraction}")
    several = np.flatnonzero(images.class_sizes() >= 2)
    generator = np.random.default_rng(seed)
    if len(several) < 4:
        parts = [np.flatnonzero(images.labels == kind) for kind in several]
        parts = [generator.permutation(part) for part in parts if len(part) >= 4]
        if len(parts) < 2:
            raise InputError(
                "holding out photos for validation needs 4 classes of two or more photos, or 2 "
                f"classes of four or more, but there are {len(several)} and {len(parts)}"
            )
        counts = [min(max(round(fraction * len(part)), 2), len(part) - 2) for part in parts]
        chosen = np.concatenate([part[:n] for part, n in zip(parts, counts, strict=True)])
        val = np.isin(np.arange(len(images)), chosen)
        return images.subset(np.flatnonzero(~val)), images.subset(np.flatnonzero(val))
    count = min(max(round(fraction * len(images.class_names)), 2), len(several) - 2)
    held_out = generator.choice(several, size=count, replace=False)
    val = np.isin(images.labels, held_out)
    return images.subset(np.flatnonzero(~val)), images.subset(np.flatnonzero(val))


@dataclass(frozen=True, eq=False)
class ImageReport:
    """The result of `check_images`.

    Attributes:
        sizes: widths and heights of the N usable images or their boxes, int64 [N, 2].
        broken: an error for each unusable image.
        single: names of the classes with only one usable image.
    """

    sizes: npt.NDArray[np.int64]
    broken: tuple[ImageError, ...]
    single: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the problems, one sentence each; empty if there are none."""
        lines = []
        if count := len(self.broken):
            named = first_names([f"{error.path} ({error.reason})" for error in self.broken], "; ")
            lines.append(f"skipped {count_of(count, 'photo')} that cannot be used: {named}")
        if count := len(self.single):
            what = count_of(count, "class has", "classes have")
            named = first_names(self.single, ", ")
            lines.append(f"{what} only one photo, so a search cannot find another: {named}")
        return lines


ImagesT = TypeVar("ImagesT", bound=Images)


def check_images(
    images: ImagesT, strict: bool = False, workers: int | None = None
) -> tuple[ImagesT, ImageReport]:
    """Read the header of every file, and return the usable images and a report.

    Damage after the header is found only when an image is decoded.

    Args:
        images: N images, labelled or not.
        strict: raise the error of the first unusable image.
        workers: number of threads; chosen from the number of cores by default.

    Returns:
        The usable images, and an `ImageReport`.

    Raises:
        ImageError: with `strict`, an image is unusable.
        InputError: no image is usable.
    """
    usable: list[int] = []
    sizes: list[tuple[int, int]] = []
    broken: list[ImageError] = []
    with ThreadPoolExecutor(workers) as pool:
        for index, found in enumerate(pool.map(_size_or_error, images.files())):
            if isinstance(found, ImageError):
                if strict:
                    pool.shutdown(cancel_futures=True)
                    raise found
                broken.append(found)
            else:
                usable.append(index)
                sizes.append(found)
    if not usable:
        first = f"; the first: {broken[0]}" if broken else ""
        raise InputError(f"none of the {len(images)} photos can be used{first}")
    kept = images.subset(usable)
    single: tuple[str, ...] = ()
    if isinstance(kept, LabelledImages):
        single = tuple(kept.class_names[k] for k in np.flatnonzero(kept.class_sizes() == 1))
    return kept, ImageReport(np.array(sizes, dtype=np.int64), tuple(broken), single)


def _size_or_error(file: PhotoFile) -> tuple[int, int] | ImageError:
    try:
        return image_size(file.path, file.box)
    except ImageError as error:
        return error


def first_names(names: Sequence[str], separator: str) -> str:
    """Join the first five names, and count the rest."""
    shown = separator.join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
