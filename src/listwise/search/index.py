"""An index of photos: add photos, and search for similar ones."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from listwise.data import Images
from listwise.data.catalog import photos_of
from listwise.data.given import Photo, open_photo
from listwise.data.images import Box, load_image
from listwise.descriptors import DescriptorFile, Model, load_model
from listwise.errors import InputError
from listwise.models.calibration import Calibration
from listwise.progress import counting
from listwise.search.changes import UpgradeChanges, find_changes
from listwise.search.checking import CheckResult, check_store
from listwise.search.classes import ClassProgress, Suggestion, find_classes, find_suggestions
from listwise.search.duplicates import THRESHOLD, DuplicateGroup, find_duplicates
from listwise.search.entries import Entry, Float32, Names, NoEntryError, key_of, list_names
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
from listwise.search.generation import Generation
from listwise.search.generations import IndexUpgradedError
from listwise.search.hits import Hit, Query, find_hits, lowest_score, marked_order
from listwise.search.marking import MarkingMethods, find_marked
from listwise.search.refinement import RefineMethod, find_refinement
from listwise.search.store import IndexHeader, Note, SearchIntent, Store, TuningResult
from listwise.search.upgrading import (
    UpgradeOptions,
    UpgradeResult,
    discard_generations,
    roll_back,
    upgrade_generation,
)

if TYPE_CHECKING:
    from listwise.local.rerank import Reranker

Result = TypeVar("Result")


class Index(MarkingMethods):
    """An index of photos that is searched by photo; `open_index` opens or creates one.

    It consists of a store of entries and the model that computes their descriptors [n, C]. The
    model is loaded when it is first needed. Several threads may use one index.

    Examples:
        >>> index = open_index("shop", "resnet50")           # doctest: +SKIP
        >>> index.add("photos")                              # doctest: +SKIP
        >>> index.search("chair.jpg", k=3)[0].path           # doctest: +SKIP
        '/data/photos/chairs/7.jpg'
    """

    def __init__(self, store: Store, model: Model | None = None, device: str = "auto") -> None:
        self.generation = Generation(store, model, device)
        self._reranker: Reranker | None = None

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
    def model(self) -> Model:
        """The model that computes the descriptors of this index."""
        return self.generation.model

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the model; see `Generation.calibration`."""
        return self.generation.calibration

    def expands(
        self,
        wanted: bool | None,
        refine: str | None = None,
        min_probability: float | None = None,
        marked: bool = False,
    ) -> bool:
        """Whether a search expands its query; see `Generation.expands`."""
        return self.generation.expands(wanted, refine, min_probability, marked)

    def refresh(self) -> None:
        """Read the changes of other processes, also an upgrade to another model."""
        if self.store.is_current():
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close files and connections."""
        if self._reranker is not None:
            self._reranker.close()
            self._reranker = None
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
            root: the folder that the ids of a descriptor file are relative to.
            workers: the number of processes that decode; chosen from the cores by default.
            progress: show a progress bar; by default on a terminal, for more than a few photos.

        Returns:
            The ids that were added, replaced, updated or unchanged, and a line for each photo
            that could not be read.
        """
        total = Added()
        if local:
            self._change(lambda: enable_local_features(self.store))
        for source in open_sources(photos):
            found = self._change(
                partial(self._add_source, source, Added(), thumbnails, root, workers, progress)
            )
            for name, ids in vars(found).items():
                getattr(total, name).extend(ids)
        return total

    def _add_source(
        self,
        source: Images | DescriptorFile,
        result: Added,
        thumbnails: bool,
        root: str | Path | None,
        workers: int | None,
        progress: bool | None,
    ) -> Added:
        """Add the photos of one source; `result` has what an earlier attempt has done."""
        current = self.generation
        with counting("adding", len(source), progress) as advance:
            if isinstance(source, DescriptorFile):
                return add_descriptors(
                    current.store, source, root, thumbnails=thumbnails, on_progress=advance
                )
            return add_photos(
                current.store,
                current.model,
                source,
                thumbnails=thumbnails,
                workers=workers,
                on_progress=advance,
                result=result,
            )

    def add_local_features(
        self, *, workers: int | None = None, progress: bool | None = None
    ) -> Added:
        """Store local features of all entries that have none, and of photos added later.

        Re-ranking is then fast and does not read the photos. Features are committed part by part,
        so the same call resumes after an interruption.

        Args:
            workers: the number of processes; one per core by default.
            progress: show a progress bar; by default on a terminal, for more than a few photos.

        Returns:
            The ids that were updated, and a line for each photo that could not be read.
        """

        def extract() -> Added:
            enable_local_features(self.store)
            missing = len(self) - self.store.count_local()[0]
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
        expand: bool | None = None,
        refine: RefineMethod | None = None,
        rerank: bool = False,
        exclude: Names = (),
        where: str | Filter | None = None,
        min_score: float | None = None,
        min_probability: float | None = None,
        quality: Literal["fast", "best"] = "fast",
        same: Names = (),
        different: Names = (),
        marks: bool = False,
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
            expand: expand the query with its nearest neighbors (αQE). By default, if the model of
                the index was tuned to it, `refine` and `min_probability` are None, and no entries
                are marked.
            refine: re-rank the first hits by their global descriptors: "superglobal" (the first
                400) or "diffusion" (the first 2000).
            rerank: re-rank the first 100 hits by spatial verification. Unless the index has
                local features, their files must be readable. With `refine="diffusion"`, the
                first 100 hits are verified first, and diffusion starts from those that match.
            exclude: ids or keys of entries that are not returned.
            where: a filter on the attributes of the hits, such as `price < 100 and color = 'red'`.
            min_score: the minimum score of a hit.
            min_probability: the minimum probability that a hit shows the same thing as the query,
                from 0 to 1; the model must be calibrated. It cannot be combined with `expand` or
                with marked entries.
            quality: "best" stands for `refine="diffusion"` and `rerank=True`.
            same: ids or keys of entries that show the same thing as the query. The query is moved
                toward them (see `listwise.search.moved_query`), and they are the first hits,
                whatever their score is.
            different: ids or keys of entries that show something else. The query is moved away
                from them, and they come after all other entries.
            marks: use the stored marks of the query too, which must be one photo or one entry;
                `same` and `different` take precedence. Nothing is stored: see `mark`.

        Returns:
            At most k hits.
        """
        if quality not in ("fast", "best"):
            raise InputError(f"`quality` must be fast or best, not {quality!r}")
        if quality == "best":
            refine, rerank = refine or "diffusion", True
        chosen = as_filter(where)
        method = None if refine is None else find_refinement(refine)
        examples = [self.entry(name) for name in list_names(like)]
        current = self.generation  # another thread may switch to another one meanwhile
        marked = find_marked(current.store, query, like, box, same, different, stored=marks)
        photos, vectors = _described(current, query, box)
        # After the model is loaded: its calibration may be newer than the stored one.
        lowest = lowest_score(current.calibration, min_score, min_probability)
        expand = current.expands(expand, refine, min_probability, any(marked))
        if examples:
            known = current.store.vectors(np.array([entry.key for entry in examples], np.int64))
            vectors = np.concatenate([vectors, known])
        left_out = {entry.key for entry in examples} | set(map(key_of, list_names(exclude)))
        one = Query(vectors, k, expand, left_out, chosen, lowest, method, *marked)
        if not rerank:
            return find_hits(current.store, [one], current.calibration)[0]
        if not photos and not examples:
            raise InputError("`rerank` needs photos: give a photo or `like`, not descriptors")
        from listwise.local.rerank import TOP
        from listwise.search.reranking import DIFFUSED, diffuse_hits

        # Diffusion comes after verification: it starts from the hits that match.
        last = refine == "diffusion"
        size, method = (DIFFUSED, None) if last else (TOP, method)
        many = replace(one, k=max(k, size), refine=method)
        hits = find_hits(current.store, [many], current.calibration)[0]
        photos += [(load_image(entry.path), entry.box) for entry in examples]
        images, boxes = [photo for photo, _ in photos], [box for _, box in photos]
        hits = self._rerank(current.store, images, hits, boxes)
        hits = diffuse_hits(current.store, hits) if last else hits
        return marked_order(hits, *marked)[:k]

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
            where: a filter; only entries that match it are removed, all of them if `photos` is
                None.
        """
        chosen = as_filter(where)
        if photos is None and chosen is None:
            raise InputError("nothing to remove: give `photos` or `where`")
        return self._change(lambda: self._remove(photos, chosen))

    def _remove(self, photos: Any, chosen: Filter | None) -> int:
        matching = None if chosen is None else self.store.matching(chosen).tolist()
        if photos is None:
            return self.store.remove(matching or [])
        given = [photos] if isinstance(photos, str | int | Path | Entry) else photos
        keys = [key for each in given for key in self._keys(each)]
        if matching is not None:
            keys = sorted(set(keys).intersection(matching))
        return self.store.remove(keys)

    def entries(
        self, *, where: str | Filter | None = None, start: int = 0, count: int | None = None
    ) -> Iterator[Entry]:
        """List entries, all or those that match a filter; the order is stable between writes.

        Args:
            where: a filter on attributes, such as `price < 100 and color = 'red'`.
            start: the position of the first entry to list.
            count: the maximum number of entries; all by default.

        Example:
            >>> [entry.id for entry in index.entries(where="color = 'red'")]    # doctest: +SKIP
            ['chairs/7.jpg']
        """
        chosen = as_filter(where)
        end = math.inf if count is None else start + count
        while start < end:
            found = self.store.page(start, int(min(1000, end - start)), chosen)
            if not found:
                return
            yield from found
            start += len(found)

    def duplicates(
        self,
        *,
        threshold: float = THRESHOLD,
        verify: bool | None = None,
        progress: bool | None = None,
    ) -> list[DuplicateGroup]:
        """Find photos that are in the index more than once, the largest group first.

        Args:
            threshold: the minimum score of near-duplicates, from -1 to 1.
            verify: require that the local features of near-duplicates agree on one geometry; by
                default if the extra `local` is installed.
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
        """List the attributes with at most 20 distinct values, with the count of each value.

        Example:
            >>> index.facets()[0]                            # doctest: +SKIP
            Facet(name='color', values=(('red', 12), ('blue', 3)))
        """
        return count_facets(self.store.attribute_texts())

    def classes(self) -> list[ClassProgress]:
        """List the classes of the index, the largest first: from labels and from "same" marks.

        Example:
            >>> index.classes()[0]                           # doctest: +SKIP
            ClassProgress(name='chair', photos=12, labelled=9, marks=14, open=3)
        """
        return find_classes(self.store, self.marks().active, self.calibration)

    def suggest(self, count: int = 20) -> list[Suggestion]:
        """Suggest pairs of entries to mark: the most uncertain ones.

        The pairs are neighbors of labelled and marked photos, taken from the classes in turn;
        without such photos, neighbors of any photos. The least clear ones have a probability near
        one half by the calibration of the model. Without a calibration, their scores are near the
        middle between those of pairs marked "same" and "different".

        Args:
            count: the maximum number of pairs.

        Example:
            >>> for pair in index.suggest(5):                # doctest: +SKIP
            ...     print(pair.one.id, pair.other.id, pair.probability)
        """
        return find_suggestions(self.store, self.marks().active, self.calibration, count)

    def entry(self, name: str | int) -> Entry:
        """Return the entry with an id or a key; `NoEntryError` if the index has none."""
        found = self.store.get([key_of(name)])
        if not found:
            raise NoEntryError(
                f"{self.uri} has no photo {name}: give an id or a key of the index; "
                "listwise index list shows the ids"
            )
        return found[key_of(name)]

    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice."""
        return self.store.tune(intent, on_note)

    def upgrade(
        self,
        model: Model | str | Path,
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
            workers: the number of processes that decode; chosen from the cores by default.
            progress: show a progress bar; by default on a terminal, for more than a few photos.
            on_note: called with a sentence about what is done, first with an estimate of time and
                disk space.

        Returns:
            The number of entries, and a line for each entry that was left out.

        Example:
            >>> index.upgrade("runs/better/model")           # doctest: +SKIP
            UpgradeResult(generation=1, entries=6049, described=6049, skipped=[])
        """
        new = model if isinstance(model, Model) else load_model(model, self.generation.device)
        options = UpgradeOptions(skip_missing, workers, progress, on_note)
        done = self._change(lambda: upgrade_generation(self.generation, new, options))
        if not self.store.is_current():
            self.generation = Generation(
                self.store.open_generation(done.generation), new, self.generation.device
            )
        return done

    def rollback(
        self,
        model: Model | str | Path | None = None,
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
            model: the earlier model, if its folder has moved.
            skip_missing: leave out entries whose photo is missing, has changed or cannot be read.
            workers: the number of processes that decode; chosen from the cores by default.
            progress: show a progress bar; by default on a terminal, for more than a few photos.
            on_note: called with a sentence about what is done.

        Example:
            >>> index.rollback()                             # doctest: +SKIP
            UpgradeResult(generation=0, entries=6049, described=0, skipped=[])
        """
        options = UpgradeOptions(skip_missing, workers, progress, on_note)
        device = self.generation.device
        new = load_model(model, device) if isinstance(model, str | Path) else model
        done = self._change(lambda: roll_back(self.generation, new, options))
        self.generation = Generation(self.store.open_generation(done.generation), new, device)
        return done

    def changes(self, queries: int = 100, *, k: int = 10) -> UpgradeChanges:
        """Compare the results before and after the last upgrade, the most different ones first.

        Entries of the index are the queries. Their stored descriptors are searched, so this takes
        seconds, and needs neither the photos nor the earlier model.

        Args:
            queries: the number of entries to search by.
            k: the number of results to compare.

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
            repair: recompute damaged descriptors and thumbnails from the photos, restore damaged
                files, remove entries whose id or path is damaged, and add checksums to an index
                of an earlier version.
            progress: show a progress bar; by default on a terminal.

        Returns:
            The ids of damaged entries and the names of damaged files, and what was repaired.

        Example:
            >>> index.check().ok                             # doctest: +SKIP
            True
        """
        with counting("checking", len(self), progress) as advance:
            return check_store(
                self.store, lambda: self.model, photos=photos, repair=repair, on_progress=advance
            )

    def describe(
        self, photos: Sequence[Image.Image], boxes: Sequence[Box | None] | None = None
    ) -> Float32:
        """Compute descriptors of n upright RGB photos, or boxes in them: float32 [n, C]."""
        return self.generation.describe(photos, boxes)

    def rerank(
        self,
        photos: Sequence[Image.Image],
        hits: Sequence[Hit],
        boxes: Sequence[Box | None] | None = None,
        until: float | None = None,
    ) -> list[Hit]:
        """Re-rank hits by spatial verification with photos; see `reranking.rerank_hits`."""
        return self._rerank(self.store, photos, hits, boxes, until)

    def _rerank(
        self,
        store: Store,
        photos: Sequence[Image.Image],
        hits: Sequence[Hit],
        boxes: Sequence[Box | None] | None = None,
        until: float | None = None,
    ) -> list[Hit]:
        """Re-rank the hits of a search in this store."""
        from listwise.local.rerank import Reranker
        from listwise.search.reranking import rerank_hits

        if self._reranker is None:
            self._reranker = Reranker()
        return rerank_hits(store, self._reranker, photos, hits, boxes, until)

    def _change(self, change: Callable[[], Result]) -> Result:
        """Change the index; repeat it if another process has switched to another generation."""
        try:
            return change()
        except IndexUpgradedError:
            self.refresh()
            return change()

    def _keys(self, named: str | int | Path | Entry) -> list[int]:
        """The keys of the entries that a user gave by id, key, file or folder."""
        if isinstance(named, Entry):
            return [named.key]
        key = key_of(named if isinstance(named, int) else str(named))
        if self.store.get([key]):
            return [key]
        if isinstance(named, int) or not Path(named).exists():
            raise NoEntryError(
                f"{self.uri} has no photo {named}: give the id of an entry, or a file"
            )
        digests = [file.digest() for file in photos_of(named).files()]
        keys = [entry.key for entry in self.store.with_digests(digests).values()]
        if not keys:
            raise InputError(f"{self.uri} has no entry for {named}: nothing was removed")
        return keys


def _described(
    current: Generation, query: Any, box: Any
) -> tuple[list[tuple[Image.Image, Box | None]], Float32]:
    """The photos of a query with their boxes, and its descriptors [n, dim]."""
    if isinstance(query, np.ndarray) and np.issubdtype(query.dtype, np.floating):
        return [], np.atleast_2d(query).astype(np.float32)
    several = isinstance(query, Sequence) and not isinstance(query, str)
    given = query if several else [] if query is None else [query]
    boxes = [box] if query is not None and not several else list(box or [None] * len(given))
    if len(boxes) != len(given):
        raise InputError(
            f"`box` has {len(boxes)} boxes for {len(given)} photos: give one per photo"
        )
    photos = [open_photo(photo) for photo in given]
    if not photos:
        return [], np.empty((0, current.header.dim), np.float32)
    return list(zip(photos, boxes, strict=True)), current.describe(photos, boxes)
