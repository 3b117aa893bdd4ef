"""The one way of photos from their files to batches: read, decoded, those of one shape together."""

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
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
# Photos a worker decodes at a time: as many as this, or as have this many bytes in their files, so
# that large photos need little shared memory.
CHUNK = 4
CHUNK_BYTES = 2**20
# Starting a worker takes about as long as decoding JPEG files of this many bytes.
START_BYTES = 2**20
# Photos whose files are looked at to find how many workers are worth starting.
SAMPLE = 64
# Chunks that a GPU decodes before the earlier ones are used.
CHUNKS_AHEAD = 2
# Pixels of photos that wait for others of their shape.
WAITING_PIXELS = {"cpu": 2**25, "cuda": 2**27}


def decode_photos(
    files: Iterable[PhotoFile],
    how: Decoding = Decoding(),  # noqa: B008
    workers: int = 0,
    device: torch.device = CPU,
) -> Generator[DecodedPhoto | ImageError, None, None]:
    """Photos in their order, or why one cannot be decoded.

    Args:
        files: the photos; they are taken from it a little ahead, in this process.
        how: what is wanted of them.
        workers: processes that read and decode, at most; fewer for few or small files. 0 decodes
            here, when a photo is asked for. Where a GPU decodes, threads that read.
        device: a GPU that can decodes the photos, and they stay there; they then differ a little,
            as the decoders do. Photos that the CPU decodes stay in its memory.
    """
    if gpu_decodes(device):
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
        num_workers=min(workers, _worthwhile_workers(sample, expected)),
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
    """End the workers of a data loader's iterator.

    Left to the garbage collector, they are waited for in vain, five seconds for each.
    """
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def _worthwhile_workers(sample: list[PhotoFile], expected: int) -> int:
    """As many as make starting them and decoding by them the quickest in sum."""
    if not sample:
        return 0
    known = sum(_file_bytes(file) for file in sample)
    if len(sample) == SAMPLE:
        known = known * max(expected, SAMPLE) // SAMPLE
    return math.ceil(math.sqrt(known / START_BYTES))


def _file_bytes(file: PhotoFile) -> int:
    if file.content is not None:
        return len(file.content)
    try:
        return os.stat(file.path).st_size
    except (OSError, ValueError):
        return 0


def _chunks(files: Iterator[PhotoFile]) -> Iterator[list[PhotoFile]]:
    """A batch sampler: the files themselves, some at a time."""
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
    """What workers have: the photo of a file."""

    def __init__(self, how: Decoding) -> None:
        self.how = how

    def __getitem__(self, file: PhotoFile) -> DecodedPhoto | ImageError:
        try:
            return file.decode(self.how)
        except ImageError as error:
            return error


_Packed = tuple[Tensor, list[tuple[torch.Size, tuple[Any, ...]] | ImageError]]
"""Photos on their way from a worker: all pixels in one piece of shared memory."""


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
        # A copy, so that shared memory, of which there may be little, is free again soon. NumPy
        # copies in one thread: those of PyTorch would wait for cores that the workers have.
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
    """Decode on a stream beside the current one, which waits for each chunk."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    in_use: deque[torch.cuda.Event] = deque()
    with closing(chunks):
        while True:
            with torch.cuda.stream(stream):
                chunk = next(chunks, None)
            if chunk is None:
                return
            user = torch.cuda.current_stream(device)
            user.wait_stream(stream)
            for photo in chunk:
                if isinstance(photo, DecodedPhoto):
                    photo.pixels.record_stream(user)
            photos = deque(chunk)
            del chunk
            while photos:
                yield photos.popleft()
            # The user may have queued work far ahead of what the GPU has done.
            in_use.append(torch.cuda.current_stream(device).record_event())
            if len(in_use) > CHUNKS_AHEAD:
                in_use.popleft().synchronize()


class PhotoBatch(NamedTuple):
    """Photos of one shape: `pixels` uint8 [B, 3, H, W], and positions and photos beside them.

    The photos are without pixels of their own. A batch of no photos has an error by its position.
    """

    pixels: Tensor
    positions: list[int]
    photos: list[DecodedPhoto]
    errors: dict[int, str]


def batch_by_shape(
    photos: Iterable[DecodedPhoto | ImageError], batch_size: Callable[[int, int], int]
) -> Iterator[PhotoBatch]:
    """Put photos of one shape together; positions count from 0 in the order of the photos.

    Which photos are together depends on these photos alone. When too many wait for others of
    their shape, those of the shape with the most pixels go first.

    `batch_size` is the number of photos in a batch, from width and height.
    """
    groups: dict[torch.Size, list[tuple[int, DecodedPhoto]]] = {}
    waiting = 0
    for position, photo in enumerate(photos):
        if isinstance(photo, ImageError):
            yield PhotoBatch(torch.empty(0), [], [], {position: str(photo)})
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


def _stack(group: list[tuple[int, DecodedPhoto]]) -> PhotoBatch:
    nothing = torch.empty(0)
    return PhotoBatch(
        torch.stack([photo.pixels for _, photo in group]),
        [position for position, _ in group],
        [photo._replace(pixels=nothing) for _, photo in group],
        {},
    )
