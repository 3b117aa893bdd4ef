"""Photos to a file of local features, on all cores, so that an interrupted run can go on."""

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import cv2
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.data import Box, ImageError, Images, image_size
from listwise.errors import InputError
from listwise.files import write_text
from listwise.local.features import COUNT, Features, photo_features
from listwise.local.storage import FeatureFile, FeatureWriter, Header, Photo, is_feature_file

PART = 64  # photos in a part, which is what a kill can cost: some seconds
KEY_FILE = "listwise.key"


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


def extract_features(
    images: Images,
    out: str | Path,
    extractor: Extractor = HessianAffine(),
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
        workers: processes, one for each core by default; 0 works in this one.
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
    _open_partial(partial, _key(extractor, images), on_note)

    files = [partial / f"{part.start:09d}.arrow" for part in parts]
    missing = [number for number, file in enumerate(files) if not _usable(file, strict)]
    done = len(images) - sum(len(parts[number]) for number in missing)
    if done:
        on_note(f"{done} of {len(images)} photos were done before")
        on_progress(done)
    with _pool(workers) as submit:
        found = _ahead(submit, extractor, images, [parts[number] for number in missing])
        for number, results in zip(missing, found, strict=True):
            photos: list[Photo] = []
            errors: list[str] = []
            for index, result in zip(parts[number], results, strict=True):
                read = result()
                on_progress(1)
                if isinstance(read, str):
                    if strict:
                        raise InputError(read)
                    errors.append(read)
                else:
                    photos.append(Photo(images.ids[index], *read))
            header = Header(
                extractor=extractor.name, dim=extractor.dim, unreadable=tuple(errors)
            )
            with FeatureWriter(files[number], header) as writer:
                writer.write(photos)
    result_file = _join([FeatureFile.open(file) for file in files], out)
    _remove(partial)
    return result_file


