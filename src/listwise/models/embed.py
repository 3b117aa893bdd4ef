"""Compute the descriptors of photos with a network, in batches."""

import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from listwise.data import DecodedPhoto, Decoding, ImageError, Images, PhotoFile, decode_photos
from listwise.data.pipeline import PhotoBatch, batch_by_shape
from listwise.errors import InputError, ListwiseWarning, first_line
from listwise.machine import shared_cores
from listwise.models.areas import UnsupportedNetwork
from listwise.models.folding import FoldedCopy, has_hooks
from listwise.models.mixed import MixedNet, mixes
from listwise.models.net import Network, RetrievalNet
from listwise.models.residual import replace_blocks
from listwise.optional import runs_triton

# Pixels per batch: enough to keep a device busy, few enough for a small one.
BATCH_PIXELS = {"cpu": 2**20, "cuda": 2**24}
# The factor for mixed batches on a GPU with this much memory: starting the kernels of many small
# batches takes longer than computing them.
LARGE_GPU, LARGE_BATCHES = 64 * 2**30, 2
# Where photos of different shapes are computed in one batch. A CPU is as fast with batches of one
# shape, and computes nothing outside of the photos.
MIXED = {"cpu": False, "cuda": True}
# Descriptors that may wait on a GPU: copying them to the CPU waits for all its work to finish.
WAITING = 1024


Describe = Callable[[Tensor, Sequence[tuple[int, int]]], Tensor]
"""Maps photos uint8 [B, 3, H, W] to descriptors [B, C].

The photos lie in the upper left corners; the second argument has their heights and widths.
"""


class Described(NamedTuple):
    """Descriptors of the photos that could be read, and the errors of the others.

    Attributes:
        descriptors: float32 [n, D].
        kept: positions of the n photos.
        errors: a message for each photo that could not be read.
        sizes: widths and heights of the photos or their boxes before any reduction, int32 [n, 2].
        thumbnails: a small JPEG file of each photo, empty if not requested.
        local: encoded local features of each photo, empty if not requested.
    """

    descriptors: npt.NDArray[np.float32]
    kept: list[int]
    errors: list[str]
    sizes: npt.NDArray[np.int32]
    thumbnails: list[bytes]
    local: list[bytes]


class PhotoNet:
    """The fastest way to compute with a network, in evaluation mode.

    Args:
        net: the network.
        autocast: dtype in which the network runs.

    Attributes:
        fastest: computes what the network computes, for photos of one shape.
        mixed: whether photos of different shapes are computed in one batch. This needs a GPU, and
            a network for which it does not change the descriptors (see `listwise.models.mixed`).
    """

    def __init__(self, net: Network, autocast: torch.dtype | None) -> None:
        self.net, self.autocast, self.device = net, autocast, net.mean.device
        trial = None
        with ThreadPoolExecutor(1, "trial") as thread:  # on the CPU, while the GPU is prepared
            if MIXED.get(self.device.type, False) and isinstance(net, RetrievalNet):
                trial = thread.submit(mixes, net)
            self._folded = _fold(net, autocast)
            self.mixed = trial is not None and trial.result()
        self.fastest = net if self._folded is None else cast(RetrievalNet, self._folded.net)
        self._mixed_net = None
        if self.mixed:
            assert isinstance(self.fastest, RetrievalNet)
            self._mixed_net = MixedNet(self.fastest)

    def refresh(self) -> None:
        """Use the current weights of the network, after training has changed them."""
        if self._folded is not None:
            self._folded.refresh()

    def __call__(self, images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Describe photos of these heights and widths in images [B, 3, H, W]: [B, dim].

        The photos lie in the upper left corners.
        """
        if self._mixed_net is not None:
            try:
                return self._mixed_net(images, sizes)
            except UnsupportedNetwork as reason:
                warnings.warn(
                    f"some photos are described one at a time, which takes longer: {reason}",
                    ListwiseWarning,
                    stacklevel=2,
                )
        return self._alone(images, sizes)

    def _alone(self, images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        if all(size == images.shape[2:] for size in sizes):
            together: Tensor = self.fastest(images)
            return together
        photos = zip(images, sizes, strict=True)
        return torch.cat([self.fastest(photo[None, :, :h, :w]) for photo, (h, w) in photos])


def network_state(net: Network) -> Hashable:
    """Return a value that changes when weights, buffers or hooks of a network change."""
    if not isinstance(net, RetrievalNet):
        return None
    tensors = (*net.parameters(), *net.buffers())
    return tuple((id(each), each._version) for each in tensors), has_hooks(net)


def _fold(net: Network, autocast: torch.dtype | None) -> FoldedCopy | None:
    """Return a copy that computes what `net` computes, faster, if there is one."""
    if not isinstance(net, RetrievalNet):
        return None
    if (autocast is None and net.mean.device.type != "cpu") or has_hooks(net):
        return None
    try:
        with torch.inference_mode(False), torch.no_grad():
            folded = FoldedCopy(net)
    except Exception as error:  # a module of the user may not be possible to copy
        warnings.warn(
            f"batch norm is not folded, because the network cannot be copied: {first_line(error)}",
            ListwiseWarning,
            stacklevel=2,
        )
        return None
    if net.mean.is_cuda and runs_triton(net.mean.device):
        replace_blocks(folded.net)
    return folded


def embed_photos(
    net: RetrievalNet,
    images: Images,
    *,
    max_side: int | None = None,
    workers: int = 0,
    autocast: torch.dtype | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Described:
    """Compute the descriptors of whole photos, reduced to a long side; see `embed_parts`."""
    (found,) = embed_parts(
        PhotoNet(net, autocast),
        images.files(),
        [len(images)],
        Decoding(max_side),
        workers=workers,
        on_progress=on_progress,
    )
    return found


def embed_parts(
    network: PhotoNet,
    files: Iterable[PhotoFile],
    sizes: Iterable[int],
    how: Decoding,
    *,
    describe: Describe | None = None,
    workers: int = 0,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Generator[Described, None, None]:
    """Compute the descriptors of photos in several parts, on the network's device.

    If `how` does not reduce photos, a CPU refuses those above `ORIGINAL_SIDE`. The next part is
    decoded while one is computed. The descriptors of a part depend on its own photos alone, to the
    last bit. The network is in evaluation mode until the last part is done.

    Args:
        network: the network.
        files: the photos of all parts; a photo that has a box is cropped to it first.
        sizes: the number of photos in each part; there may be more sizes than photos.
        how: how to decode the photos.
        describe: computes descriptors [B, C] of photos; the network by default.
        workers: maximum number of processes that decode photos; few or small photos use fewer. If
            the network's GPU can decode and reduce the photos, these are threads that read files;
            the descriptors then differ slightly, because the decoders do.
        on_progress: called with the number of photos just processed, including unreadable ones.

    Yields:
        The result of each part, in the order of its photos; `kept` has positions in the part.
    """
    net, device = network.net, network.device
    if how.max_side is None and device.type == "cpu":
        how = how._replace(refuse_large=True)
    training = net.training
    net.eval()
    try:
        with closing(decode_photos(files, how, workers, device)) as photos:
            for size in sizes:
                found = embed_decoded(network, islice(photos, size), on_progress, describe)
                if size and not found.kept and not found.errors:
                    break
                yield found
    finally:
        net.train(training)


def embed_decoded(
    network: PhotoNet,
    photos: Iterable[DecodedPhoto | ImageError],
    on_progress: Callable[[int], object] = lambda count: None,
    describe: Describe | None = None,
) -> Described:
    """Compute the descriptors of decoded photos, in their order; see `embed_parts`."""
    found: dict[int, DecodedPhoto] = {}
    fetched: list[Tensor] = []  # in the order of `found`
    errors: dict[int, str] = {}
    waiting: list[tuple[PhotoBatch, Tensor]] = []
    device, autocast, mixed = network.device, network.autocast, network.mixed
    pixels = BATCH_PIXELS[device.type]
    if mixed and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        pixels *= LARGE_BATCHES if memory >= LARGE_GPU else 1
    batches = batch_by_shape(
        photos, lambda width, height: max(1, pixels // (width * height)), mixed
    )
    # One autocast for all batches: it caches the cast weights until it ends.
    with (
        shared_cores(),
        torch.inference_mode(),
        torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
    ):
        for batch in batches:
            errors |= batch.errors
            if batch.photos:
                rows = _descriptors(describe or network, batch, device)
                # Only the descriptors wait; pixels would fill the memory.
                waiting.append((batch._replace(pixels=torch.empty(0)), rows))
            if sum(len(rows) for _, rows in waiting) >= WAITING:
                fetched += _fetch(waiting, found)
            on_progress(len(batch.photos) + len(batch.errors))
        fetched += _fetch(waiting, found)
    kept = sorted(found)
    descriptors = torch.empty(0, network.net.dim)
    if kept:
        descriptors = torch.cat(fetched)[torch.from_numpy(np.argsort(list(found)))]
    return Described(
        descriptors.float().numpy(),
        kept,
        [errors[i] for i in sorted(errors)],
        np.array([found[i].size for i in kept], dtype=np.int32).reshape(-1, 2),
        [found[i].thumbnail for i in kept],
        [found[i].local for i in kept],
    )


def _descriptors(describe: Describe, batch: PhotoBatch, device: torch.device) -> Tensor:
    """Start computing descriptors [n, C] of photos on the device; do not wait for the result."""
    try:
        rows = describe(batch.pixels.to(device, non_blocking=True), batch.sizes)
    except torch.OutOfMemoryError as error:
        count, _, height, width = batch.pixels.shape
        raise InputError(
            f"{count} photos of {width} × {height} pixels do not fit into the memory of the GPU: "
            "choose a smaller `max_side` (in training: `val_max_side`)"
        ) from error
    return rows[: len(batch.photos)]


def _fetch(
    waiting: list[tuple[PhotoBatch, Tensor]], found: dict[int, DecodedPhoto]
) -> list[Tensor]:
    """Copy waiting descriptors to the CPU, and add their photos to those found, by position."""
    if not waiting:
        return []
    for batch, _ in waiting:
        found.update(zip(batch.positions, batch.photos, strict=True))
    rows = torch.cat([rows for _, rows in waiting]).cpu()
    waiting.clear()
    return [rows]
