"""An index of photos: add photos, search for similar ones, and mark the results."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from PIL import Image

from listwise.blocks import plain_array, unit_rows
from listwise.calibration import Calibration
from listwise.data import Images
from listwise.data.catalog import photos_of
from listwise.data.images import Box
from listwise.data.memory import as_photo, is_one_in_memory
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
    add_images,
    add_local_features,
    enable_local_features,
    forget_copies,
    open_sources,
)
from listwise.search.filters import Facet, Filter, as_filter, count_facets
from listwise.search.generation import Generation, open_model
from listwise.search.hits import Hits, Query, QueryPhoto, find_entries
from listwise.search.methods import Note, SearchIntent, TuningResult
from listwise.search.options import SearchOptions
from listwise.search.searching import Searcher
from listwise.search.store import IndexHeader, IndexUpgradedError, Store
from listwise.search.stored_marks import IndexMarks, checked_text
from listwise.search.syncing import Synced, followed_folders, sync_folder
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
    from typing import Unpack

    from listwise.descriptors import DescriptorFile, Model
    from listwise.search.options import SearchHow

Result = TypeVar("Result")
OnePhoto = str | Path | bytes | Image.Image | None
SHOWN = 12
"""Number of photos of an index that a notebook shows."""


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

    def __init__(
        self, store: "Store | NewIndex", model: "Model | None" = None, device: str = "auto"
    ) -> None:
        if isinstance(store, str | Path):
            raise InputError("`store` must be a store: open an index with listwise.open_index")
        self._new = store if isinstance(store, NewIndex) else None
        known = None if isinstance(store, NewIndex) else Generation(store, model, device)
        self._generation: Generation | None = known
        self.marks = IndexMarks(lambda: self.generation)
        self._searcher = Searcher()

    @property
    def generation(self) -> Generation:
        """The store with its model; an upgrade replaces it."""
        if self._generation is None:
            raise InputError(f"no index at {self.uri}: add photos first, which creates it")
        return self._generation

    @generation.setter
    def generation(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def store(self) -> Store:
        """The store of the entries."""
        return self.generation.store

    @property
    def uri(self) -> str:
        """The folder or address of the index."""
        return self.store.uri if self._new is None else self._new.uri

    @property
    def header(self) -> IndexHeader:
        """The model and the settings of the descriptors."""
        return self.store.header if self._new is None else self._new.header

    @property
    def model(self) -> "Model":
        """The model that computes the descriptors of this index."""
        return self.generation.model if self._new is None else self._new.model

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
        return len(self.store) if self._generation else 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.store if self._generation else ())

    def __getitem__(self, name: str | int | Path) -> Entry:
        """Return the entry with an id or a key, or that of a photo file."""
        named, copies = _named(self.store, [name])
        keys = [*{*named, *copies}]
        if len(keys) > 1:
            raise NoEntryError(f"{name} is {len(keys)} photos: give the id of one entry")
        return self.entry(keys[0])

    def __contains__(self, name: Any) -> bool:
        """Return whether there is an entry with an id or a key, or of a photo file."""
        try:
            return bool(self._generation and self[name.id if isinstance(name, Entry) else name])
        except NoEntryError:
            return False

    def __repr__(self) -> str:
        model = self.header.model_folder or self.header.model_name or self.header.model[:12]
        return f"Index({self.uri!r}, {len(self)} photos, model={model!r})"

    def _repr_html_(self) -> str:
        from listwise.pages import notebook_html

        entries = list(self.entries(count=SHOWN)) if len(self) else []
        found = (
            self.store.contents("thumbnail", [entry.key for entry in entries]) if entries else {}
        )
        photos = [(found.get(entry.key, b""), entry.id) for entry in entries]
        return notebook_html(repr(self), photos=photos)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close files and connections."""
        self._searcher.close()
        if self._generation is not None:
            self.store.close()

    def info(self) -> dict[str, Any]:
        """Facts about the index as JSON values: engine, entries, model, settings, search method."""
        return self.store.info()

    def add(
        self,
        photos: Sources,
        *,
        ids: Sequence[str] | None = None,
        attributes: Any = None,
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
                a table other than path and box become attributes of its photos. A table can also
                be a DataFrame or a list of dictionaries.
            ids: the id of each photo; by default its path as it is given.
            attributes: further attributes: a dictionary for all photos, or a list with one for
                each, or a DataFrame.
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
        sources = open_sources(photos)
        if (ids is not None or attributes is not None) and sources:
            (images, *others) = sources
            if others or not isinstance(images, Images):
                raise InputError("`ids` and `attributes` need one list, folder or table of photos")
            sources = [images.named(ids, attributes)]
        if self._new is not None:
            self.generation, self._new = self._new.create(), None
        if local:
            self._change(lambda: enable_local_features(self.store))
        for source in sources:
            with counting("adding", len(source), progress) as advance:
                options = {"thumbnails": thumbnails, "on_progress": advance}
                photos_only = {"exif": exif, "workers": workers}
                add = partial(_add_source, self, source, root, photos_only, options)
                for name, ids in vars(self._change(add)).items():
                    getattr(total, name).extend(ids)
        return total

    def sync(
        self,
        folders: str | Path | Sequence[str | Path] | None = None,
        *,
        prune: bool = False,
        dry_run: bool = False,
        only: Collection[str] | None = None,
        exif: bool = False,
        workers: int | None = None,
        progress: bool | None = None,
    ) -> Synced:
        """Bring the index up to date with folders: add, describe again, move and remove photos.

        Photos are committed part by part, so the same call resumes after an interruption.

        Args:
            folders: folders of photos; by default those that were added to the index.
            prune: remove the entries whose photo is no longer in a folder. By default they are
                listed in `missing`.
            dry_run: change nothing, and return what would be done.
            only: paths of photos that may have changed; by default all are read.
            exif: add the date, place and camera of new and changed photos as attributes.
            workers: number of processes that decode photos; by default from the number of CPU
                cores.
            progress: show a progress bar; by default on a terminal, for more than a few photos.

        Returns:
            What happened to the photos, as `add` returns it, and the ids of entries whose photo is
            missing and of those that were removed.

        Example:
            >>> index.sync(prune=True).removed               # doctest: +SKIP
            ['chairs/7.jpg']
        """
        total = Synced()
        options: dict[str, Any] = {"prune": prune, "dry_run": dry_run, "only": only, "exif": exif}
        options |= {"workers": workers, "progress": progress}
        for folder in followed_folders(self.store, folders):
            sync = partial(_sync_folder, self, folder, options)
            for name, ids in vars(self._change(sync)).items():
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

    @overload
    def search(self, query: OnePhoto = None, k: int = 10, **how: "Unpack[SearchHow]") -> Hits: ...

    @overload
    def search(self, query: Any, k: int = 10, **how: "Unpack[SearchHow]") -> Any: ...

    def search(
        self,
        query: Any = None,
        k: int = 10,
        *,
        like: Names = (),
        box: Box | Sequence[Box | None] | None = None,
        average: bool = False,
        **options: Any,
    ) -> Hits | list[Hits]:
        """Find the photos nearest to a query, best first.

        Args:
            query: a photo, as `Model.encode` takes it, or a descriptor [dim]; or several queries: a
                list of photos, or descriptors [n, dim]. Descriptors are scaled to unit length.
            k: the maximum number of hits.
            like: ids or keys of entries that are further examples, or the only ones; they are
                not among the hits.
            box: the part of the photo to search for, x0, y0, x1, y1 in pixels; for several photos
                a box or None for each.
            average: several photos or descriptors are one query, for one thing: the mean of their
                descriptors is searched.
            **options: the other options of `SearchOptions`, such as `where`, `expand`, `refine`,
                `rerank`, `quality`, `min_score`, `min_probability`, `same`, `different`, `exclude`.

        Returns:
            At most k hits; for several queries a list with the hits of each.

        Example:
            >>> index.search("chair.jpg", where="price < 100", rerank=True)  # doctest: +SKIP
            [Hit('chairs/7.jpg', score=0.8710, inliers=41), ...]
        """
        chosen = validated(SearchOptions, {"k": k, **options})
        photos, rows, several = _examples(query)
        boxes: list[Any] = [box] * len(photos)
        if several:
            boxes = list(box or [None] * len(photos))
        if len(boxes) != len(photos):
            raise InputError(
                f"`box` has {len(boxes)} boxes for {len(photos)} photos: give one per photo"
            )
        build = partial(Query, entries=list_names(like), options=chosen)
        if not several or average:
            queries = [build(photos, boxes, vectors=rows)]
        elif rows is None:
            queries = [build([photo], [part]) for photo, part in zip(photos, boxes, strict=True)]
        else:
            queries = [build(vectors=rows[i : i + 1]) for i in range(len(rows))]
        generation, found = self.generation, []
        for result in self._searcher.search(generation, queries):
            if isinstance(result, Exception):
                raise result
            page = (self._searcher.rerank(result) if chosen.rerank else result).page
            found.append(Hits(page, generation.store))
        return found if several and not average else found[0]

    def remove(
        self,
        photos: str | int | Path | Entry | Iterable[str | int | Path | Entry] | None = None,
        *,
        where: str | Filter | None = None,
    ) -> int:
        """Remove entries and return their number; the photo files are not deleted.

        Args:
            photos: ids, keys or entries of the index; or image files, folders and tables, whose
                photos are looked up by their content. The path of a copy is removed from the
                `copies` of its entry, which stays.
            where: filter on attributes, such as "price < 100"; only entries that match it are
                removed, all of them if no `photos` are given.
        """
        chosen = as_filter(where)
        if photos is None and chosen is None:
            raise InputError("nothing to remove: give `photos` or `where`")
        given = [photos] if isinstance(photos, str | int | Path | Entry) else photos

        def remove() -> int:
            store, copies = self.store, 0
            keys = None
            if given is not None:
                keys, paths = _named(store, given)
                copies = 0 if chosen else forget_copies(store, paths)
            if chosen is not None:
                matching = store.keys(chosen).tolist()
                keys = set(matching) if keys is None else keys.intersection(matching)
            return store.remove(sorted(keys or ())) + copies

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
        mirrored: bool = False,
        progress: bool | None = None,
    ) -> list[DuplicateGroup]:
        """Find photos that are in the index more than once, the largest group first.

        Copies are found if they were resized, compressed, cropped by up to a tenth, made brighter,
        or have a border or a watermark, and so are photos that were taken in one moment.

        Args:
            threshold: minimum score of duplicates, above 0 and at most 1.
            mirrored: also find photos that were mirrored.
            progress: show a progress bar; by default on a terminal.

        Returns:
            Groups of two or more files; the first entry of a group is the best one.

        Example:
            >>> for group in index.duplicates():             # doctest: +SKIP
            ...     index.remove(group.entries[1:])
        """
        with counting("comparing", 2 * len(self), progress) as advance:
            return find_duplicates(self.store, threshold, mirrored, advance)

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


def _examples(query: Any) -> tuple[list[QueryPhoto], Float32 | None, bool]:
    """The photos of a query, or its descriptors [n, dim], and whether there are several queries."""
    query = plain_array(query)
    if isinstance(query, np.ndarray) and query.ndim < 3 and query.dtype.kind == "f":
        return [], unit_rows(query), query.ndim == 2
    if query is None:
        return [], None, False
    several = isinstance(query, Iterable) and not (
        isinstance(query, str) or is_one_in_memory(query)
    )
    return [as_photo(photo) for photo in (query if several else [query])], None, several


@dataclass(frozen=True)
class NewIndex:
    """An index that is created when photos are added to it: its place, model and settings."""

    uri: str
    model: "Model"
    header: IndexHeader
    create: Callable[[], Generation]


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
    return add_images(current, source, **photos_only, **options)


def _sync_folder(index: Index, folder: str, options: dict[str, Any]) -> Synced:
    """Bring the current generation of an index up to date with a folder."""
    return sync_folder(index.generation, folder, **options)


def _named(
    store: Store, given: Iterable[str | int | Path | Entry]
) -> tuple[set[int], dict[int, set[str]]]:
    """The entries that a user gave by id, key, file or folder, and copies by key and path."""
    keys: set[int] = set()
    copies: dict[int, set[str]] = {}
    for each in given:
        named = int(each) if isinstance(each, np.integer) else each
        key = (
            named.key
            if isinstance(named, Entry)
            else key_of(named if isinstance(named, int) else str(named))
        )
        if isinstance(named, Entry) or store.get([key]):
            keys.add(key)
            continue
        if isinstance(named, int) or not Path(str(named)).exists():
            raise NoEntryError(
                f"{store.uri} has no photo {named}: give the id of an entry, or a file"
            )
        files = {file.path: file.digest() for file in photos_of(named).files()}
        known = store.with_digests([*files.values()])
        if not known:
            raise NoEntryError(f"{store.uri} has no entry for {named}")
        for path, digest in files.items():
            entry = known.get(digest)
            if entry is not None and path in entry.copies:
                copies.setdefault(entry.key, set()).add(path)
            elif entry is not None:
                keys.add(entry.key)
    return keys, copies
