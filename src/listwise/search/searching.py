"""The one search path, from photos, entries and descriptors to hits, for one query or a batch."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from listwise.data.images import (
    DECODED_SIDE,
    MAX_PIXELS,
    ORIGINAL_SIDE,
    Box,
    ImageError,
    UprightPhoto,
    check_original_side,
    decoding_pixels,
    image_size,
    read_image_file,
    reduced_size,
)
from listwise.data.photos import decode_photo, open_photo, photo_digest
from listwise.errors import InputError
from listwise.machine import core_count
from listwise.search.entries import Float32, NoEntryError, key_of
from listwise.search.generation import Generation
from listwise.search.hits import (
    Hit,
    Query,
    QueryError,
    QueryPhoto,
    SearchResult,
    StoppedError,
    expands,
    find_entries,
    find_hits,
    find_marked,
    lowest_score,
    marked_order,
)
from listwise.search.refinement import DIFFUSED, diffuse, find_refinement
from listwise.search.store import Store
from listwise.search.stored_marks import stored_marks
from listwise.settings import ExtractSettings

if TYPE_CHECKING:
    from listwise.local.rerank import Reranker

RECENT = 256
"""Number of query photos whose descriptors are kept."""


@dataclass(eq=False)
class _Example:
    """A photo of a query, and what becomes of it.

    Attributes:
        query: the query.
        photo: the photo.
        box: the part of it to search for, or None.
        pixels: the number of pixels to decode, as `decoding_pixels` counts them.
        network_pixels: the number of pixels to describe.
        error: why it is not described.
        decoded: the photo for the network until it is described, and the one to verify hits.
        row: its descriptor [1, C].
    """

    query: Query
    photo: QueryPhoto
    box: Box | None
    pixels: int = 0
    network_pixels: int = 0
    error: Exception | None = None
    decoded: Sequence[UprightPhoto] = ()
    row: Float32 | None = None

    def measure(self, settings: ExtractSettings) -> None:
        """Count the pixels from the header of the photo."""
        try:
            if isinstance(self.photo, str | Path | BytesIO):
                size = image_size(self.photo)
                self.pixels = decoding_pixels(self.photo, self.box, settings.max_side)
            else:
                size = open_photo(self.photo).size
                self.pixels = size[0] * size[1]
            self.network_pixels = network_pixels(size, settings)
        except InputError as error:
            self.error = error

    def decode(self, generation: Generation, max_pixels: int) -> None:
        """Decode the photo for the network, and for verification if the query wants it."""
        max_side = generation.header.settings.max_side
        try:
            photo = decode_photo(self.photo, self.box, max_side, max_pixels)
            if max_side is None and generation.model.device.type == "cpu":
                name = self.photo if isinstance(self.photo, str | Path | BytesIO) else "the photo"
                check_original_side(name, photo.size)
        except InputError as error:
            self.error = error
        else:
            verified = [photo.reduced(DECODED_SIDE)] if self.query.options.rerank else []
            self.decoded = [photo.reduced(max_side), *verified]

    def goes_on(self) -> bool:
        """Whether there was no error, and somebody waits for the query."""
        if self.query.finished.is_set():
            self.error = StoppedError()
        return self.error is None


class Searcher:
    """The steps of a search, and what they keep between searches.

    Several threads may use one searcher, but only one at a time may call `search`.

    Args:
        pixels: pixels of photos that are decoded together, as `decoding_pixels` counts them.
        reserve: a context that waits until so many pixels may be decoded.
        reranker: creates what verifies hits, when it is first needed.
    """

    def __init__(
        self,
        pixels: int = MAX_PIXELS,
        reserve: Callable[[int], AbstractContextManager[None]] = lambda pixels: nullcontext(),
        reranker: "Callable[[], Reranker] | None" = None,
    ) -> None:
        self._pixels = pixels
        self._reserve = reserve
        self._make_reranker = reranker
        self._reranker: Reranker | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(core_count(), "decode")
        self._recent: OrderedDict[Hashable, Float32] = OrderedDict()

    @property
    def reranker(self) -> "Reranker":
        """What verifies hits."""
        from listwise.local.rerank import Reranker

        with self._lock:
            if self._reranker is None:
                self._reranker = (self._make_reranker or Reranker)()
            return self._reranker

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)
        if self._reranker is not None:
            self._reranker.close()

    def search(
        self, generation: Generation, queries: Sequence[Query]
    ) -> list[SearchResult | Exception]:
        """Find the nearest entries to each query; `rerank` verifies them.

        Photos are decoded and described together, and queries without refinement are searched
        together. An error in the place of a result concerns that query alone.
        """
        examples = [
            [_Example(query, *each) for each in zip(query.photos, query.boxes, strict=True)]
            for query in queries
        ]
        for part in self._parts(generation, chain.from_iterable(examples)):
            self._describe(generation, part)
        answers: list[SearchResult | Exception] = []
        for query, described in zip(queries, examples, strict=True):
            try:
                answers.append(_prepare(generation, query, described))
            except Exception as error:
                answers.append(error)
        ready = {i: each for i, each in enumerate(answers) if isinstance(each, SearchResult)}
        # Refinement is slow: each query has its turn, and nobody may wait for it by then.
        alone = [[i] for i, each in ready.items() if each.refine is not None]
        for places in [[i for i, each in ready.items() if each.refine is None], *alone]:
            try:
                if places in alone:
                    ready[places[0]].query.check()
                found = find_hits(generation, [ready[i] for i in places]) if places else []
                for i, hits in zip(places, found, strict=True):
                    answers[i] = replace(ready[i], hits=hits)
            except Exception as error:
                for i in places:
                    answers[i] = error
        return answers

    def rerank(self, result: SearchResult, until: float | None = None) -> SearchResult:
        """Verify the first hits by matching points, then diffuse them if the query wants it.

        Entries of the query whose photos cannot be read are left out. Marked entries keep their
        places.

        Args:
            result: from `search`.
            until: the time of `time.monotonic` at which to stop verifying.
        """
        query, store = result.query, result.generation.store
        photos = dict(enumerate(result.photos))
        keys = list(map(key_of, query.entries))
        entries = store.get(keys)
        for number, key in enumerate(keys, len(query.photos)):
            query.check()
            with suppress(ImageError, KeyError):
                path, box = entries[key].path, entries[key].box
                with self._reserve(decoding_pixels(path, box, DECODED_SIDE)):
                    photo = decode_photo(path, box, DECODED_SIDE, self._pixels)
                    photos[number] = photo.reduced(DECODED_SIDE)
        hits = self._verify(result, photos, until) if photos else result.hits
        query.check()
        if query.options.diffuses:
            hits = _diffuse_hits(store, hits)
        return replace(result, hits=marked_order(result, hits))

    def _verify(
        self, result: SearchResult, photos: Mapping[int, UprightPhoto], until: float | None
    ) -> list[Hit]:
        """Sort the first hits by the points that agree with one of the photos, by their numbers.

        Hits that were not verified keep their place. Features are cached, so that another call
        verifies more in the same time.
        """
        from listwise.local.rerank import TOP

        hits, numbers = result.hits, list(photos)
        entries = [hit.entry for hit in hits[:TOP]]
        known = result.generation.store.contents("local", [entry.key for entry in entries])
        reranked = self.reranker.rerank(
            [photo.image for photo in photos.values()],
            entries,
            stored=[known.get(entry.key) for entry in entries],
            until=until,
            finished=result.query.finished,
        )
        found = []
        for each in reranked:
            hit, number = hits[each.position], None
            if each.inliers is not None:
                matches = each.matches
                if each.photo is not None:
                    number = numbers[each.photo]
                    points = placed(matches[:, :2], photos[number])
                    matches = np.concatenate([points, matches[:, 2:]], axis=1)
                hit = hit.changed(inliers=each.inliers, matches=matches, photo=number)
            found.append(hit)
        return [*found, *hits[len(found) :]]

    def _parts(
        self, generation: Generation, examples: Iterable[_Example]
    ) -> Iterator[list[_Example]]:
        """The photos of a batch in parts.

        A part has no more pixels than may be decoded together, and no more than the network takes
        at one time, so that a query can be dropped between two parts.
        """
        from listwise.models.embed import BATCH_PIXELS

        part: list[_Example] = []
        for new in examples:
            new.measure(generation.header.settings)
            if new.error is not None:
                continue
            pixels = sum(example.pixels for example in part) + new.pixels
            network = sum(example.network_pixels for example in part) + new.network_pixels
            most = BATCH_PIXELS[generation.model.device.type]
            if part and (pixels > self._pixels or network > most):
                yield part
                part = []
            part.append(new)
        if part:
            yield part

    def _describe(self, generation: Generation, part: Sequence[_Example]) -> None:
        """Decode and describe photos, except those that nobody waits for."""
        for example in part:
            example.row = self._known(generation, example)
        wanted = [example for example in part if example.row is None and example.goes_on()]
        with self._reserve(sum(example.pixels for example in wanted)):
            list(self._pool.map(lambda each: each.decode(generation, self._pixels), wanted))
        ready = [example for example in wanted if example.goes_on()]
        if not ready:
            return
        described = generation.describe([example.decoded[0].image for example in ready])
        for example, row in zip(ready, described, strict=True):
            example.row, example.decoded = row[None].copy(), example.decoded[1:]
            self._keep(generation, example, example.row)

    def _known(self, generation: Generation, example: _Example) -> Float32 | None:
        """The descriptor of a photo of the index, or of one whose results have been marked."""
        if example.query.options.rerank or example.error is not None:
            return None  # verification decodes the photo in any case
        if example.query.options.marked:
            row = self._recent.get(_name(generation, example))
            if row is not None:
                return row
        # The GPU that described the photo may have decoded it with other rounding errors.
        with suppress(ImageError):
            digest = _digest(example)
            entry = generation.store.with_digests([digest]).get(digest)
            if entry is not None:
                return generation.store.vectors([entry.key])
        return None

    def _keep(self, generation: Generation, example: _Example, row: Float32) -> None:
        name = _name(generation, example)
        if name is not None:
            self._recent[name] = row
            self._recent.move_to_end(name)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)


def _diffuse_hits(store: Store, hits: Sequence[Hit]) -> list[Hit]:
    """Sort the first 5000 hits by diffusion from the nearest ones and the verified ones."""
    from listwise.local.rerank import MINIMUM

    short, rest = list(hits[:DIFFUSED]), list(hits[DIFFUSED:])
    try:
        rows = store.vectors([hit.entry.key for hit in short])
    except NoEntryError:  # another process removed some of them after the search
        store.refresh()
        known = store.get([hit.entry.key for hit in short])
        short = [hit for hit in short if hit.entry.key in known]
        rows = store.vectors([hit.entry.key for hit in short])
    verified = [(hit.inliers or 0) >= MINIMUM for hit in short]
    scores = diffuse([hit.score for hit in short], rows, verified)
    order = np.argsort(-scores, kind="stable")
    return [short[i].changed(refined=float(scores[i])) for i in order] + rest


def network_pixels(size: tuple[int, int], settings: ExtractSettings) -> int:
    """The pixels that the network gets of a photo of a size, at the largest scale."""
    width, height = reduced_size(*size, settings.max_side or ORIGINAL_SIDE)
    return round(width * height * max(settings.scales) ** 2)


def _prepare(generation: Generation, query: Query, examples: Sequence[_Example]) -> SearchResult:
    """What to search for in the store, given the descriptors of the photos."""
    for example in examples:
        if example.error is not None:
            raise example.error
    store, options = generation.store, query.options
    where = options.filter
    if where is not None:
        store.check_filter(where)
    keys = [entry.key for entry in find_entries(store, query.entries)]
    given = [*(example.row for example in examples), query.vectors]
    given += [store.vectors(keys)] if keys else []
    rows = [vectors for vectors in given if vectors is not None and len(vectors)]
    if not rows:
        raise QueryError("nothing to search for: give a photo or an entry")
    same, different = _marked(generation, query)
    depth = options.start + options.k + 1  # one more shows whether there are more
    if options.rerank:
        if not query.photos and not keys:
            raise QueryError("`rerank` needs photos: give a photo or an entry, not descriptors")
        from listwise.local.rerank import TOP

        depth = max(depth, DIFFUSED if options.diffuses else TOP)
    # Diffusion comes after verification: it starts from the hits that match.
    now = options.refine is not None and not options.diffuses
    return SearchResult(
        query,
        generation,
        [photo for example in examples for photo in example.decoded],
        np.concatenate(rows),
        depth,
        expand=expands(generation, options, bool(same or different)),
        exclude={*keys, *map(key_of, options.exclude)},
        where=where,
        min_score=lowest_score(generation.calibration, options),
        refine=find_refinement(options.refine) if options.refine and now else None,
        same=same,
        different=different,
    )


def _marked(generation: Generation, query: Query) -> tuple[list[int], list[int]]:
    """The keys of the entries that are marked "same" and "different"."""
    store, options = generation.store, query.options
    same, different = (
        [entry.key for entry in entries]
        for entries in find_marked(store, options.same, options.different)
    )
    if options.marks:
        if query.vectors is not None or len(query.photos) + len(query.entries) != 1:
            raise QueryError("`marks` needs one photo or one entry: marks belong to one photo")
        taken = {*same, *different}
        mine, theirs = stored_marks(store, query)
        same += [key for key in mine if key not in taken]
        different += [key for key in theirs if key not in taken]
    return same, different


def _digest(example: _Example) -> str:
    """Return the digest that the file of a query has in an index; empty for a photo in memory."""
    photo = example.photo
    if isinstance(photo, BytesIO):
        return photo_digest(photo.getvalue(), example.box)
    if isinstance(photo, str | Path):
        return photo_digest(read_image_file(photo), example.box)
    return ""


def _name(generation: Generation, example: _Example) -> Hashable | None:
    """What the descriptor of an uploaded photo depends on; None for any other photo."""
    if not isinstance(example.photo, BytesIO):
        return None
    digest = blake2b(example.photo.getbuffer(), digest_size=16).digest()
    return generation.header.model, generation.store.generation, digest, example.box


def placed(points: Float32, photo: UprightPhoto) -> Float32:
    """Points [n, 2] of a reduced photo or box, in pixels of the whole photo."""
    found: Float32 = (points + 0.5) * photo.scale - 0.5 + np.array(photo.corner)
    return found.astype(np.float32)
