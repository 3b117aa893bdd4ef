"""Photos to a file of local features, on all cores, so that an interrupted run can go on."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import cv2
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.data import Box, ImageError, Images, image_size
from listwise.data.workers import naming_lost_workers
from listwise.descriptors.parts import open_parts, parts_key, remove_parts
from listwise.errors import InputError
from listwise.files import publish
from listwise.local.features import COUNT, Features, photo_features
from listwise.local.storage import FeatureFile, FeatureWriter, Header, Photo, is_feature_file
from listwise.machine import Machine

PART = 64  # photos in a part, which is what a kill can cost: some seconds


class Extractor(Protocol):
    """Makes local features; worker processes get copies of it.

    `name` says what it is and how it is set: features are comparable if their names are equal.
    """

    @property
    def name(self) -> str:
        """What the features are of."""

    @property
    def dim(self) -> int:
        """Dimensions of a descriptor."""

    def __call__(self, path: str, box: Box | None) -> Features:
        """Features of a photo or its box, placed in the upright whole photo."""


Result = tuple[int, int, Features] | str
"""A photo's width, height and features, or why it cannot be read."""


@runtime_checkable
class ManyExtractor(Extractor, Protocol):
    """An extractor that may be faster with many photos at a time."""

    @property
    def together(self) -> bool:
        """Whether it is, on this machine."""

    def many(
        self, images: Images, indices: Sequence[int], workers: int | None
    ) -> Generator[Result, None, None]:
        """What comes of the photos at these positions, in order."""


@dataclass(frozen=True)
class HessianAffine:
    """Hessian-affine regions with RootSIFT, `count` a photo at most."""

    count: int = COUNT
    dim: int = 128

    @property
    def name(self) -> str:
        """What the features are of."""
        return f"hessian-affine-rootsift-{self.count}"

    def __call__(self, path: str, box: Box | None) -> Features:
        """Features of a photo or its box, placed in the upright whole photo."""
        return photo_features(path, box, self.count)


DEFAULT = HessianAffine()


@naming_lost_workers()
def extract_features(
    images: Images,
    out: str | Path,
    extractor: Extractor = DEFAULT,
    *,
    strict: bool = False,
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
    on_note: Callable[[str], object] = lambda note: None,
) -> FeatureFile:
    """Put the local features of photos into a file; an interrupted run goes on where it was.

    What is done lies in `OUT.partial/` until the end, and is used by the next run of the same
    extractor and photos. Photos that cannot be read are left out and named in the file's
    `header.unreadable`.

    Args:
        images: photos; of one with a box, only the box is looked at.
        out: the file, conventionally `.arrow`.
        extractor: makes the features.
        strict: stop at the first photo that cannot be read.
        workers: processes, one for each core by default; 0 works in this one. On a GPU they decode.
        on_progress: called with the number of photos just done.
        on_note: called with a sentence when earlier work is used, or thrown away.
    """
    out = Path(out)
    if not len(images):
        raise InputError("there are no photos to extract local features from")
    if out.exists() and not is_feature_file(out):
        raise InputError(f"{out} exists and is no file of local features: give another name")
    parts = [range(i, min(i + PART, len(images))) for i in range(0, len(images), PART)]
    partial = out.with_name(f"{out.name}.partial")
    open_parts(partial, ".arrow", parts_key(f"{extractor.name} {PART}", images), on_note)

    files = [partial / f"{part.start:09d}.arrow" for part in parts]
    missing = [number for number, file in enumerate(files) if not _usable(file, strict)]
    done = len(images) - sum(len(parts[number]) for number in missing)
    if done:
        on_note(f"{done} of {len(images)} photos were done before")
        on_progress(done)
    indices = [index for number in missing for index in parts[number]]
    with closing(_results(extractor, images, indices, workers)) as results:
        for number in missing:
            photos: list[Photo] = []
            errors: list[str] = []
            for index in parts[number]:
                result = next(results)
                if isinstance(result, str):
                    if strict:
                        raise InputError(result)
                    errors.append(result)
                else:
                    photos.append(Photo(images.ids[index], *result))
                on_progress(1)
            header = Header(extractor=extractor.name, dim=extractor.dim, unreadable=tuple(errors))
            with FeatureWriter(files[number], header) as writer:
                writer.write(photos)
    # Among the parts, so that what a kill leaves of it is removed with them.
    joined = partial / "joined.arrow"
    _join([FeatureFile.open(file) for file in files], joined)
    publish(joined, out)
    remove_parts(partial, ".arrow")
    return FeatureFile.open(out)


def _result(extractor: Extractor, path: str, box: Box | None) -> Result:
    try:
        return *image_size(path), extractor(path, box)
    except ImageError as error:
        return str(error)


def _results(
    extractor: Extractor, images: Images, indices: Sequence[int], workers: int | None
) -> Generator[Result, None, None]:
    """What comes of the photos at these positions, in order."""
    if isinstance(extractor, ManyExtractor) and extractor.together:
        with closing(extractor.many(images, indices, workers)) as results:
            yield from results
        return
    if workers == 0:
        for index in indices:
            yield _result(extractor, images.paths[index], images.box(index))
        return
    # Forked processes would inherit the locks of this one's threads.
    count = min(workers or Machine.detect("cpu").cores, max(1, len(indices)))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_settle)
    try:
        ahead: deque[Future[Result]] = deque()
        for index in indices:
            ahead.append(pool.submit(_result, extractor, images.paths[index], images.box(index)))
            if len(ahead) > PART:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool as error:
        raise InputError(
            "a process that extracts features was ended by the system, mostly for lack of memory: "
            "use fewer `workers`"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _settle() -> None:
    """A worker has one core, and leaves Ctrl-C to the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cv2.setNumThreads(1)
    threadpool_limits(1)


def _usable(part: Path, strict: bool) -> bool:
    """Whether a part is done; it is in its place only when it is whole."""
    return part.exists() and not (strict and FeatureFile.open(part).header.unreadable)


def _join(parts: list[FeatureFile], out: Path) -> None:
    errors = tuple(error for part in parts for error in part.header.unreadable)
    if not any(len(part) for part in parts):
        raise InputError(f"none of the {len(errors)} photos can be read; the first: {errors[0]}")
    header = parts[0].header.model_copy(update={"unreadable": errors})
    with FeatureWriter(out, header) as writer:
        for part in parts:
            writer.copy(part)
