"""Data sets on disk, by name or by the layout of their folder, and photos from any source."""

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from listwise.data.catalog.entries import ENTRIES, DataSetEntry
from listwise.data.catalog.ground_truth import read_ground_truth, read_oxford_ground_truth
from listwise.data.catalog.layouts import LABELLED, find_photos, read_distractors, read_layout
from listwise.data.images import IMAGE_SUFFIXES, list_images
from listwise.data.labelled import Images, LabelledImages
from listwise.data.memory import Table, as_photo, is_one_in_memory, is_table
from listwise.data.photos import Photo
from listwise.data.sources import read_images, read_labelled
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries

DATA_FOLDER = Path("data")
"""The default folder of downloaded data sets, with a folder for each."""

Photos = Photo | Images | Sequence[Photo] | Table
"""Photos: one, a list or a batch of arrays; a folder, a text list or the name of a data set; or a
table, which may be a file, a DataFrame or a list of dictionaries."""

_JUDGEMENTS = "gnd_*.pkl"
_QUERIES = ("*_query.txt", "*/*_query.txt")


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A database of N photos, Q queries, and the positives of each query.

    If `queries is database`, each photo is searched among the others.

    Attributes:
        name: name of the benchmark.
        database: the N photos to search in.
        queries: the Q photos to search with, which may have boxes.
        judged: the ground truth of the Q queries.
        labelled: whether the positives are the photos with the query's label; otherwise they are
            listed for each query.
    """

    name: str
    database: Images
    queries: Images
    judged: JudgedQueries
    labelled: bool = False

    @classmethod
    def of_labels(
        cls, name: str, database: LabelledImages, queries: LabelledImages | None = None
    ) -> "Benchmark":
        """Create a benchmark from labels: photos searched among themselves, or separate queries."""
        searched = database if queries is None else queries
        # By class names, because the class numbers of two parts may differ.
        labels, others = (np.array(part.class_names)[part.labels] for part in (searched, database))
        judged = JudgedQueries.labelled(
            labels,
            None if queries is None else others,
            names=database.ids,
            queries=searched.ids,
            boxes=searched.boxes,
        )
        return cls(name, database, searched, judged, labelled=True)

    @property
    def photo_count(self) -> int:
        """Number of photos that a model has to describe for this benchmark."""
        return len(self.database) + (0 if self.queries is self.database else len(self.queries))

    def subset(self, queries: ArrayLike, database: ArrayLike) -> "Benchmark":
        """Return the queries and database photos at these positions."""
        kept = self.database.subset(database)
        return replace(
            self,
            database=kept,
            queries=kept if self.queries is self.database else self.queries.subset(queries),
            judged=self.judged.subset(queries, database),
        )


@dataclass(frozen=True)
class Dataset:
    """A data set in a folder; `entry` is its catalog entry, None for a benchmark of your own."""

    name: str
    folder: Path
    layout: str
    entry: DataSetEntry | None = None

    def check(self) -> list[str]:
        """Return the problems, one line each; empty if there are none. Photos are not opened."""
        try:
            parts = self._parts()
        except InputError as error:
            return [str(error)]
        wanted = self.entry.counts if self.entry else {}
        problems = [
            f"{self.name}: the {part} part has {len(parts.get(part, ()))} images instead of {count}"
            for part, count in wanted.items()
            if len(parts.get(part, ())) != count
        ]
        paths = sorted({path for part in parts.values() for path in part})
        missing = [path for path in paths if not os.path.exists(path)]
        if missing:
            problems.append(
                f"{self.name}: {len(missing)} of {len(paths)} photos are missing, the first is "
                f"{missing[0]}"
            )
        return problems

    def benchmark(self) -> Benchmark:
        """Return the benchmark of this data set: database, queries and ground truth.

        For a data set with classes, this is its test part, searched among itself (for In-shop, the
        gallery searched with the queries).
        """
        if self.layout in ("revisited", "oxford"):
            return self._judged()
        if self.layout not in LABELLED:
            raise InputError(
                f"{self.name} is a set of distractors without queries: evaluate on a benchmark"
            )
        images = self.labelled()
        if self.layout == "inshop":
            database, queries = images.of_split("gallery"), images.of_split("query")
            return Benchmark.of_labels(self.name, database, queries)
        if "test" not in (images.splits or ()):
            raise InputError(
                f"{self.name} is for training and has no test part: evaluate on a benchmark"
            )
        return Benchmark.of_labels(self.name, images.of_split("test"))

    def labelled(self, split: str | None = None) -> LabelledImages:
        """Return the images and classes of one split, or of all."""
        if self.layout not in LABELLED:
            raise InputError(f"{self.name} is a benchmark or a set of distractors, without classes")
        images = read_layout(self.layout, self.folder)
        return images if split is None else images.of_split(split)

    def images(self) -> Images:
        """Return all photos of the database, without labels."""
        if self.layout == "distractors":
            return read_distractors(self.folder)
        if self.layout in LABELLED:
            return self.labelled()
        return self.benchmark().database

    def _parts(self) -> dict[str, Sequence[str]]:
        if self.layout in LABELLED:
            images = self.labelled()
            return {name: images.of_split(name).paths for name in set(images.splits or ())}
        if self.layout == "distractors":
            return {"database": self.images().paths}
        benchmark = self.benchmark()
        return {"database": benchmark.database.paths, "queries": benchmark.queries.paths}

    def _judged(self) -> Benchmark:
        """Return a benchmark whose judgments are in files, `gnd_*.pkl` or `*_query.txt`."""
        photos = self.folder / "jpg"
        if self.layout == "revisited":
            found = sorted(self.folder.glob(_JUDGEMENTS))
            judged = read_ground_truth(
                self.folder / self.entry.marks[0] if self.entry else found[0]
            )
        else:
            place = next(path for mark in _QUERIES for path in self.folder.glob(mark)).parent
            broken = self.entry.broken if self.entry else frozenset()
            stems = {path.stem for path in list_images(photos)} - broken
            judged = read_oxford_ground_truth(place, sorted(stems))
        names, queries = judged.names, judged.queries
        return Benchmark(
            self.name,
            Images(tuple(find_photos(photos, names)), tuple(names), None),
            Images(tuple(find_photos(photos, queries)), tuple(queries), tuple(judged.boxes)),
            judged,
        )


def find_dataset(name_or_path: str | Path, root: str | Path | None = None) -> Dataset:
    """Find a data set on disk by its folder or by its name.

    A folder is recognized by its layout: one of the catalog, or `gnd_*.pkl` (or `*_query.txt`
    files) beside `jpg/`.

    Args:
        name_or_path: the folder, or a name of `listwise download --list`.
        root: for a name, the folder that contains the data set; `data` by default.

    Raises:
        InputError: the data set is not there; the message explains how to get it.
    """
    folder = Path(name_or_path).expanduser()
    known = find_entry(str(name_or_path))
    if folder.is_dir():
        found = recognize(folder)
        if found is not None:
            return found
        if known is None:
            raise InputError(
                f"{folder} is not a known data set: a benchmark contains gnd_NAME.pkl and jpg/; "
                "listwise download --list shows the others"
            )
    if known is None:
        names = list(ENTRIES)
        near = difflib.get_close_matches(str(name_or_path), names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(names)}"
        raise InputError(f"{name_or_path}: no such folder, and no data set has this name; {hint}")
    root = Path(root) if root is not None else DATA_FOLDER
    for candidate in (root / known.name, root / str(name_or_path), root):
        found = recognize(candidate)
        if found is not None and found.entry is known:
            return found
    if not known.files:
        raise InputError(f"{known.name} is not in {root / known.name}: {known.how}")
    raise InputError(
        f"{known.name} is not in {root / known.name}: run listwise download {known.name} "
        f"--to {root / known.name}, or give its folder"
    )


def labelled_of(
    source: str | Path,
    root: str | Path | None = None,
    split_column: str = "split",
    levels: bool = False,
) -> LabelledImages:
    """Read labelled photos of a data set by name or folder, or of any `read_labelled` source."""
    check_named(source)
    if _is_known(source):
        return find_dataset(source, root).labelled()
    return read_labelled(source, split_column=split_column, levels=levels)


def check_named(source: object) -> None:
    """Refuse labelled photos that are not a path or a name."""
    if not isinstance(source, str | Path):
        raise InputError(
            "labelled photos must be a folder, a table in a file or the name of a data set, not "
            f"{type(source).__name__}: write a DataFrame to a file with its method to_csv"
        )


def photos_of(source: str | Path | Table, root: str | Path | None = None) -> Images:
    """Read photos of a data set by name or folder, or of any `read_images` source."""
    if isinstance(source, str | Path) and _is_known(source):
        return find_dataset(source, root).images()
    return read_images(source)


def _is_known(source: str | Path) -> bool:
    """Return whether this is the name of a data set, or a folder that contains one."""
    path = Path(source).expanduser()
    if path.exists():
        return recognize(path) is not None
    return find_entry(str(source)) is not None


def find_entry(name: str) -> DataSetEntry | None:
    """Return the catalog entry of a name, in upper or lower case, with - or _; or None."""
    plain = name.lower().replace("_", "-")
    return next((entry for key, entry in ENTRIES.items() if key.lower() == plain), None)


def recognize(folder: Path) -> Dataset | None:
    """Return the data set in a folder by its layout, None if the layout is unknown."""
    if not folder.is_dir():
        return None
    for entry in ENTRIES.values():
        if any(any(folder.glob(mark)) for mark in entry.marks):
            return Dataset(entry.name, folder, entry.layout, entry)
    name = folder.resolve().name
    if any(folder.glob(_JUDGEMENTS)):
        return Dataset(name, folder, "revisited")
    if any(any(folder.glob(pattern)) for pattern in _QUERIES):
        return Dataset(name, folder, "oxford")
    return None


def is_one_photo(photos: Photos) -> bool:
    """Return whether this is one photo, rather than a list or a batch of photos."""
    if isinstance(photos, str | Path):
        path = Path(photos).expanduser()
        return path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()
    return is_one_in_memory(photos)


def list_photos(photos: Photos) -> Images | list[Photo]:
    """Return photos one by one: those of a list, a folder, a table, a text list or a data set.

    A list that contains only files becomes `Images`; any other list stays a list.
    """
    if isinstance(photos, Images):
        return photos
    given: list[Any] = [photos]
    if not is_one_photo(photos):
        if isinstance(photos, str | Path) or is_table(photos):
            return photos_of(photos)  # type: ignore[arg-type]
        if not isinstance(photos, Iterable):
            as_photo(photos)  # it says what a photo can be
        given = list(photos)  # type: ignore[arg-type]
    if all(isinstance(photo, str | Path) for photo in given):
        return image_files(given)
    return given


def image_files(files: Sequence[str | Path]) -> Images:
    """Return image files as `Images`; their ids are the paths as given."""
    paths = tuple(str(Path(file).expanduser().absolute()) for file in files)
    return Images(paths, tuple(map(str, files)), None)
