"""Batches of crops, decoded ahead of the network by worker processes."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from listwise.data import CropDataset, collate
from listwise.training.sampling import Indices

# Images a worker decodes at a time: small enough that all workers share the end of a batch.
CHUNK = 16


class Batch(NamedTuple):
    """Crops uint8 [B, 3, S, S], labels [B], and the errors of photos that could not be read."""

    images: Tensor
    labels: Tensor
    errors: list[str]


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
) -> Iterator[Batch]:
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
        prefetch_factor=4 if workers else None,
        # Drawing the workers' seeds must not move the generator that dropout uses.
        generator=torch.Generator(),
    )
    batches = _assemble(iter(loader), draw, updates, pin_memory)
    return _ahead(batches) if workers else batches


def _assemble(
    chunks: Iterator[Batch], draw: Callable[[int], Indices], updates: range, pin_memory: bool
) -> Iterator[Batch]:
    for update in updates:
        size = len(draw(update))
        images: Tensor | None = None
        labels = torch.empty(size, dtype=torch.int64)
        errors: list[str] = []
        done = 0
        while done < size:
            chunk = next(chunks)
            if images is None:
                images = torch.empty(
                    (size, *chunk.images.shape[1:]), dtype=torch.uint8, pin_memory=pin_memory
                )
            stop = done + len(chunk.images)
            images[done:stop] = chunk.images
            labels[done:stop] = chunk.labels
            errors += chunk.errors
            done = stop
        assert images is not None
        yield Batch(images, labels, errors)


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Run an iterator in a thread, one item ahead."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=1)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
            put(None)
        except BaseException as error:  # passed on to whoever waits
            put(error)

    thread = threading.Thread(target=work, name="crops", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
