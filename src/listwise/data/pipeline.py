"""The photo pipeline: read files, decode them, and batch photos of equal or similar shape."""

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from listwise.data.gpu_photos import decode_on_gpu, gpu_decodes
from listwise.data.images import ImageError
from listwise.data.photos import DecodedPhoto, Decoding, PhotoFile
from listwise.data.workers import start_worker

CPU = torch.device("cpu")
# Photos that a worker decodes at a time: at most CHUNK, and no more after CHUNK_BYTES of files, so
# that large photos need little shared memory.
CHUNK = 4
CHUNK_BYTES = 2**20
# Starting a worker takes about as long as decoding JPEG files of this many bytes.
START_BYTES = 2**20
# Photos whose file sizes are read to decide how many workers to start.
SAMPLE = 64
# Chunks that a GPU decodes ahead of those in use, and chunks whose photos may still be in use.
DECODED_AHEAD = 3
CHUNKS_AHEAD = 2
# Maximum number of pixels of photos that wait for others of their shape.
WAITING_PIXELS = {"cpu": 2**25, "cuda": 2**27}
# The same for photos that wait for others of similar shape: a GPU starts with few, large batches.
WAITING_CANVAS_PIXELS = {"cpu": 2**25, "cuda": 2**28}
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
        chunks = decode_on_gpu(files, how, device, max(1, workers))
        return _on_own_stream(chunks, device) if device.type == "cuda" else _flat(chunks)
    return _decode_by_workers(files, how, workers)


def _decode_by_workers(
    files: Iterable[PhotoFile], how: Decoding, workers: int
) -> Generator[DecodedPhoto | ImageError, None, None]:
    expected = length_hint(files, 10**9)
    stream = iter(files)
    sample = list(islice(stream, SAMPLE)) if workers else []
    loader = DataLoader(
        _Decoder(how),
        batch_sampler=_chunks(chain(sample, stream)),
        num_workers=min(workers, _worthwhile_workers(sample, expected, how)),
        collate_fn=_pack,
        worker_init_fn=start_worker,
        generator=torch.Generator(),
    )
    chunks = iter(loader)
    try:
        for chunk in chunks:
            yield from _unpack(chunk)
    finally:
        stop_workers(chunks)


def stop_workers(batches: Iterator[object]) -> None:
    """Stop the workers of a data loader's iterator.

    The garbage collector would wait five seconds for each of them.
    """
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def _worthwhile_workers(sample: list[PhotoFile], expected: int, how: Decoding) -> int:
    """Return how many workers minimize the time to start them and to decode; 0 for few photos."""
    if not sample:
        return 0
    if how.local is not None:  # takes far longer than starting a worker
        return math.ceil(len(sample) / CHUNK)
    known = sum(_file_bytes(file) for file in sample)
    if len(sample) == SAMPLE:
        known = known * max(expected, SAMPLE) // SAMPLE
    return math.ceil(math.sqrt(known / START_BYTES)) if known > START_BYTES else 0


def _file_bytes(file: PhotoFile) -> int:
    if file.content is not None:
        return len(file.content)
    try:
        return os.stat(file.path).st_size
    except (OSError, ValueError):
        return 0


def _chunks(files: Iterator[PhotoFile]) -> Iterator[list[PhotoFile]]:
    """Sample batches for a data loader: the files themselves, a few at a time."""
    chunk: list[PhotoFile] = []
    size = 0
    for file in files:
        chunk.append(file)
        size += _file_bytes(file)
        if len(chunk) == CHUNK or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Decoder(Dataset[DecodedPhoto | ImageError]):
    """The data set of a worker: maps a file to its photo."""

    def __init__(self, how: Decoding) -> None:
        self.how = how

    def __getitem__(self, file: PhotoFile) -> DecodedPhoto | ImageError:
        try:
            return file.decode(self.how)
        except ImageError as error:
            return error


_Packed = tuple[Tensor, list[tuple[torch.Size, tuple[Any, ...]] | ImageError]]
"""Photos sent by a worker: all pixels in one block of shared memory."""


def _pack(photos: list[DecodedPhoto | ImageError]) -> _Packed:
    pixels = [photo.pixels.flatten() for photo in photos if isinstance(photo, DecodedPhoto)]
    return torch.cat(pixels) if pixels else torch.empty(0), [
        (photo.pixels.shape, photo[1:]) if isinstance(photo, DecodedPhoto) else photo
        for photo in photos
    ]


def _unpack(packed: _Packed) -> Iterator[DecodedPhoto | ImageError]:
    pixels, photos = packed
    start = 0
    for each in photos:
        if isinstance(each, ImageError):
            yield each
            continue
        shape, rest = each
        stop = start + shape.numel()
        # Copied, so that scarce shared memory is freed soon. NumPy copies in one thread, while
        # threads of PyTorch would wait for cores that the workers use.
        copied = pixels[start:stop].numpy().copy()
        yield DecodedPhoto(torch.from_numpy(copied).view(shape), *rest)
        start = stop


def _flat(
    chunks: Generator[list[DecodedPhoto | ImageError], None, None],
) -> Generator[DecodedPhoto | ImageError, None, None]:
    with closing(chunks):
        for chunk in chunks:
            yield from chunk


def _on_own_stream(
    chunks: Generator[list[DecodedPhoto | ImageError], None, None], device: torch.device
) -> Generator[DecodedPhoto | ImageError, None, None]:
    """Decode in a thread, on a separate CUDA stream; the current stream waits for each chunk."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    in_use: deque[torch.cuda.Event] = deque()

    def decode() -> tuple[list[DecodedPhoto | ImageError], torch.cuda.Event] | None:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            chunk = next(chunks, None)
            return None if chunk is None else (chunk, stream.record_event())

    thread = ThreadPoolExecutor(1, "decoding")
    try:
        ahead = deque(thread.submit(decode) for _ in range(DECODED_AHEAD))
        while (upcoming := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(decode))
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


def _unreadable(position: int, error: ImageError) -> PhotoBatch:
    return PhotoBatch(torch.empty(0), [], [], [], {position: str(error)})


def batch_by_shape(
    photos: Iterable[DecodedPhoto | ImageError], batch_size: Callable[[int, int], int]
) -> Iterator[PhotoBatch]:
    """Batch photos of equal shape; positions count from 0 in the order of the photos.

    The batches depend only on the photos. If too many photos wait for others of their shape, the
    shape with the most waiting pixels is batched first.

    Args:
        photos: decoded photos and errors.
        batch_size: returns the number of photos in a batch for a width and height.
    """
    groups: dict[torch.Size, _Group] = {}
    waiting = 0
    for position, photo in enumerate(photos):
        if isinstance(photo, ImageError):
            yield _unreadable(position, photo)
            continue
        shape = photo.pixels.shape
        groups.setdefault(shape, []).append((position, photo))
        waiting += shape.numel() // 3
        full = len(groups[shape]) >= batch_size(shape[2], shape[1])
        while groups and (full or waiting > WAITING_PIXELS[photo.pixels.device.type]):
            if not full:
                shape = max(groups, key=lambda each: each.numel() * len(groups[each]))
            group = groups.pop(shape)
            waiting -= shape.numel() // 3 * len(group)
            full = False
            yield _stack(group)
    for group in groups.values():
        yield _stack(group)


def _stack(group: _Group) -> PhotoBatch:
    pixels = torch.stack([photo.pixels for _, photo in group])
    height, width = pixels.shape[2:]
    return _batch(pixels, [(height, width)] * len(group), group)


def _batch(pixels: Tensor, sizes: list[tuple[int, int]], group: _Group) -> PhotoBatch:
    nothing = torch.empty(0)
    positions = [position for position, _ in group]
    return PhotoBatch(
        pixels, sizes, positions, [photo._replace(pixels=nothing) for _, photo in group], {}
    )


Canvas = tuple[int, int]
"""Height and width of a canvas."""


def canvas_side(side: int) -> int:
    """Return the side of the smallest canvas for a side of a photo.

    Few different canvases are faster than little space outside of the photos: a GPU prepares each
    new shape, and photos of more canvases wait longer for others.
    """
    step = 32 if side <= 256 else 64 if side <= 384 else 128
    return -(-side // step) * step


def batch_by_canvas(
    photos: Iterable[DecodedPhoto | ImageError], batch_pixels: int
) -> Iterator[PhotoBatch]:
    """Batch photos of similar shape; positions count from 0 in the order of the photos.

    The batches depend only on the photos. A photo waits until others fill a batch of its canvas.
    At the end, and if too many photos wait, photos also join batches of somewhat larger canvases.

    Args:
        photos: decoded photos and errors.
        batch_pixels: maximum number of pixels in the canvases of a batch of several photos.
    """
    groups: dict[Canvas, _Group] = {}
    waiting = 0
    for position, photo in enumerate(photos):
        if isinstance(photo, ImageError):
            yield _unreadable(position, photo)
            continue
        height, width = photo.pixels.shape[1:]
        canvas = canvas_side(height), canvas_side(width)
        groups.setdefault(canvas, []).append((position, photo))
        waiting += math.prod(canvas)
        if len(groups[canvas]) == _capacity(canvas, batch_pixels):
            yield _lay(canvas, groups[canvas], batch_pixels)
            waiting -= math.prod(canvas) * len(groups.pop(canvas))
        while waiting > WAITING_CANVAS_PIXELS[photo.pixels.device.type]:
            canvas = max(groups, key=lambda each: math.prod(each) * len(groups[each]))
            yield _lay(canvas, _take_similar(groups, canvas, batch_pixels), batch_pixels)
            waiting = sum(math.prod(each) * len(group) for each, group in groups.items())
    while groups:
        canvas = max(groups, key=math.prod)
        yield _lay(canvas, _take_similar(groups, canvas, batch_pixels), batch_pixels)


def _capacity(canvas: Canvas, batch_pixels: int) -> int:
    return max(1, batch_pixels // math.prod(canvas))


def _take_similar(groups: dict[Canvas, _Group], canvas: Canvas, batch_pixels: int) -> _Group:
    """Remove photos for a batch of this canvas from the groups, largest first."""
    taken: _Group = []
    enough = CANVAS_SHARE * math.prod(canvas)
    for each in sorted(groups, key=math.prod, reverse=True):
        fits = each[0] <= canvas[0] and each[1] <= canvas[1] and math.prod(each) >= enough
        space = _capacity(canvas, batch_pixels) - len(taken)
        if fits and space:
            taken += groups[each][:space]
            groups[each] = groups[each][space:]
            if not groups[each]:
                del groups[each]
    return taken


def _lay(canvas: Canvas, group: _Group, batch_pixels: int) -> PhotoBatch:
    """Lay photos into canvases; on a GPU, the number of canvases is one of a few."""
    photos = [photo.pixels for _, photo in group]
    count = len(photos)
    if photos[0].is_cuda:
        count = _capacity(canvas, batch_pixels)
        while count // 2 >= len(photos):
            count //= 2
    sizes = [(photo.shape[1], photo.shape[2]) for photo in photos]
    sizes += [canvas] * (count - len(photos))
    if photos[0].is_cuda:
        from listwise.data.gpu_canvases import lay_photos  # needs Triton

        return _batch(lay_photos(photos, count, *canvas), sizes, group)
    pixels = torch.zeros(count, 3, *canvas, dtype=torch.uint8)
    for place, photo, (height, width) in zip(pixels, photos, sizes, strict=True):
        place[:, :height, :width] = photo
    return _batch(pixels, sizes, group)
