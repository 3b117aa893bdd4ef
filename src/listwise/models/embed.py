"""Compute the descriptors of photos with a network, in batches."""

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from listwise.data import DecodedPhoto, Decoding, ImageError, Images, PhotoFile, decode_photos
from listwise.data.pipeline import PhotoBatch, batch_by_canvas, batch_by_shape
from listwise.errors import InputError
from listwise.machine import shared_cores
from listwise.models.areas import UnsupportedNetwork
from listwise.models.folding import make_folded_copy
from listwise.models.mixed import MixedNet, mixes
from listwise.models.net import RetrievalNet
from listwise.models.onnx_net import Network, OnnxNet

# Pixels per batch: enough to keep a device busy, few enough for a small one.
BATCH_PIXELS = {"cpu": 2**20, "cuda": 2**24}
# The factor for mixed batches on a GPU with this much memory: starting the kernels of many small
# batches takes longer than computing them.
LARGE_GPU, LARGE_BATCHES = 64 * 2**30, 2
# Where photos of different shapes are computed in one batch. A CPU is as fast with batches of one
# shape, and computes nothing outside of the photos.
MIXED = {"cpu": False, "cuda": True}
# From this many photos on, a folded copy of the network saves more time on a CPU than it takes.
FOLDED_PHOTOS = 32
# Descriptors that may wait on a GPU: copying them to the CPU waits for all its work to finish.
WAITING = 1024


Describe = Callable[[Tensor, Sequence[tuple[int, int]]], Tensor]
"""Maps photos uint8 [B, 3, H, W] to descriptors [B, C].

The photos lie in the upper left corners; the second argument has their heights and widths.
"""


class EmbeddedPhotos(NamedTuple):
    """The descriptors of photos, and the errors of photos that cannot be read.

    Attributes:
        descriptors: [n, C] descriptors of the n photos that can be read.
        kept: the positions of these photos.
        errors: one message for each other photo.
        sizes: the widths and heights of the n photos (or of their boxes) before any reduction.
        thumbnails: the thumbnails of the n photos; empty bytes if none were requested.
        local: the encoded local features of the n photos; empty bytes if not requested.
    """

    descriptors: Tensor
    kept: list[int]
    errors: list[str]
    sizes: list[tuple[int, int]]
    thumbnails: list[bytes]
    local: list[bytes]


def embed_photos(
    net: RetrievalNet,
    images: Images,
    *,
    max_side: int | None = None,
    workers: int = 0,
    autocast: torch.dtype | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> EmbeddedPhotos:
    """Compute the descriptors of whole photos in evaluation mode, on the network's device.

    Args:
        net: the network; its training mode is restored at the end.
        images: the photos; a photo that has a box is cropped to it first.
        max_side: the long side that larger photos are reduced to.
        workers: maximum number of processes that decode photos; few or small photos use fewer. If
            the network's GPU can decode and reduce the photos, these are threads that read files;
            the descriptors then differ slightly, because the decoders do.
        autocast: dtype in which the network runs.
        on_progress: called with the number of photos just processed, including unreadable ones.

    Returns:
        Descriptors on the CPU, in the order of the photos.
    """
    network = PhotoNet(net, autocast, inference_network(net, autocast, len(images)))
    (found,) = embed_parts(
        net,
        images.files(),
        [len(images)],
        Decoding(max_side),
        describe=network,
        mixed=network.mixed,
        workers=workers,
        autocast=autocast,
        on_progress=on_progress,
    )
    return found


class PhotoNet:
    """The fastest way to compute with a network, in evaluation mode.

    Args:
        net: the network.
        autocast: dtype in which the network runs.
        fastest: computes what the network computes, faster; by default `inference_network`.

    Attributes:
        mixed: whether photos of different shapes are computed in one batch. This needs a GPU, and
            a network for which it does not change the descriptors (see `listwise.models.mixed`).
    """

    def __init__(
        self,
        net: Network,
        autocast: torch.dtype | None,
        fastest: Network | None = None,
    ) -> None:
        trial = None
        with ThreadPoolExecutor(1, "trial") as thread:  # on the CPU, while the GPU is prepared
            if MIXED.get(net.mean.device.type, False) and isinstance(net, RetrievalNet):
                trial = thread.submit(mixes, net, autocast is not None)
            self._net = fastest or inference_network(net, autocast)
            self.mixed = trial is not None and trial.result()
        self._mixed_net = None
        if self.mixed:
            assert isinstance(self._net, RetrievalNet)
            self._mixed_net = MixedNet(self._net)
        self._warned = False

    def __call__(self, images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Describe photos of these heights and widths in images [B, 3, H, W]: [B, dim].

        The photos lie in the upper left corners.
        """
        if self._mixed_net is not None:
            try:
                return self._mixed_net(images, sizes)
            except UnsupportedNetwork as reason:
                self._warn_once(reason)
        return self._alone(images, sizes)

    def _alone(self, images: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        if all(size == images.shape[2:] for size in sizes):
            together: Tensor = self._net(images)
            return together
        photos = zip(images, sizes, strict=True)
        return torch.cat([self._net(photo[None, :, :h, :w]) for photo, (h, w) in photos])

    def _warn_once(self, reason: UnsupportedNetwork) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"some photos are described one at a time, which takes longer: {reason}",
                stacklevel=3,
            )


def inference_network(net: Network, autocast: torch.dtype | None, photos: int = 1) -> Network:
    """Return the fastest network that computes what `net` computes now under this autocast.

    `photos` is the number of photos to compute, as far as it is known.
    """
    if isinstance(net, OnnxNet):
        return net
    if autocast is None and (photos < FOLDED_PHOTOS or net.mean.device.type != "cpu"):
        return net
    training = net.training
    net.eval()  # the copy is made for the mode that it runs in
    try:
        with torch.inference_mode(False):
            folded_copy = make_folded_copy(net, example_image(net), autocast)
    finally:
        net.train(training)
    if folded_copy is None:
        return net
    assert isinstance(folded_copy.module, RetrievalNet)
    return folded_copy.module.eval()


def example_image(net: RetrievalNet) -> Tensor:
    """Return an image [1, 3, side, side] for a trial of a network, on its device."""
    side = net.config.image_size
    noise = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    return noise.to(net.mean.device)


def embed_parts(
    net: Network,
    files: Iterable[PhotoFile],
    sizes: Iterable[int],
    how: Decoding,
    *,
    describe: Describe | None = None,
    mixed: bool = False,
    workers: int = 0,
    autocast: torch.dtype | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Generator[EmbeddedPhotos, None, None]:
    """Compute the descriptors of photos in several parts, as `embed_photos` does for one.

    The next part is decoded while one is computed. The descriptors of a part depend on its own
    photos alone, to the last bit. The network is in evaluation mode until the last part is done.

    Args:
        net: the network.
        files: the photos of all parts.
        sizes: the number of photos in each part; there may be more sizes than photos.
        how: how to decode the photos.
        describe: computes descriptors [B, C] of photos; the network by default.
        mixed: whether `describe` takes photos of different shapes.
        workers: as for `embed_photos`.
        autocast: as for `embed_photos`.
        on_progress: as for `embed_photos`.

    Yields:
        The result of each part; `kept` has positions in the part.
    """
    device = net.mean.device
    if describe is None:
        network = PhotoNet(net, autocast)
        describe, mixed = network, network.mixed
    training = net.training
    net.eval()
    try:
        with closing(decode_photos(files, how, workers, device)) as photos:
            for size in sizes:
                found = embed_decoded(
                    islice(photos, size),
                    describe,
                    net.dim,
                    device,
                    autocast,
                    on_progress,
                    mixed=mixed,
                )
                if size and not found.kept and not found.errors:
                    break
                yield found
    finally:
        net.train(training)


def embed_decoded(
    photos: Iterable[DecodedPhoto | ImageError],
    describe: Describe,
    dim: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
    *,
    mixed: bool = False,
) -> EmbeddedPhotos:
    """Compute the descriptors [n, dim] of decoded photos, in their order, on `device`.

    If not `mixed`, all photos of a batch have the same shape.
    """
    found: dict[int, DecodedPhoto] = {}
    fetched: list[Tensor] = []  # in the order of `found`
    errors: dict[int, str] = {}
    waiting: list[tuple[PhotoBatch, Tensor]] = []
    pixels = BATCH_PIXELS[device.type]
    if mixed:
        batches = batch_by_canvas(photos, pixels * _batch_factor(device))
    else:
        batches = batch_by_shape(photos, lambda width, height: max(1, pixels // (width * height)))
    # One autocast for all batches: it caches the cast weights until it ends.
    with (
        shared_cores(),
        torch.inference_mode(),
        torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
    ):
        for batch in batches:
            errors |= batch.errors
            if batch.photos:
                rows = _descriptors(describe, batch, device)
                # Only the descriptors wait; pixels would fill the memory.
                waiting.append((batch._replace(pixels=torch.empty(0)), rows))
            if sum(len(rows) for _, rows in waiting) >= WAITING:
                fetched += _fetch(waiting, found)
            on_progress(len(batch.photos) + len(batch.errors))
        fetched += _fetch(waiting, found)
    kept = sorted(found)
    descriptors = torch.empty(0, dim)
    if kept:
        descriptors = torch.cat(fetched)[torch.from_numpy(np.argsort(list(found)))]
    return EmbeddedPhotos(
        descriptors,
        kept,
        [errors[i] for i in sorted(errors)],
        [found[i].size for i in kept],
        [found[i].thumbnail for i in kept],
        [found[i].local for i in kept],
    )


def _batch_factor(device: torch.device) -> int:
    gpu = device.type == "cuda"
    large = gpu and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU
    return LARGE_BATCHES if large else 1


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
