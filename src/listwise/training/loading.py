"""Batches of crops, decoded ahead of the network by worker processes."""

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import cv2
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from listwise.data import CropBatch, CropDataset, collate
from listwise.errors import InputError
from listwise.models.embed import ignore_interrupts
from listwise.training.sampling import Indices

# Images a worker decodes at a time: small enough that all workers share the end of a batch.
CHUNK = 16


class _Chunks:
    """Batch sampler: the keys of all batches from an update on, in chunks that workers share."""

    def __init__(self, draw: Callable[[int], Indices], updates: range) -> None:
        self.draw = draw
        self.updates = updates

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for update in self.updates:
            keys = [(update, int(index)) for index in self.draw(update)]
            for start in range(0, len(keys), CHUNK):
                yield keys[start : start + CHUNK]


def load_batches(
    dataset: CropDataset,
    draw: Callable[[int], Indices],
    updates: range,
    workers: int,
    pin_memory: bool = False,
) -> Generator[CropBatch, None, None]:
    """The batches of the given updates in order; the next is decoded while one is in use.

    Args:
        dataset: makes the crops.
        draw: the indices of an update's batch (of this process's part of it).
        updates: numbers of the updates.
        workers: processes that decode; 0 decodes here, when asked.
        pin_memory: keep batches where a GPU can fetch them quickly.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=_Chunks(draw, updates),
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=_settle,
        prefetch_factor=4 if workers else None,
        # Drawing the workers' seeds must not move the generator that dropout uses.
        generator=torch.Generator(),
    )
    stopped = threading.Event()
    batches = _assemble(iter(loader), draw, updates, pin_memory, stopped)
    return _ahead(batches, stopped) if workers else batches


def _settle(worker: int) -> None:
    """A worker is one of many: it has a core, not the machine, and leaves Ctrl-C to others."""
    ignore_interrupts(worker)
    cv2.setNumThreads(0)


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Say what it means that a decoding process is gone, wherever PyTorch notices it."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise InputError(
            "a process that decodes photos was ended by the system, mostly for lack of memory or "
            "of shared memory (docker run --shm-size): use fewer --workers"
        ) from error


def _assemble(
    chunks: Iterator[CropBatch],
    draw: Callable[[int], Indices],
    updates: range,
    pin_memory: bool,
    stopped: threading.Event,
) -> Generator[CropBatch, None, None]:
    """Put the chunks of each batch together."""
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
                images[done:stop] = chunk.images
                labels[done:stop] = chunk.labels
                errors += chunk.errors
                done = stop
            if images is not None:
                yield CropBatch(images, labels, errors)
    finally:
        # Left to the garbage collector, workers are waited for in vain, five seconds for each.
        if hasattr(chunks, "_shutdown_workers"):
            chunks._shutdown_workers()


def _ahead(
    batches: Generator[CropBatch, None, None], stopped: threading.Event
) -> Generator[CropBatch, None, None]:
    """Make the next batch in a thread while one is in use, and no further one: they are large."""
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
