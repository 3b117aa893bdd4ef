"""Extract the local features of photos into a file, on all cores; an interrupted run resumes."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.data import ImageError, Images, PhotoFile
from listwise.data.workers import explain_lost_workers, start_worker, worker_context
from listwise.descriptors.parts import Parts
from listwise.errors import InputError
from listwise.local.features import COUNT, Features, file_features
from listwise.local.storage import FeatureFile, FeatureHeader, FeatureWriter, PhotoFeatures
from listwise.machine import Machine
from listwise.optional import requires

with requires("local", "local features"):
    import cv2

PART = 64  # photos per part: what is lost if the process is killed, a few seconds of work


class Extractor(Protocol):
    """An object that extracts local features; worker processes get copies of it.

    `name` identifies the extractor and its settings: features with equal names are comparable.
    """

    @property
    def name(self) -> str:
        """Name of the extractor with its settings."""

    @property
    def dim(self) -> int:
        """Dimensions D of a descriptor."""

    def __call__(self, file: PhotoFile) -> Features:
        """Extract the features of a photo or of its box, in pixels of the upright whole photo."""


Result = tuple[int, int, Features] | str
"""Width, height and features of a photo, or the reason why it cannot be read."""


@runtime_checkable
class BatchExtractor(Extractor, Protocol):
    """An extractor that can process many photos at a time."""

    @property
    def prefers_batches(self) -> bool:
        """Whether that is faster on this machine."""

    def extract_many(
        self, images: Images, indices: Sequence[int], workers: int | None
    ) -> Generator[Result, None, None]:
        """Yield the result of each photo at these positions, in order."""


@dataclass(frozen=True)
class HessianAffine:
    """Extractor of Hessian-affine regions with RootSIFT: at most `count` per photo, [n, 128]."""

    count: int = COUNT
    dim: int = 128

    @property
    def name(self) -> str:
        """Name of the extractor with its settings."""
        return f"hessian-affine-rootsift-{self.count}"

    def __call__(self, file: PhotoFile) -> Features:
        """Extract the features of a photo or of its box, in pixels of the upright whole photo."""
        return file_features(file, self.count)


DEFAULT = HessianAffine()


def open_extractor(
    delf: str | Path | None = None, count: int | None = None, device: str = "auto"
) -> Extractor:
    """Return the Hessian-affine extractor, or a DELF extractor for a folder of `train_delf`.

    Args:
        delf: folder that `train_delf` wrote; Hessian-affine regions with RootSIFT by default.
        count: maximum number of features per photo; by default 2000, or 1000 for DELF.
        device: device of the DELF network: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
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
    """Extract the local features of photos into a file; an interrupted run resumes.

    Finished parts stay in `OUT.partial/` until the end, and the next run with the same extractor
    and photos uses them. Photos that cannot be read are left out and listed in
    `header.unreadable` of the file. If a photo has a box, only the box is used.

    Args:
        images: photos to process.
        out: file to write, `.arrow`.
        extractor: what extracts the features.
        strict: fail at the first photo that cannot be read.
        workers: number of processes, one per core by default; 0 uses this process. With a GPU
            they only decode.
        on_progress: called with the number of photos just processed.
        on_note: called with sentences for the user.
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
    """Yield the result of each photo at these positions, in order."""
    if isinstance(extractor, BatchExtractor) and extractor.prefers_batches:
        with closing(extractor.extract_many(images, indices, workers)) as results:
            yield from results
        return
    if workers == 0:
        for index in indices:
            yield _result(extractor, images.file(index))
        return
    count = min(workers or Machine.detect("cpu").cores, max(1, len(indices)))
    pool = ProcessPoolExecutor(count, mp_context=worker_context(), initializer=_start_worker)
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
