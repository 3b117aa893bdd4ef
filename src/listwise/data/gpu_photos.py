"""Photos decoded by a GPU: JPEG files as cameras write them there, all others by the CPU."""

import io
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from listwise.data.images import (
    Box,
    ImageError,
    clip_box,
    exif_orientation,
    load_image,
    opened,
)
from listwise.errors import InputError

GROUP = 8  # files that a thread reads at a time
GROUPS_AHEAD = 16
# Photos decoded at a time: enough for all of a GPU's decoders, few enough for its memory.
CHUNK = 128
CHUNK_PIXELS = 2**26

# Sampling of the three components of the files that decoders for JPEG all know.
_SAMPLINGS = {((h, v), (1, 1), (1, 1)) for h, v in ((1, 1), (2, 1), (1, 2), (2, 2))}
_UPRIGHT: dict[int, Callable[[Tensor], Tensor]] = {
    1: lambda photo: photo,
    2: lambda photo: photo.flip(2),
    3: lambda photo: photo.flip(1, 2),
    4: lambda photo: photo.flip(1),
    5: lambda photo: photo.transpose(1, 2),
    6: lambda photo: photo.transpose(1, 2).flip(2),
    7: lambda photo: photo.transpose(1, 2).flip(1, 2),
    8: lambda photo: photo.transpose(1, 2).flip(1),
}


class Wanted(NamedTuple):
    """A photo's file, the box to cut out, and the short side that may be enough."""

    path: str
    box: Box | None = None
    min_side: int | None = None


class _File(NamedTuple):
    """A file with its size in pixels; `content` is None if it is not for the GPU."""

    wanted: Wanted
    pixels: int
    size: tuple[int, int] = (0, 0)
    orientation: int = 1
    content: Tensor | None = None


@cache
def gpu_decodes(device: torch.device) -> bool:
    """Whether photos can be decoded and resampled on a device: tried out once."""
    if device.type != "cuda":
        return False
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        import triton  # noqa: F401

        _decode_jpegs([_to_tensor(file.getvalue())], device)
    except Exception:  # one of many parts is missing, and each says so in its own way
        return False
    return True


def decoded_photos(
    wanted: Iterable[Wanted], device: torch.device, threads: int
) -> Generator[Tensor | ImageError, None, None]:
    """Upright photos uint8 [3, H, W] on a device, in their order, or why one cannot be decoded.

    They are ready on the stream that is the current one when they are asked for; memory that this
    stream does not use any more is written to. Files are read ahead.

    Args:
        wanted: the photos.
        device: decodes the JPEG files whose colours and layout are the usual ones.
        threads: read files, and decode all others.
    """
    pool = ThreadPoolExecutor(threads, "photos")
    try:
        started: list[tuple[_File, Future[Tensor | ImageError] | None]] | None = None
        for chunk in _chunks(_read_ahead(pool, iter(wanted))):
            # What the CPU decodes is one chunk ahead.
            upcoming = [
                (file, pool.submit(_load, file.wanted) if file.content is None else None)
                for file in chunk
            ]
            if started is not None:
                yield from _finish(started, pool, device)
            started = upcoming
        if started is not None:
            yield from _finish(started, pool, device)
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(pool: ThreadPoolExecutor, wanted: Iterator[Wanted]) -> Iterator[_File]:
    reading: deque[Future[list[_File]]] = deque()
    while True:
        while len(reading) < GROUPS_AHEAD and (group := list(islice(wanted, GROUP))):
            reading.append(pool.submit(_read, group))
        if not reading:
            return
        yield from reading.popleft().result()


def _chunks(files: Iterator[_File]) -> Iterator[list[_File]]:
    chunk: list[_File] = []
    pixels = 0
    for file in files:
        if chunk and (len(chunk) == CHUNK or pixels + file.pixels > CHUNK_PIXELS):
            yield chunk
            chunk, pixels = [], 0
        chunk.append(file)
        pixels += file.pixels
    if chunk:
        yield chunk


def _read(group: list[Wanted]) -> list[_File]:
    return [_read_file(wanted) for wanted in group]


def _read_file(wanted: Wanted) -> _File:
    """A file's content, if a GPU's decoder surely makes of it what `load_image` would."""
    try:
        content = Path(wanted.path).read_bytes()
        with opened(io.BytesIO(content)) as image:
            width, height = image.size
            file = _File(wanted, width * height, (width, height))
            if file.pixels > CHUNK_PIXELS or not _is_usual(image) or not _is_whole(content):
                return file
            orientation = exif_orientation(image)
    except (ImageError, OSError):
        return _File(wanted, 0)  # `load_image` will say what is wrong
    return file._replace(orientation=orientation, content=_to_tensor(content))


def _is_usual(image: Image.Image) -> bool:
    """Whether an image is a baseline JPEG in grey or YCbCr, of a common layout."""
    if image.format != "JPEG" or image.mode not in ("L", "RGB") or "progressive" in image.info:
        return False
    layers = getattr(image, "layer", [])
    numbers, samplings = [layer[0] for layer in layers], tuple(layer[1:3] for layer in layers)
    if image.mode == "L":
        return samplings == ((1, 1),)
    as_rgb = image.info.get("adobe_transform") == 0 or bytes(numbers) == b"RGB"
    return samplings in _SAMPLINGS and not as_rgb


def _is_whole(content: bytes) -> bool:
    """Whether a JPEG file ends as it must: a GPU's decoder says nothing of what is missing."""
    return content.endswith(b"\xff\xd9")


def _load(wanted: Wanted) -> Tensor | ImageError:
    try:
        photo = load_image(*wanted)
    except ImageError as error:
        return error
    return torch.from_numpy(np.ascontiguousarray(np.asarray(photo).transpose(2, 0, 1)))


def _finish(
    started: list[tuple[_File, Future[Tensor | ImageError] | None]],
    pool: ThreadPoolExecutor,
    device: torch.device,
) -> Iterator[Tensor | ImageError]:
    files = [file for file, loading in started if loading is None]
    decoded = iter(_decode(files, device))
    photos: deque[Tensor | ImageError | Future[Tensor | ImageError]] = deque()
    for file, loading in started:
        photo = next(decoded) if loading is None else None
        photos.append(photo if photo is not None else loading or pool.submit(_load, file.wanted))
    started.clear()
    while photos:
        found = photos.popleft()
        if isinstance(found, Future):
            found = found.result()
        yield _moved(found, device) if isinstance(found, Tensor) else found


def _decode(files: list[_File], device: torch.device) -> list[Tensor | ImageError | None]:
    """Upright photos, their boxes cut out; None where the decoder failed."""
    if not files:
        return []
    contents = [file.content for file in files if file.content is not None]
    decoded: list[Tensor | None]
    try:
        decoded = [*_decode_jpegs(contents, device)]
    except RuntimeError:
        if len(files) == 1:
            return [None]
        # One bad file fails all that are decoded with it.
        return [photo for file in files for photo in _decode([file], device)]
    return [_cut(file, photo) for file, photo in zip(files, decoded, strict=True)]


def _cut(file: _File, photo: Tensor | None) -> Tensor | ImageError | None:
    width, height = file.size
    if photo is None or photo.shape != (3, height, width):
        return None
    photo = _UPRIGHT[file.orientation](photo).contiguous()
    if file.wanted.box is None:
        return photo
    try:
        size = photo.shape[2], photo.shape[1]
        left, top, right, bottom = clip_box(file.wanted.path, file.wanted.box, size)
    except ImageError as error:
        return error
    return photo[:, top:bottom, left:right]


def _decode_jpegs(contents: list[Tensor], device: torch.device) -> list[Tensor]:
    """RGB photos uint8 [3, H, W] of the bytes of JPEG files."""
    from torchvision.io import ImageReadMode, decode_jpeg

    if device.type == "cuda":
        # The decoder has a stream of its own and does not wait for this one: it would write into
        # memory that is free for this stream, but which its last kernels are still to read.
        torch.cuda.current_stream(device).synchronize()
        # There is one decoder, which is made anew whenever the device has another name.
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
    photos: list[Tensor] = decode_jpeg(contents, mode=ImageReadMode.RGB, device=device)
    return photos


def _to_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _moved(photo: Tensor, device: torch.device) -> Tensor:
    try:
        return photo.to(device)
    except torch.OutOfMemoryError as error:
        _, height, width = photo.shape
        raise InputError(
            f"the GPU's memory has no room for a photo of {width} × {height}: "
            "use a smaller `micro_batch`, or smaller photos"
        ) from error
