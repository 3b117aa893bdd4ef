"""Extract the local features of photos into a file, on all cores; an interrupted run resumes."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from listwise.data import ImageError, Images, PhotoFile
from listwise.data.workers import explain_lost_workers
from listwise.descriptors.extract import check_out, none_readable, photos_key
from listwise.errors import InputError
from listwise.local.features import COUNT, Features, file_features
from listwise.local.storage import (
    NAME,
    FeatureFile,
    FeatureHeader,
    FeatureWriter,
    is_feature_file,
    store_exactly,
)
from listwise.local.workers import Workers


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
        delf: folder of deep local features (DELF) that `listwise local train` wrote; by default
            HesAff-rSIFT is used instead.
        count: maximum number of local features per photo; by default 2000, or 1000 with `delf`.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
    """
    if delf is None:
        return DEFAULT if count is None else HessianAffine(count)
    from listwise.local.delf import DelfExtractor, DelfSettings

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

    Finished photos stay in `OUT.partial` until the end, and the next run with the same extractor
    and photos uses them. Photos that cannot be read are left out and listed in
    `header.unreadable` of the file. If a photo has a box, only the box is used.

    Args:
        images: photos to process.
        out: file to write.
        extractor: what extracts the features.
        strict: stop at the first photo that cannot be read.
        workers: number of processes; by default one per CPU core, 0 uses this process. With a GPU
            they only decode.
        on_progress: called with the number of photos just processed.
        on_note: called with sentences for the user.
    """
    out = Path(out)
    check_out(out, images, NAME, is_feature_file)
    header = FeatureHeader(extractor=extractor.name, dim=extractor.dim)
    with FeatureWriter(out, header, photos_key("", images), on_note) as writer:
        missing = writer.missing(len(images), strict)
        on_progress(len(images) - len(missing))
        with closing(_results(extractor, images, missing, workers)) as results:
            for row, result in results:
                if not isinstance(result, str):
                    writer.write(row, store_exactly(images.ids[row], *result))
                elif strict:
                    raise InputError(result)
                else:
                    writer.write(row, result)
                on_progress(1)
        if len(errors := writer.errors()) == len(images):
            raise none_readable(errors)
    return FeatureFile.open(out)


def _result(extractor: Extractor, file: PhotoFile) -> Result:
    try:
        file = file.read()
        return *file.size(), extractor(file)
    except ImageError as error:
        return str(error)


def _results(
    extractor: Extractor, images: Images, indices: Sequence[int], workers: int | None
) -> Generator[tuple[int, Result], None, None]:
    """Yield the position and the result of each photo at these positions, in any order."""
    if not isinstance(extractor, HessianAffine):
        from listwise.local.delf import DelfExtractor

        if isinstance(extractor, DelfExtractor) and extractor.on_gpu:
            yield from extractor.extract_many(images, indices, workers)
            return
    with Workers(workers) as processes:
        results = processes.results(partial(_result, extractor), map(images.file, indices))
        with closing(results):
            yield from zip(indices, results, strict=True)
