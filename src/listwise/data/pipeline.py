"""The photo pipeline: read files, decode them, and batch photos of equal or similar shape."""

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, islice, repeat
from operator import length_hint
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from listwise.data.gpu_photos import decode_on_gpu, gpu_decodes
from listwise.data.images import ImageError
from listwise.data.photos import DecodedPhoto, Decoding, PhotoFile, decode_or_error
from listwise.data.workers import map_in_processes
from listwise.machine import drain, submit_ahead

Item = TypeVar("Item")

CPU = torch.device("cpu")
# Photos that a worker decodes at a time: at most CHUNK, and no more after CHUNK_BYTES of files, so
# that large photos need little memory.
CHUNK = 4
CHUNK_BYTES = 2**20
# A chunk with this many bytes in memory has the weight of two, so that few of them are in work.
WEIGHT_BYTES = 2**23
# Starting a worker takes about as long as decoding JPEG files of this many bytes.
START_BYTES = 2**20
# Photos whose file sizes are read to decide how many workers to start, and no more after
# SAMPLE_BYTES in memory.
SAMPLE, SAMPLE_BYTES = 64, 2**27
# Chunks that a GPU decodes ahead of those in use, and chunks whose photos may still be in use.
DECODED_AHEAD = 3
CHUNKS_AHEAD = 2
# Maximum number of pixels of photos that wait for others of their shape: a GPU starts with few,
# large batches.
WAITING_PIXELS = {"cpu": 2**25, "cuda": 2**28}
# A photo joins a larger canvas at the end if its own canvas has at least this share of the pixels.
CANVAS_SHARE = 0.6


def decode_photos(
    files: Iterable[PhotoFile],
    how: Decoding = Decoding(),  # noqa: B008
    workers: int = 0,
    device: torch.device = CPU,
) -> Generator[DecodedPhoto | ImageError, None, None]:
    """Decode photos in order; a photo that cannot be decoded is an `ImageError` in its place.

    Args:
        files: the photos; this process reads a little ahead of what is used.
        how: what to decode: size limits, thumbnails and local features.
        workers: maximum number of processes that read and decode; few or small files use fewer.
            0 decodes in this process, on demand. If a GPU decodes, the number of reading threads.
        device: a GPU that can decode JPEG files decodes the photos into its own memory, with small
            differences between decoders. Photos that the CPU decodes stay in CPU memory.

    Yields:
        `DecodedPhoto` with pixels uint8 [3, H, W], or `ImageError`.
    """
    if gpu_decodes(device) and how.local is None:  # a CPU computes local features
        return _on_own_stream(decode_on_gpu(files, how, device, max(1, workers)), device)
    return _decode_by_workers(files, how, workers)


def _decode_by_workers(
    files: Iterable[PhotoFile], how: Decoding, workers: int
) -> Generator[DecodedPhoto | ImageError, None, None]:
    expected = length_hint(files, 10**9)
    stream = iter(files)
    first = islice(stream, SAMPLE if workers else 0)
    sample = deque(next(in_groups(first, SAMPLE, SAMPLE_BYTES, _held_bytes), []))
    count = min(workers, _worthwhile_workers(sample, expected, how))
    stream = chain(drain(sample), stream)
    if not count:
        for file in stream:
            yield decode_or_error(file, how)
        return
    chunks = in_groups(stream, CHUNK, CHUNK_BYTES, file_bytes)
    decode = partial(_decode_chunk, how)
    with closing(map_in_processes(decode, chunks, count, _weight)) as decoded:
        for photo, pixels in chain.from_iterable(decoded):
            if isinstance(photo, DecodedPhoto):
                photo = photo._replace(pixels=torch.from_numpy(pixels))
            yield photo


def _decode_chunk(
    how: Decoding, files: list[PhotoFile]
) -> list[tuple[DecodedPhoto | ImageError, npt.NDArray[np.uint8] | None]]:
    """Decode photos in a worker; pixels are sent as arrays, because tensors need shared memory."""
    photos = [decode_or_error(file, how) for file in files]
    nothing = torch.empty(0)
    return [
        (photo._replace(pixels=nothing), photo.pixels.numpy())
        if isinstance(photo, DecodedPhoto)
        else (photo, None)
        for photo in photos
    ]


def _worthwhile_workers(sample: Sequence[PhotoFile], expected: int, how: Decoding) -> int:
    """Return how many workers minimize the time to start them and to decode; 0 for few photos."""
    if not sample:
        return 0
    if how.local is not None:  # takes far longer than starting a worker
        return math.ceil(len(sample) / CHUNK)
    known = sum(map(file_bytes, sample))
    if len(sample) == SAMPLE:
        known = known * max(expected, SAMPLE) // SAMPLE
    return math.ceil(math.sqrt(known / START_BYTES)) if known > START_BYTES else 0


def file_bytes(file: PhotoFile) -> int:
    """Return the size of a file; 0 if it cannot be read."""
    if file.content is not None:
        return len(file.content)
    try:
        return os.stat(file.path).st_size
    except (OSError, ValueError):
        return 0


def _held_bytes(file: PhotoFile) -> int:
    return len(file.content or b"")


def _weight(files: list[PhotoFile]) -> int:
    return 1 + sum(map(_held_bytes, files)) // WEIGHT_BYTES


def in_groups(
    items: Iterable[Item], count: int, limit: int, size: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Group items: a group ends at `count` items, or when their sizes reach the limit."""
    group: list[Item] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if len(group) == count or total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def _on_own_stream(
    chunks: Generator[list[DecodedPhoto | ImageError], None, None], device: torch.device
) -> Generator[DecodedPhoto | ImageError, None, None]:
    """Decode in a thread, on a separate CUDA stream; the current stream waits for each chunk."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    in_use: deque[torch.cuda.Event] = deque()

    def decode(_: None) -> tuple[list[DecodedPhoto | ImageError], torch.cuda.Event] | None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            chunk = next(chunks, None)
            return None if chunk is None else (chunk, stream.record_event())

    thread = ThreadPoolExecutor(1, "decoding")
    try:
        ahead = submit_ahead(thread, decode, repeat(None), DECODED_AHEAD)
        while (upcoming := next(ahead)) is not None:
            chunk, decoded = upcoming
            user = torch.cuda.current_stream(device)
            user.wait_event(decoded)
            for photo in chunk:
                if isinstance(photo, DecodedPhoto):
                    photo.pixels.record_stream(user)
            photos = deque(chunk)
            del chunk, upcoming
            while photos:
                yield photos.popleft()
            # The caller may have queued far more work than the GPU has done.
            in_use.append(torch.cuda.current_stream(device).record_event())
            if len(in_use) > CHUNKS_AHEAD:
                in_use.popleft().synchronize()
    finally:
        thread.shutdown(cancel_futures=True)
        chunks.close()


class PhotoBatch(NamedTuple):
    """Photos in canvases of one shape, or one photo that cannot be read.

    Attributes:
        pixels: uint8 [B, 3, H, W]; each photo lies in the upper left corner of its canvas.
        sizes: heights and widths in the B canvases. The last canvases may be empty, with the size
            of a whole canvas: preparing a new batch size on a GPU takes longer than computing a
            few empty canvases.
        positions: positions of the photos.
        photos: the photos, at most B, without their own pixels.
        errors: the message of an unreadable photo by its position; such a batch has no photos.
    """

    pixels: Tensor
    sizes: list[tuple[int, int]]
    positions: list[int]
    photos: list[DecodedPhoto]
    errors: dict[int, str]


_Group = list[tuple[int, DecodedPhoto]]
Canvas = tuple[int, int]
"""Height and width of a canvas."""


def batch_by_shape(
    photos: Iterable[DecodedPhoto | ImageError],
    batch_size: Callable[[int, int], int],
    mixed: bool = False,
) -> Iterator[PhotoBatch]:
    """Batch photos of equal or similar shape; positions count from 0 in the order of the photos.

    The batches depend only on the photos. A photo waits until others fill a batch of its shape. If
    too many photos wait, the shape with the most waiting pixels is batched first.

    Args:
        photos: decoded photos and errors.
        batch_size: returns the number of photos in a batch for a width and height, at least 1.
        mixed: lay photos of similar shapes into canvases of one shape. If too many photos wait, and
            at the end, photos also join batches of somewhat larger canvases.
    """
    groups: dict[Canvas, _Group] = {}
    waiting = 0
    for position, photo in enumerate(photos):
        if isinstance(photo, ImageError):
            yield PhotoBatch(torch.empty(0), [], [], [], {position: str(photo)})
            continue
        height, width = photo.pixels.shape[1:]
        canvas = (canvas_side(height), canvas_side(width)) if mixed else (height, width)
        groups.setdefault(canvas, []).append((position, photo))
        waiting += math.prod(canvas)
        if len(groups[canvas]) >= batch_size(canvas[1], canvas[0]):
            waiting -= math.prod(canvas) * len(groups[canvas])
            yield _lay(canvas, groups.pop(canvas), batch_size, mixed)
        while waiting > WAITING_PIXELS[photo.pixels.device.type]:
            canvas = max(groups, key=lambda each: math.prod(each) * len(groups[each]))
            yield _lay(canvas, _take(groups, canvas, batch_size, mixed), batch_size, mixed)
            waiting = sum(math.prod(each) * len(group) for each, group in groups.items())
    while groups:
        canvas = max(groups, key=math.prod) if mixed else next(iter(groups))
        yield _lay(canvas, _take(groups, canvas, batch_size, mixed), batch_size, mixed)


def canvas_side(side: int) -> int:
    """Return the side of the smallest canvas for a side of a photo.

    Few different canvases are faster than little space outside of the photos: a GPU prepares each
    new shape, and photos of more canvases wait longer for others.
    """
    step = 32 if side <= 256 else 64 if side <= 384 else 128
    return -(-side // step) * step


def _take(
    groups: dict[Canvas, _Group],
    canvas: Canvas,
    batch_size: Callable[[int, int], int],
    mixed: bool,
) -> _Group:
    """Remove photos for a batch of this canvas from the groups, largest first."""
    taken: _Group = []
    enough = CANVAS_SHARE * math.prod(canvas)
    for each in sorted(groups, key=math.prod, reverse=True):
        similar = each[0] <= canvas[0] and each[1] <= canvas[1] and math.prod(each) >= enough
        space = batch_size(canvas[1], canvas[0]) - len(taken)
        if (each == canvas or (mixed and similar)) and space:
            taken += groups[each][:space]
            groups[each] = groups[each][space:]
            if not groups[each]:
                del groups[each]
    return taken


def _lay(
    canvas: Canvas, group: _Group, batch_size: Callable[[int, int], int], mixed: bool
) -> PhotoBatch:
    """Lay photos into canvases; if they are mixed on a GPU, their number is one of a few."""
    photos = [photo.pixels for _, photo in group]
    device, count = photos[0].device, len(photos)
    if mixed and device.type == "cuda":
        count = batch_size(canvas[1], canvas[0])
        while count // 2 >= len(photos):
            count //= 2
    sizes = [(photo.shape[1], photo.shape[2]) for photo in photos]
    sizes += [canvas] * (count - len(photos))
    pixels = torch.zeros(count, 3, *canvas, dtype=torch.uint8, device=device)
    for number, photo in enumerate(photos):
        pixels[number, :, : photo.shape[1], : photo.shape[2]] = photo
    rest = [photo._replace(pixels=torch.empty(0)) for _, photo in group]
    return PhotoBatch(pixels, sizes, [position for position, _ in group], rest, {})
