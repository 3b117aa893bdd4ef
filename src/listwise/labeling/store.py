"""The local features and the appearance of the photos to label, which an interrupted run keeps."""

from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from listwise.data import ImageError, Images, PhotoFile
from listwise.errors import InputError
from listwise.labeling.result import Progress
from listwise.local.compact import DIM, compact_features, decode_features, feature_count
from listwise.local.features import LARGE, Features
from listwise.local.storage import FeatureFile, FeatureHeader, FeatureWriter, StoredPhoto
from listwise.local.workers import Workers
from listwise.progress import counted


class PhotoStore:
    """What was extracted of N photos, by their numbers; zero for those that cannot be read.

    Attributes:
        usable: numbers of the photos that can be read.
        sizes: width and height of each photo: int64 [N, 2].
        counts: number of local features of each photo: [N].
        looks: 64 bits that are almost equal for copies of a photo, see `_look`: uint64 [N].
        digests: digest of the content of each file: [N].
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        self._file = FeatureFile.open(path)
        self.usable = np.array([row[0] for row in self._file.table], np.int64)
        self._rows = {photo: row for row, photo in enumerate(self.usable.tolist())}
        self.sizes, self.counts = np.zeros((count, 2), np.int64), np.zeros(count, np.int64)
        self.looks, self.digests = np.zeros(count, np.uint64), np.zeros(count, "S32")
        for photo, _, width, height, features, look, digest, _ in self._file.table:
            self.sizes[photo], self.counts[photo] = (width, height), features
            self.looks[photo], self.digests[photo] = int(look, 16), digest.encode()

    def errors(self) -> dict[int, str]:
        """Return the number of each photo that cannot be read, with the reason."""
        lost = np.setdiff1d(np.arange(self.count), self.usable).tolist()
        return dict(zip(lost, self._file.header.unreadable, strict=True))

    def read(self, photo: int) -> Features:
        """Return the features of a photo that can be read."""
        return decode_features(self._file.code(self._rows[photo]))


def extract_photos(
    images: Images, folder: Path, features: int, workers: Workers, on_progress: Progress
) -> PhotoStore:
    """Extract what is missing of the photos into a folder; those of an earlier run are kept."""
    path = folder / "features.sqlite"
    advance = counted("extracting local features", len(images), on_progress)
    with suppress(InputError):  # it is missing or damaged
        found = PhotoStore(path, len(images))
        advance(len(images))
        return found
    with FeatureWriter(path, FeatureHeader(extractor=f"compact-{features}", dim=DIM)) as writer:
        missing = writer.missing(len(images))
        advance(len(images) - len(missing))
        tasks = map(images.file, missing)
        with closing(workers.results(partial(describe, count=features), tasks)) as results:
            for row, photo in zip(missing, results, strict=True):
                writer.write(row, photo)
                advance(1)
    return PhotoStore(path, len(images))


def describe(file: PhotoFile, count: int) -> StoredPhoto | str:
    """Extract what is stored of a photo, or return the reason why it cannot be read."""
    try:
        file = file.read()
        photo = file.upright(LARGE)
    except ImageError as error:
        return str(error)
    code = compact_features(photo.image, photo.corner, photo.scale, count)
    look = f"{_look(photo.image):x}"
    return StoredPhoto("", *photo.whole, feature_count(code), look, file.digest(), code)


def _look(photo: Image.Image) -> int:
    """Return 64 bits that are almost equal for resized and recompressed copies of a photo.

    Each bit tells whether a cell of a grid of 8 × 9 cells is brighter than the cell before it.
    """
    cells = np.asarray(photo.convert("L").resize((9, 8)), np.int16)
    bits = np.packbits(cells[:, 1:] > cells[:, :-1])
    return int.from_bytes(bits.tobytes(), "big")
