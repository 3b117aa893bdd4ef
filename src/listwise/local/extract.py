"""Photos to a file of local features, on all cores, so that an interrupted run can be continued."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.data import ImageError, Images, PhotoFile
from listwise.data.workers import explain_lost_workers, start_worker
from listwise.descriptors.parts import Parts
from listwise.errors import InputError
from listwise.local.features import COUNT, Features, file_features
from listwise.local.storage import FeatureFile, FeatureHeader, FeatureWriter, PhotoFeatures
from listwise.machine import Machine
from listwise.optional import requires

with requires("local", "local features"):
    import cv2

PART = 64  # photos in a part, which is what a kill can cost: some seconds


class Extractor(Protocol):
    """Makes local features; worker processes get copies of it.

    `name` names it and its settings: features are comparable if their names are equal.
    """

    @property
    def name(self) -> str:
        """What the features are of."""

    @property
    def dim(self) -> int:
        """Dimensions of a descriptor."""

    def __call__(self, file: PhotoFile) -> Features:
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

    def __call__(self, file: PhotoFile) -> Features:
        """Features of a photo or its box, placed in the upright whole photo."""
        return file_features(file, self.count)


DEFAULT = HessianAffine()


def open_extractor(
    delf: str | Path | None = None, count: int | None = None, device: str = "auto"
) -> Extractor:
    """Hessian-affine regions with RootSIFT, or the deep features of a folder of `train_delf`.

    A photo has at most `count` features: 2000, or 1000 deep ones by default.
    """
    if delf is None:
        return DEFAULT if count is None else HessianAffine(count)
    from listwise.local.delf.extractor import DelfExtractor
    from listwise.local.delf.settings import DelfSettings

    settings = DelfSettings() if count is None else DelfSettings(count=count)
    return DelfExtractor(delf, settings, device)


@explain_lost_workers()
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
    """Put the local features of photos into a file; an interrupted run continues where it stopped.

    What is done is kept in `OUT.partial/` until the end, and is used by the next run of the same
    extractor and photos. Photos that cannot be read are left out and named in the file's
    `header.unreadable`. Of a photo with a box, only the box is looked at.

    `workers` are processes, one for each core by default; 0 works in this one. On a GPU they
    decode. The other arguments are those of `listwise.descriptors.extract`.
    """
    parts = Parts(FeatureFile, Path(out), images, PART, extractor.name)
    with parts.locked():
        missing = parts.start(strict, on_progress, on_note)
        indices = [index for part in missing for index in part.photos]
        with closing(_results(extractor, images, indices, workers)) as results:
            for part in missing:
                photos: list[PhotoFeatures] = []
                errors: list[str] = []
                for index in part.photos:
                    result = next(results)
                    if isinstance(result, str):
                        if strict:
                            raise InputError(result)
                        errors.append(result)
                    else:
                        photos.append(PhotoFeatures(images.ids[index], *result))
                    on_progress(1)
                header = FeatureHeader(
                    extractor=extractor.name, dim=extractor.dim, unreadable=tuple(errors)
                )
                with FeatureWriter(part.path, header) as writer:
                    writer.write(photos)
        return parts.join()


def _result(extractor: Extractor, file: PhotoFile) -> Result:
    try:
        file = file.read()
        return *file.size(), extractor(file)
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
            yield _result(extractor, images.file(index))
        return
    # Forked processes would inherit the locks of this one's threads.
    count = min(workers or Machine.detect("cpu").cores, max(1, len(indices)))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker)
    try:
        ahead: deque[Future[Result]] = deque()
        for index in indices:
            ahead.append(pool.submit(_result, extractor, images.file(index)))
            if len(ahead) > PART:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    start_worker()
    cv2.setNumThreads(1)
    threadpool_limits(1)
