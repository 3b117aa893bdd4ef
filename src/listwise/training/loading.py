"""Load batches of crops ahead of the network, with worker processes or on its GPU."""

import math
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from rich.filesize import decimal
from torch import Tensor

from listwise.data import CropBatch, CropDataset, DecodedPhoto, Decoding, ImageError
from listwise.data.crops import plan_crops
from listwise.data.gpu_photos import CHUNK_PIXELS, decode_on_gpu, gpu_decodes
from listwise.data.kept_photos import KeptPhotos, PhotoBlock, as_block
from listwise.data.workers import map_in_processes
from listwise.training.forward import free_bytes
from listwise.training.sampling import Indices

# Images that a worker decodes at a time: few, so all workers share the end of a batch.
CHUNK = 16
# Crops of kept photos that a GPU computes at a time.
KEPT_CHUNK = 1024
CPU = torch.device("cpu")
# Parts of the free memory that photos may take. The step needs most of a GPU's memory, and pinned
# host memory cannot be moved to disk.
GPU_PART, HOST_PART = 1 / 4, 1 / 2


def keep_photos(
    count: int, decoded_bytes: int, device: torch.device
) -> tuple[KeptPhotos | None, str]:
    """Choose the memory in which decoded photos are kept: of the GPU, of the host, or none.

    Args:
        count: number of photos.
        decoded_bytes: memory that they take.
        device: the device of the training.

    Returns:
        The place for the photos, None if they are not kept; and a sentence about it, which is empty
        if the device does not decode photos itself.
    """
    if not gpu_decodes(device):
        return None, ""
    needed = decimal(decoded_bytes)
    on_gpu = int(GPU_PART * free_bytes(device))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_host = int(HOST_PART * free_bytes(torch.device("cpu"))) // processes
    for place, allowed in (("GPU", on_gpu), ("host", on_host)):
        if decoded_bytes <= allowed:
            kept = KeptPhotos(count, device, decoded_bytes, on_device=place == "GPU")
            share = f"{needed} of {decimal(allowed)} allowed"
            return kept, f"decoded photos are kept in {place} memory: {share}"
    return None, (
        f"photos are decoded again in every update: they would take {needed} of memory, more than "
        f"allowed on the GPU ({decimal(on_gpu)}) and on the host ({decimal(on_host)})"
    )


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
) -> "Prefetch":
    """Load the batches of some updates in order; the next one is loaded while one is in use.

    Args:
        dataset: the crops.
        draw: returns the indices of the images of an update's batch, or of this process's part.
        updates: the numbers of the updates.
        workers: processes that decode and crop photos; 0 decodes in a thread of this process. If
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
        if kept is None:
            kept = KeptPhotos(len(dataset.images), device, 0, on_device=False)
        cropper = _GPUBatches(dataset, kept, max(1, workers), device, stopped)
        made = (cropper.batch(update, draw(update)) for update in updates)
        batches = _on_own_stream(made, device)
    else:
        crop, keys = partial(_crop_chunk, dataset), _chunks(draw, updates)
        chunks = map_in_processes(crop, keys, workers) if workers else (crop(some) for some in keys)
        side = dataset.settings.size
        batches = _assemble(chunks, side, draw, updates, pin_memory, stopped)
    return Prefetch(batches, stopped, device)


_Chunk = tuple[npt.NDArray[np.uint8], list[int], list[str]]
"""Crops [n, 3, S, S], their labels and errors, as a worker sends them: without shared memory."""


def _crop_chunk(dataset: CropDataset, keys: Sequence[tuple[int, int]]) -> _Chunk:
    crops = [dataset[key] for key in keys]
    images = np.stack([crop.image.numpy() for crop in crops])
    errors = [error for crop in crops for error in crop.errors]
    return images, [crop.label for crop in crops], errors


def _assemble(
    chunks: Generator[_Chunk, None, None],
    side: int,
    draw: Callable[[int], Indices],
    updates: range,
    pin_memory: bool,
    stopped: threading.Event,
) -> Generator[CropBatch, None, None]:
    """Assemble each batch of crops with this side from its chunks."""
    with closing(chunks):
        for update in updates:
            shape = (len(draw(update)), 3, side, side)
            images = torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
            labels, errors = list[int](), list[str]()
            while len(labels) < len(images):
                if stopped.is_set():
                    return
                crops, found, failed = next(chunks)
                # NumPy copies in one thread; PyTorch's threads would compete with the workers.
                np.copyto(images[len(labels) :][: len(crops)].numpy(), crops)
                labels += found
                errors += failed
            yield CropBatch(images, torch.tensor(labels), tuple(errors))


class _GPUBatches:
    """Crops batches on a GPU from kept photos; decodes and keeps photos when they are first needed.

    A batch is in the memory of the GPU if that suffices, else in pinned memory.
    """

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
        crop = partial(self._crop, self._allocate(len(indices)), update, indices)
        images: Tensor = crop.args[0]
        missing = np.unique(indices[~self.kept.has(indices)]).tolist()
        missing = [index for index in missing if index not in self.kept.unreadable]
        how = Decoding(min_side=self.dataset.settings.min_side)
        files = map(self.dataset.images.file, missing)
        with closing(decode_on_gpu(files, how, self.device, self.threads)) as chunks:
            upcoming = iter(missing)
            for chunk in chunks:
                if self.stopped.is_set():
                    return None
                loose = self._keep(list(islice(upcoming, len(chunk))), chunk)
                if loose:
                    positions = np.flatnonzero(np.isin(indices, list(loose)))
                    crop(positions, as_block([loose[i] for i in indices[positions].tolist()]))
        for group in self._groups(np.flatnonzero(self.kept.has(indices)), indices):
            if self.stopped.is_set():
                return None
            crop(group, self.kept.on_gpu(indices[group]))
        errors: list[str] = []
        for position in np.flatnonzero(np.isin(indices, list(self.kept.unreadable))).tolist():
            other = self.dataset[update, int(indices[position])]  # another photo of its class
            images[position] = other.image
            errors += other.errors
        labels = self.dataset.images.labels[indices]
        return CropBatch(images, torch.from_numpy(labels), tuple(errors))

    def _allocate(self, count: int) -> Tensor:
        side = self.dataset.settings.size
        shape, uint8 = (count, 3, side, side), torch.uint8
        if math.prod(shape) < free_bytes(self.device) // 4:
            return torch.empty(shape, dtype=uint8, device=self.device)
        return torch.empty(shape, dtype=uint8, pin_memory=True)

    def _crop(
        self,
        images: Tensor,
        update: int,
        indices: Indices,
        positions: Indices,
        photos: PhotoBlock,
    ) -> None:
        """Crop the photos for some positions of the images of a batch."""
        from listwise.data.gpu_resample import crop_into  # needs Triton

        draws = self.dataset.draws(update, indices[positions])
        sizes = photos.table[:, 1], photos.table[:, 2]
        plans = plan_crops(*sizes, self.dataset.settings, draws)
        first, stop = int(positions[0]), int(positions[-1]) + 1
        if images.device.type == self.device.type and stop - first == len(positions):
            crop_into(images[first:stop], photos, plans)
            return
        shape = (len(positions), *images.shape[1:])
        crops = torch.empty(shape, dtype=torch.uint8, device=self.device)
        crop_into(crops, photos, plans)
        images[torch.from_numpy(positions)] = crops.to(images.device)

    def _keep(
        self, indices: list[int], photos: list[DecodedPhoto | ImageError]
    ) -> dict[int, Tensor]:
        """Keep decoded photos; return the pixels of those that do not fit."""
        loose = {}
        for index, photo in zip(indices, photos, strict=True):
            if isinstance(photo, ImageError):
                self.kept.unreadable.add(index)
            elif not self.kept.add(index, photo.pixels):
                loose[index] = photo.pixels
        return loose

    def _groups(self, positions: Indices, indices: Indices) -> list[Indices]:
        """Divide positions into groups that are cropped together."""
        group = np.arange(len(positions)) // KEPT_CHUNK
        if not self.kept.on_device:  # a group is copied to the GPU
            widths, heights = self.kept.sizes(indices[positions])
            group += np.cumsum(widths * heights) // CHUNK_PIXELS
        return [
            each for each in np.split(positions, np.flatnonzero(np.diff(group)) + 1) if len(each)
        ]


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


class Prefetch(Iterator[CropBatch]):
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
        if batch.images.is_cuda:  # keep its memory until the stream that uses it is done with it
            batch.images.record_stream(torch.cuda.current_stream(self._device))
        return batch

    def close(self) -> None:
        """Stop loading."""
        self._stopped.set()
        self._thread.shutdown()
        self._batches.close()


Batches = Prefetch | Generator[CropBatch, None, None]
"""Batches that are being loaded; the method `close` stops it."""
