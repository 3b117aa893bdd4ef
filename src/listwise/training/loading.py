"""Load batches of crops ahead of the network, with worker processes or on its GPU."""

import math
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from listwise.data import CropBatch, CropDataset, DecodedPhoto, Decoding, ImageError, collate
from listwise.data.crops import plan_crops
from listwise.data.gpu_photos import CHUNK_PIXELS, decode_on_gpu, gpu_decodes
from listwise.data.kept_photos import KeptPhotos
from listwise.data.pipeline import stop_workers
from listwise.data.workers import start_worker
from listwise.training.memory import free_bytes
from listwise.training.sampling import Indices

# Images that a worker decodes at a time: few, so all workers share the end of a batch.
CHUNK = 16
# Crops that a GPU computes at a time, of photos that were just decoded and of kept photos.
GPU_CHUNK = 64
KEPT_CHUNK = 1024
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
    kept: KeptPhotos | None = None,
) -> "Batches":
    """Load the batches of some updates in order; the next one is loaded while one is in use.

    Args:
        dataset: the crops.
        draw: returns the indices of the images of an update's batch, or of this process's part.
        updates: the numbers of the updates.
        workers: processes that decode and crop photos; 0 decodes in this process on demand. If
            `device` decodes the photos itself, these are threads that read files.
        pin_memory: put batches into pinned memory.
        device: a GPU that decodes and crops the photos if it can, and keeps the batches if it has
            enough free memory. The pixels differ slightly from those of the worker processes.
        kept: decoded photos of the data set for a device that decodes: photos that it has are not
            decoded again, and the others are added. By default no photo is kept.

    Returns:
        An iterator; call its method `close` if you do not use all batches.
    """
    stopped = threading.Event()
    if gpu_decodes(device):
        threads = max(1, workers)
        if kept is None:
            made = _crop_decoded(dataset, draw, updates, threads, device, stopped)
        else:
            cropper = _KeptCropper(dataset, kept, threads, device, stopped)
            made = (cropper.batch(update, draw(update)) for update in updates)
        batches = _on_own_stream(made, device)
        return _Prefetch(batches, stopped, device) if workers else _OnDemand(batches, device)
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
    return _Prefetch(batches, stopped, device) if workers else _OnDemand(batches, device)


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


def _crop_decoded(
    dataset: CropDataset,
    draw: Callable[[int], Indices],
    updates: range,
    threads: int,
    device: torch.device,
    stopped: threading.Event,
) -> Generator[CropBatch | None, None, None]:
    """Decode the photos of each batch on a GPU, and crop them; files are read ahead."""
    files = (dataset.images.file(i) for update in updates for i in draw(update).tolist())
    how = Decoding(min_side=dataset.settings.min_side)
    with closing(decode_on_gpu(files, how, device, threads)) as chunks:
        photos = chain.from_iterable(chunks)
        for update in updates:
            yield _make_batch(dataset, update, draw(update), photos, device, stopped)


def _make_batch(
    dataset: CropDataset,
    update: int,
    indices: Indices,
    photos: Iterator[DecodedPhoto | ImageError],
    device: torch.device,
    stopped: threading.Event,
) -> CropBatch | None:
    """Crop the next photos; return None if loading was stopped."""
    from listwise.data.gpu_resample import photo_table  # needs Triton

    batch = _GPUBatch(dataset, update, indices, device)
    group: list[tuple[int, Tensor]] = []
    pixels = 0
    for position, photo in enumerate(islice(photos, len(indices))):
        if stopped.is_set():
            return None
        if isinstance(photo, ImageError):
            batch.replace(position)
        else:
            group.append((position, photo.pixels))
            pixels += photo.pixels[0].numel()
        last = position == len(indices) - 1
        if group and (last or len(group) == GPU_CHUNK or pixels >= CHUNK_PIXELS):
            positions, sources = zip(*group, strict=True)
            batch.crop(np.array(positions), photo_table(sources))
            group, pixels = [], 0
    return batch.finished()


class _KeptCropper:
    """Crops batches from kept photos; decodes and keeps photos when they are first needed."""

    def __init__(
        self,
        dataset: CropDataset,
        kept: KeptPhotos,
        threads: int,
        device: torch.device,
        stopped: threading.Event,
    ) -> None:
        self.dataset, self.kept, self.threads = dataset, kept, threads
        self.device, self.stopped = device, stopped

    def batch(self, update: int, indices: Indices) -> CropBatch | None:
        """Crop the photos of a batch; return None if loading was stopped."""
        batch = _GPUBatch(self.dataset, update, indices, self.device)
        missing = np.unique(indices[~self.kept.has(indices)]).tolist()
        missing = [index for index in missing if index not in self.kept.unreadable]
        how = Decoding(min_side=self.dataset.settings.min_side)
        files = map(self.dataset.images.file, missing)
        with closing(decode_on_gpu(files, how, self.device, self.threads)) as chunks:
            upcoming = iter(missing)
            for chunk in chunks:
                if self.stopped.is_set():
                    return None
                self._keep(batch, list(islice(upcoming, len(chunk))), chunk)
        positions = np.flatnonzero(self.kept.has(indices))
        for group in self._groups(positions, indices):
            if self.stopped.is_set():
                return None
            table, copies = self.kept.on_gpu(indices[group])
            batch.crop(group, table)
            del copies
        for position in np.flatnonzero(np.isin(indices, list(self.kept.unreadable))).tolist():
            batch.replace(position)
        return batch.finished()

    def _keep(
        self, batch: "_GPUBatch", indices: list[int], photos: list[DecodedPhoto | ImageError]
    ) -> None:
        """Keep decoded photos; crop those that do not fit immediately."""
        from listwise.data.gpu_resample import photo_table  # needs Triton

        loose = {}
        for index, photo in zip(indices, photos, strict=True):
            if isinstance(photo, ImageError):
                self.kept.unreadable.add(index)
            elif not self.kept.add(index, photo.pixels):
                loose[index] = photo.pixels
        if loose:
            positions = np.flatnonzero(np.isin(batch.indices, list(loose)))
            sources = [loose[index] for index in batch.indices[positions].tolist()]
            batch.crop(positions, photo_table(sources))

    def _groups(self, positions: Indices, indices: Indices) -> list[Indices]:
        """Divide positions into groups that are cropped together."""
        group = np.arange(len(positions)) // KEPT_CHUNK
        if not self.kept.on_device:  # a group is copied to the GPU
            widths, heights = self.kept.sizes(indices[positions])
            group += np.cumsum(widths * heights) // CHUNK_PIXELS
        return [
            each for each in np.split(positions, np.flatnonzero(np.diff(group)) + 1) if len(each)
        ]


class _GPUBatch:
    """A batch that a GPU fills, in its own memory if that suffices, else in pinned memory."""

    def __init__(
        self, dataset: CropDataset, update: int, indices: Indices, device: torch.device
    ) -> None:
        self.dataset, self.update, self.indices, self.device = dataset, update, indices, device
        size = dataset.settings.size
        shape = (len(indices), 3, size, size)
        on_device = math.prod(shape) < free_bytes(device) // 4
        self.images = torch.empty(
            shape,
            dtype=torch.uint8,
            device=device if on_device else "cpu",
            pin_memory=not on_device,
        )
        self.errors: dict[int, tuple[str, ...]] = {}

    def crop(self, positions: Indices, table: npt.NDArray[np.int64]) -> None:
        """Crop the photos for some positions of the batch, see `gpu_resample.Table`."""
        from listwise.data.gpu_resample import crop_into  # needs Triton

        settings = self.dataset.settings
        draws = self.dataset.draws(self.update, self.indices[positions])
        plans = plan_crops(table[:, 3], table[:, 4], settings, draws)
        first, stop = int(positions[0]), int(positions[-1]) + 1
        if self.images.device.type == self.device.type and stop - first == len(positions):
            crop_into(self.images[first:stop], table, plans)
            return
        shape = (len(positions), *self.images.shape[1:])
        crops = torch.empty(shape, dtype=torch.uint8, device=self.device)
        crop_into(crops, table, plans)
        self.images[torch.from_numpy(positions)] = crops.to(self.images.device)

    def replace(self, position: int) -> None:
        """Use another photo of the same class for a photo that cannot be decoded."""
        crop = self.dataset[self.update, int(self.indices[position])]
        self.images[position] = crop.image
        self.errors[position] = crop.errors

    def finished(self) -> CropBatch:
        """Return the batch."""
        errors = [error for _, each in sorted(self.errors.items()) for error in each]
        labels = self.dataset.images.labels[self.indices]
        return CropBatch(self.images, torch.from_numpy(labels), tuple(errors))


def _on_own_stream(
    batches: Generator[CropBatch | None, None, None], device: torch.device
) -> Generator[CropBatch, None, None]:
    """Make batches on a separate CUDA stream, and wait for each one; end at None."""
    stream: torch.cuda.Stream | None = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with closing(batches):
        while True:
            with torch.cuda.stream(stream) if stream else nullcontext():
                batch = next(batches, None)
            if batch is None:
                return
            if stream:
                stream.synchronize()
            yield batch


class Batches(Iterator[CropBatch]):
    """Batches that are being loaded."""

    def close(self) -> None:
        """Stop loading."""


class _Prefetch(Batches):
    """Loads the next batch in a thread while one is in use; only one, because batches are large.

    The first batch is loaded immediately.
    """

    def __init__(
        self,
        batches: Generator[CropBatch, None, None],
        stopped: threading.Event,
        device: torch.device,
    ) -> None:
        self._batches, self._stopped, self._device = batches, stopped, device
        self._thread = ThreadPoolExecutor(1, "crops")
        self._upcoming = self._thread.submit(next, batches, None)

    def __next__(self) -> CropBatch:
        batch = None
        try:
            if not self._stopped.is_set():
                batch = self._upcoming.result()
        finally:
            if batch is None:
                self.close()
        if batch is None:
            raise StopIteration
        self._upcoming = self._thread.submit(next, self._batches, None)
        return _kept_until_used(batch, self._device)

    def close(self) -> None:
        """Stop loading."""
        self._stopped.set()
        self._thread.shutdown()
        self._batches.close()


class _OnDemand(Batches):
    """Loads a batch when it is needed."""

    def __init__(self, batches: Generator[CropBatch, None, None], device: torch.device) -> None:
        self._batches, self._device = batches, device

    def __next__(self) -> CropBatch:
        return _kept_until_used(next(self._batches), self._device)

    def close(self) -> None:
        """Stop loading."""
        self._batches.close()


def _kept_until_used(batch: CropBatch, device: torch.device) -> CropBatch:
    """Keep the memory of a batch until the stream that uses it is done with it."""
    if batch.images.is_cuda:
        batch.images.record_stream(torch.cuda.current_stream(device))
    return batch
