"""An index of photos: add photos, search for similar ones, and mark the results."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from listwise.calibration import Calibration
from listwise.data import Images
from listwise.data.catalog import photos_of
from listwise.data.images import Box
from listwise.data.photos import Photo
from listwise.errors import InputError, validated
from listwise.progress import counting
from listwise.search.checking import CheckResult, check_store
from listwise.search.duplicates import THRESHOLD, DuplicateGroup, find_duplicates
from listwise.search.entries import (
    LABEL,
    Entry,
    Float32,
    Names,
    NoEntryError,
    key_of,
    list_names,
)
from listwise.search.filling import (
    Added,
    Sources,
    add_descriptors,
    add_local_features,
    add_photos,
    enable_local_features,
    open_sources,
)
from listwise.search.filters import Facet, Filter, as_filter, count_facets
from listwise.search.generation import Generation, open_model
from listwise.search.hits import Hit, Query, find_entries
from listwise.search.methods import Note, SearchIntent, TuningResult
from listwise.search.options import SearchOptions
from listwise.search.searching import Searcher
from listwise.search.store import IndexHeader, IndexUpgradedError, Store
from listwise.search.stored_marks import IndexMarks, checked_text
from listwise.search.upgrading import (
    UpgradeChanges,
    UpgradeOptions,
    UpgradeResult,
    discard_generations,
    find_changes,
    roll_back,
    upgrade_generation,
)

if TYPE_CHECKING:
    from listwise.descriptors import DescriptorFile, Model

Result = TypeVar("Result")


class Index(AbstractContextManager["Index"]):
    """An index of photos that is searched by photo; `open_index` opens or creates one.

    It consists of a store of entries and the model that computes their descriptors [n, C]. The
    model is loaded when it is first needed. Several threads may use one index.

    Examples:
        >>> index = open_index("shop", "resnet50")           # doctest: +SKIP
        >>> index.add("photos")                              # doctest: +SKIP
        >>> index.search("chair.jpg", k=3)[0].path           # doctest: +SKIP
        '/data/photos/chairs/7.jpg'
    """

    def __init__(self, store: Store, model: "Model | None" = None, device: str = "auto") -> None:
        self.generation = Generation(store, model, device)
        self.marks = IndexMarks(lambda: self.generation)
        self._searcher = Searcher()

    @property
    def store(self) -> Store:
        """The store of the entries."""
        return self.generation.store

    @property
    def uri(self) -> str:
        """The folder or address of the index."""
        return self.store.uri

    @property
    def header(self) -> IndexHeader:
        """The model and the settings of the descriptors."""
        return self.store.header

    @property
    def model(self) -> "Model":
        """The model that computes the descriptors of this index."""
        return self.generation.model

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the model; see `Generation.calibration`."""
        return self.generation.calibration

    def refresh(self) -> None:
        """Read the changes of other processes, also an upgrade to another model."""
        if self.store.generations.is_current():
            self.store.refresh()
        else:
            self.generation = self.generation.reopened()

    def __len__(self) -> int:
        return len(self.store)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.store)

    def __repr__(self) -> str:
        model = self.header.model_folder or self.header.model_name or self.header.model[:12]
        return f"Index({self.uri!r}, {len(self)} photos, model={model!r})"

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close files and connections."""
        self._searcher.close()
        self.store.close()

    def info(self) -> dict[str, Any]:
        """Facts about the index as JSON values: engine, entries, model, settings, search method."""
        return self.store.info()

    def add(
        self,
        photos: Sources,
        *,
        thumbnails: bool = True,
        local: bool = False,
        exif: bool = False,
        root: str | Path | None = None,
        workers: int | None = None,
        progress: bool | None = None,
    ) -> Added:
        """Add new and changed photos.

        A photo is identified by its content, and one that is in the index is not described again.
        Photos are committed part by part, so the same call resumes after an interruption.

        Args:
            photos: a folder, a table, a text list, an image file, the name of a data set, a
                descriptor file of `listwise.descriptors.extract`, or a list of these. Columns of
                a table other than path and box become attributes of its photos.
            thumbnails: store a thumbnail of each photo.
            local: store local features of new photos, now and in later calls, at most 40 kB each,
                so that re-ranking is fast and does not read the photos. For photos that are in
                the index already, call `add_local_features`.
            exif: add what the camera wrote into a photo as attributes: `date`, `latitude`,
                `longitude` and `camera`.
            root: folder that contains the photos of a descriptor file.
            workers: number of processes that decode photos; by default from the number of CPU
                cores.
            progress: show a progress bar; by default on a terminal, for more than a few photos.

        Returns:
            The ids that were added, replaced, updated or unchanged, and a line for each photo
            that could not be read.
        """
        total = Added()
        if local:
            self._change(lambda: enable_local_features(self.store))
        for source in open_sources(photos):
            with counting("adding", len(source), progress) as advance:
                options = {"thumbnails": thumbnails, "on_progress": advance}
                photos_only = {"exif": exif, "workers": workers}
                add = partial(_add_source, self, source, root, photos_only, options)
                for name, ids in vars(self._change(add)).items():
                    getattr(total, name).extend(ids)
        return total

    def add_local_features(
        self, *, workers: int | None = None, progress: bool | None = None
    ) -> Added:
        """Store local features of all entries that have none, and of photos added later.

        Re-ranking is then fast and does not read the photos. Features are committed part by part,
        so the same call resumes after an interruption.

        Args:
            workers: number of processes; by default one per CPU core.
            progress: show a progress bar; by default on a terminal, for more than a few photos.

        Returns:
            The ids that were updated, and a line for each photo that could not be read.
        """

        def extract() -> Added:
            missing = sum(not size for size in self.store.local_sizes().values())
            with counting("extracting", missing, progress) as advance:
                return add_local_features(self.store, workers=workers, on_progress=advance)

        return self._change(extract)

    def search(
        self,
        query: Photo | Sequence[Photo] | npt.NDArray[np.floating] | None = None,
        k: int = 10,
        *,
        like: Names = (),
        box: Box | Sequence[Box | None] | None = None,
        **options: Any,
    ) -> list[Hit]:
        """Find the photos nearest to a query, best first.

        Args:
            query: a photo (an image file, a Pillow image, or pixels uint8 [height, width, 3]),
                several photos of one thing, or descriptors [dim] or [n, dim]. For several, the
                mean of their descriptors is searched.
            k: the maximum number of hits.
            like: ids or keys of entries that are further examples, or the only ones; they are
                not among the hits.
            box: the part of the photo to search for, x0, y0, x1, y1 in pixels; for several photos
                a box or None for each.
            **options: the other options of `SearchOptions`, such as `where`, `expand`, `refine`,
                `rerank`, `quality`, `min_score`, `min_probability`, `same`, `different`, `exclude`.

        Returns:
            At most k hits.

        Example:
            >>> index.search("chair.jpg", where="price < 100", rerank=True)  # doctest: +SKIP
            [Hit('chairs/7.jpg', score=0.8710, inliers=41), ...]
        """
        chosen = validated(SearchOptions, {"k": k, **options})
        photos, boxes, vectors = _examples(query, box)
        one = Query(photos, boxes, list_names(like), vectors, chosen)
        (result,) = self._searcher.search(self.generation, [one])
        if isinstance(result, Exception):
            raise result
        return (self._searcher.rerank(result) if chosen.rerank else result).page

    def remove(
        self,
        photos: str | int | Path | Entry | Iterable[str | int | Path | Entry] | None = None,
        *,
        where: str | Filter | None = None,
    ) -> int:
        """Remove entries and return their number; the photo files are not deleted.

        Args:
            photos: ids, keys or entries of the index; or image files, folders and tables, whose
                photos are looked up by their content.
            where: filter on attributes, such as "price < 100"; only entries that match it are
                removed, all of them if no `photos` are given.
        """
        chosen = as_filter(where)
        if photos is None and chosen is None:
            raise InputError("nothing to remove: give `photos` or `where`")
        given = [photos] if isinstance(photos, str | int | Path | Entry) else photos

        def remove() -> int:
            store = self.store
            keys = None if given is None else {key for each in given for key in _keys(store, each)}
            if chosen is not None:
                matching = store.keys(chosen).tolist()
                keys = set(matching) if keys is None else keys.intersection(matching)
            return store.remove(sorted(keys or ()))

        return self._change(remove)

    def entries(
        self, *, where: str | Filter | None = None, start: int = 0, count: int | None = None
    ) -> Iterator[Entry]:
        """List entries, all or those that match a filter; the order is stable between writes.

        Args:
            where: filter on attributes, such as "price < 100 and color = 'red'".
            start: number of entries to skip.
            count: maximum number of entries; by default all.

        Example:
            >>> [entry.id for entry in index.entries(where="color = 'red'")]    # doctest: +SKIP
            ['chairs/7.jpg']
        """
        return self.store.entries(as_filter(where), start, count)

    def duplicates(
        self,
        *,
        threshold: float = THRESHOLD,
        verify: bool | None = None,
        progress: bool | None = None,
    ) -> list[DuplicateGroup]:
        """Find photos that are in the index more than once, the largest group first.

        Args:
            threshold: minimum score of near-duplicates, from -1 to 1.
            verify: verify near-duplicates by local features; by default if the extra local is
                installed.
            progress: show a progress bar; by default on a terminal.

        Returns:
            Groups of two or more entries; the first entry of a group has most pixels.

        Example:
            >>> for group in index.duplicates():             # doctest: +SKIP
            ...     index.remove(group.entries[1:])
        """
        reranker = None
        if verify or (verify is None and find_spec("cv2") is not None):
            from listwise.local.rerank import Reranker

            reranker = Reranker()
        with counting("comparing", len(self), progress) as advance:
            return find_duplicates(self.store, threshold, reranker, advance)

    def facets(self) -> list[Facet]:
        """List the attributes: numbers, dates or texts, with their values if these are few.

        Example:
            >>> index.facets()[0]                            # doctest: +SKIP
            Facet(name='color', values=(('red', 12), ('blue', 3)), kind='text', ...)
        """
        return count_facets(self.store.attributes())

    def entry(self, name: str | int) -> Entry:
        """Return the entry with an id or a key; `NoEntryError` if the index has none."""
        return find_entries(self.store, name)[0]

    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice."""
        return self.store.method.tune(intent, on_note)

    def upgrade(
        self,
        model: "Model | str | Path",
        *,
        skip_missing: bool = False,
        workers: int | None = None,
        progress: bool | None = None,
        on_note: Note = lambda note: None,
    ) -> UpgradeResult:
        """Describe all photos with another model, while searches use the descriptors of this one.

        When all photos are described, the index switches to the new descriptors in one step; other
        processes notice. The same call resumes after an interruption. Entries, attributes,
        thumbnails and local features are kept, and so are changes that are made meanwhile. The
        earlier descriptors stay for `rollback` until the next upgrade or `discard_earlier`.

        Args:
            model: the new model: a `Model` that was saved, its folder, or the name of a timm
                backbone. A tuned model is used with its settings, any other with the settings of
                the index.
            skip_missing: leave out entries whose photo is missing, has changed or cannot be read.
                By default they are an error.
            workers: number of processes that decode photos; by default from the number of CPU
                cores.
            progress: show a progress bar; by default on a terminal, for more than a few photos.
            on_note: called with a sentence about what is done, first with an estimate of time and
                disk space.

        Returns:
            The number of entries, and a line for each entry that was left out.

        Example:
            >>> index.upgrade("runs/better/model")           # doctest: +SKIP
            UpgradeResult(generation=1, entries=6049, described=6049, skipped=[])
        """
        new = open_model(model, self.generation.device)
        options = UpgradeOptions(skip_missing, workers, progress, on_note)
        done = self._change(lambda: upgrade_generation(self.generation, new, options))
        if not self.store.generations.is_current():
            self.generation = self.generation.reopened(new)
        return done

    def rollback(
        self,
        model: "Model | str | Path | None" = None,
        *,
        skip_missing: bool = False,
        workers: int | None = None,
        progress: bool | None = None,
        on_note: Note = lambda note: None,
    ) -> UpgradeResult:
        """Return to the descriptors and the model from before the last upgrade.

        Photos that were added since are described with the earlier model first. Another call
        returns to the upgraded index. The other arguments are those of `upgrade`.

        Args:
            model: earlier model, if its folder has moved.
            skip_missing: leave out entries whose photo is missing, has changed or cannot be read.
                By default they are an error.
            workers: number of processes that decode photos; by default from the number of CPU
                cores.
            progress: show a progress bar; by default on a terminal, for more than a few photos.
            on_note: called with a sentence about what is done.

        Example:
            >>> index.rollback()                             # doctest: +SKIP
            UpgradeResult(generation=0, entries=6049, described=0, skipped=[])
        """
        options = UpgradeOptions(skip_missing, workers, progress, on_note)
        new = None if model is None else open_model(model, self.generation.device)
        done = self._change(lambda: roll_back(self.generation, new, options))
        self.generation = self.generation.reopened(new)
        return done

    def changes(self, queries: int = 100, *, k: int = 10) -> UpgradeChanges:
        """Compare the results before and after the last upgrade, the most different ones first.

        Entries of the index are the queries. Their stored descriptors are searched, so this takes
        seconds, and needs neither the photos nor the earlier model.

        Args:
            queries: number of entries to search by.
            k: number of results to compare.

        Example:
            >>> index.changes(500).kept                      # doctest: +SKIP
            0.83
        """
        return find_changes(self.store, queries, k)

    def discard_earlier(self) -> None:
        """Free the disk space of the descriptors before the last upgrade, or of an unfinished one.

        After that, `rollback` is not possible any more.
        """
        self._change(lambda: discard_generations(self.store))

    def check(
        self, *, photos: bool = False, repair: bool = False, progress: bool | None = None
    ) -> CheckResult:
        """Read everything in the index, and compare it with the checksums stored in it.

        Every file, descriptor, value and thumbnail is checked, and that the photos exist.

        Args:
            photos: read the photos too, and report those that have changed.
            repair: encode the photos of damaged entries again, restore damaged files, and remove
                entries whose id or path is damaged.
            progress: show a progress bar; by default on a terminal.

        Returns:
            The names of damaged files and entries, and what was repaired.

        Example:
            >>> index.check().ok                             # doctest: +SKIP
            True
        """
        with counting("checking", len(self), progress) as advance:
            return check_store(self.generation, photos=photos, repair=repair, on_progress=advance)

    def describe(
        self, photos: Sequence[Photo], boxes: Sequence[Box | None] | None = None
    ) -> Float32:
        """Compute descriptors of n photos, or boxes in them, at the size of the index: [n, C]."""
        return self.generation.describe_given(photos, boxes or [None] * len(photos))

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
        text = checked_text("name", name)
        keys = [entry.key for entry in find_entries(self.store, entries)]
        return self._change(lambda: self.store.set_attributes(keys, {LABEL: text}))

    def _change(self, change: Callable[[], Result]) -> Result:
        """Change the index; repeat it if another process has switched to another generation."""
        try:
            return change()
        except IndexUpgradedError:
            self.refresh()
            return change()


def _examples(query: Any, box: Any) -> tuple[list[Photo], list[Box | None], Float32 | None]:
    """The photos of a query with their boxes, and its descriptors [n, dim] if it has some."""
    if isinstance(query, np.ndarray) and np.issubdtype(query.dtype, np.floating):
        return [], [], np.atleast_2d(query).astype(np.float32)
    several = isinstance(query, Sequence) and not isinstance(query, str)
    photos = list(query) if several else [] if query is None else [query]
    boxes = [box] if query is not None and not several else list(box or [None] * len(photos))
    if len(boxes) != len(photos):
        raise InputError(
            f"`box` has {len(boxes)} boxes for {len(photos)} photos: give one per photo"
        )
    return photos, boxes, None


def _add_source(
    index: Index,
    source: "Images | DescriptorFile",
    root: str | Path | None,
    photos_only: dict[str, Any],
    options: dict[str, Any],
) -> Added:
    """Add the photos of one source to the current generation of an index."""
    from listwise.descriptors import DescriptorFile

    current = index.generation
    if isinstance(source, DescriptorFile):
        return add_descriptors(current.store, source, root, **options)
    return add_photos(current.store, current.model, source, **photos_only, **options)


def _keys(store: Store, named: str | int | Path | Entry) -> list[int]:
    """The keys of the entries that a user gave by id, key, file or folder."""
    if isinstance(named, Entry):
        return [named.key]
    key = key_of(named if isinstance(named, int) else str(named))
    if store.get([key]):
        return [key]
    if isinstance(named, int) or not Path(named).exists():
        raise NoEntryError(f"{store.uri} has no photo {named}: give the id of an entry, or a file")
    digests = [file.digest() for file in photos_of(named).files()]
    keys = [entry.key for entry in store.with_digests(digests).values()]
    if not keys:
        raise InputError(f"{store.uri} has no entry for {named}: nothing was removed")
    return keys
