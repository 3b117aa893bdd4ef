"""Load batches of crops ahead of the network, with worker processes or on its GPU."""

import math
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from listwise.data import CropBatch, CropDataset, DecodedPhoto, Decoding, ImageError, collate
from listwise.data.crops import CropPlan, draw_crop
from listwise.data.gpu_photos import CHUNK_PIXELS, decode_on_gpu, gpu_decodes
from listwise.data.pipeline import stop_workers
from listwise.data.workers import start_worker
from listwise.training.memory import free_bytes
from listwise.training.sampling import Indices

# Images that a worker decodes at a time: few, so all workers share the end of a batch.
CHUNK = 16
# Crops that a GPU computes at a time.
GPU_CHUNK = 64
CPU = torch.device("cpu")


def _chunks(draw: Callable[[int], Indices], updates: range) -> Iterator[list[tuple[int, int]]]:
    """Yield the keys (update, image) of all batches, in chunks that workers share."""
    for update in updates:
        keys = [(update, int(index)) for index in draw(update)]
        for start in range(0, len(keys), CHUNK):
            yield keys[start : start + CHUNK]


def load_batches(
    dataset: CropDataset,
    draw: Callable[[int], Indices],
    updates: range,
    workers: int,
    pin_memory: bool = False,
    device: torch.device = CPU,
) -> Generator[CropBatch, None, None]:
    """Yield the batches of some updates in order; the next one is loaded while one is in use.

    Args:
        dataset: the crops.
        draw: returns the indices of the images of an update's batch, or of this process's part.
        updates: the numbers of the updates.
        workers: processes that decode and crop photos; 0 decodes in this process on demand. If
            `device` decodes the photos itself, these are threads that read files.
        pin_memory: put batches into pinned memory.
        device: a GPU that decodes and crops the photos if it can, and keeps the batches if it has
            enough free memory. The pixels differ slightly from those of the worker processes.
    """
    stopped = threading.Event()
    if gpu_decodes(device):
        batches = _crop_on_gpu(dataset, draw, updates, max(1, workers), device, stopped)
        return _keep_until_used(_prefetch(batches, stopped) if workers else batches, device)
    loader = DataLoader(
        dataset,
        batch_sampler=_chunks(draw, updates),
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=start_worker,
        prefetch_factor=4 if workers else None,
        # The default would draw the seeds of the workers from the generator that dropout uses.
        generator=torch.Generator(),
    )
    batches = _assemble(iter(loader), draw, updates, pin_memory, stopped)
    return _prefetch(batches, stopped) if workers else batches


def _assemble(
    chunks: Iterator[CropBatch],
    draw: Callable[[int], Indices],
    updates: range,
    pin_memory: bool,
    stopped: threading.Event,
) -> Generator[CropBatch, None, None]:
    """Assemble each batch from its chunks."""
    try:
        for update in updates:
            size = len(draw(update))
            images: Tensor | None = None
            labels = torch.empty(size, dtype=torch.int64)
            errors: tuple[str, ...] = ()
            done = 0
            while done < size:
                if stopped.is_set():
                    return
                chunk = next(chunks)
                if images is None:
                    shape = (size, *chunk.images.shape[1:])
                    images = torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
                stop = done + len(chunk.images)
                # NumPy copies in one thread; PyTorch's threads would compete with the workers.
                np.copyto(images[done:stop].numpy(), chunk.images.numpy())
                labels[done:stop] = chunk.labels
                errors += chunk.errors
                done = stop
            if images is not None:
                yield CropBatch(images, labels, errors)
    finally:
        stop_workers(chunks)


def _crop_on_gpu(
    dataset: CropDataset,
    draw: Callable[[int], Indices],
    updates: range,
    threads: int,
    device: torch.device,
    stopped: threading.Event,
) -> Generator[CropBatch, None, None]:
    """Decode and crop the batches on a GPU, on a separate stream; wait for each one."""
    files = (dataset.images.file(i) for update in updates for i in draw(update).tolist())
    how = Decoding(min_side=dataset.settings.min_side)
    stream: torch.cuda.Stream | None = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with closing(decode_on_gpu(files, how, device, threads)) as chunks:
        photos = chain.from_iterable(chunks)
        for update in updates:
            keys = [(update, i) for i in draw(update).tolist()]
            with torch.cuda.stream(stream) if stream else nullcontext():
                batch = _make_batch(dataset, keys, photos, device, stopped)
            if batch is None:
                return
            if stream:
                stream.synchronize()
            yield batch


def _make_batch(
    dataset: CropDataset,
    keys: list[tuple[int, int]],
    photos: Iterator[DecodedPhoto | ImageError],
    device: torch.device,
    stopped: threading.Event,
) -> CropBatch | None:
    """Crop the next photos, on the device if it has enough memory, else in pinned memory.

    Returns None if loading was stopped.
    """
    from listwise.data.gpu_resample import crop_photos  # needs Triton

    settings = dataset.settings
    shape = (len(keys), 3, settings.size, settings.size)
    on_device = math.prod(shape) < free_bytes(device) // 4
    images = torch.empty(
        shape, dtype=torch.uint8, device=device if on_device else "cpu", pin_memory=not on_device
    )
    errors: tuple[str, ...] = ()
    group: list[tuple[int, Tensor, CropPlan]] = []
    pixels = 0
    for position, (key, photo) in enumerate(zip(keys, photos, strict=False)):
        if stopped.is_set():
            return None
        if isinstance(photo, ImageError):
            replacement = dataset[key]
            images[position] = replacement.image
            errors += replacement.errors
        else:
            _, height, width = photo.pixels.shape
            plan = draw_crop(width, height, settings, dataset.generator(key))
            group.append((position, photo.pixels, plan))
            pixels += height * width
        last = position == len(keys) - 1
        if group and (last or len(group) == GPU_CHUNK or pixels >= CHUNK_PIXELS):
            positions, sources, plans = zip(*group, strict=True)
            crops = crop_photos(sources, plans, settings.size)
            images[list(positions)] = crops.to(images.device)
            group, pixels = [], 0
    labels = dataset.images.labels[[index for _, index in keys]]
    return CropBatch(images, torch.from_numpy(labels), errors)


def _keep_until_used(
    batches: Generator[CropBatch, None, None], device: torch.device
) -> Generator[CropBatch, None, None]:
    """Keep the memory of each batch until the stream that uses it is done with it."""
    with closing(batches):
        for batch in batches:
            if batch.images.is_cuda:
                batch.images.record_stream(torch.cuda.current_stream(device))
            yield batch


def _prefetch(
    batches: Generator[CropBatch, None, None], stopped: threading.Event
) -> Generator[CropBatch, None, None]:
    """Load the next batch in a thread while one is in use; only one, because batches are large."""
    try:
        with ThreadPoolExecutor(1, "crops") as thread:
            try:
                upcoming = thread.submit(next, batches, None)
                while (batch := upcoming.result()) is not None:
                    upcoming = thread.submit(next, batches, None)
                    yield batch
            finally:
                stopped.set()
    finally:
        batches.close()
