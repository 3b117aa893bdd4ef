"""Decide where the decoded photos of a run are kept, and keep those of the validation."""

import os
from collections.abc import Iterator
from contextlib import closing

import torch

from listwise.data import DecodedPhoto, Decoding, ImageError, Images, decode_photos
from listwise.data.gpu_photos import gpu_decodes
from listwise.data.kept_photos import KeptPhotos
from listwise.training.memory import free_bytes, readable_bytes

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
    needed = readable_bytes(decoded_bytes)
    on_gpu = int(GPU_PART * free_bytes(device))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_host = int(HOST_PART * free_bytes(torch.device("cpu"))) // processes
    if decoded_bytes <= on_gpu:
        line = (
            f"decoded photos are kept in GPU memory: {needed} of {readable_bytes(on_gpu)} allowed"
        )
        return KeptPhotos(count, device, decoded_bytes, on_device=True), line
    if decoded_bytes <= on_host:
        line = (
            f"decoded photos are kept in host memory: {needed} of {readable_bytes(on_host)} "
            f"allowed; the GPU may use {readable_bytes(on_gpu)} for them"
        )
        return KeptPhotos(count, device, decoded_bytes, on_device=False), line
    return None, (
        f"photos are decoded again in every update: they would take {needed} of memory, more than "
        f"allowed on the GPU ({readable_bytes(on_gpu)}) and on the host ({readable_bytes(on_host)})"
    )


class DecodedOnce:
    """Photos that are decoded when they are first used, and kept for the next time if they fit.

    Args:
        images: the photos.
        max_side: the long side that larger photos are reduced to.
        workers: as for `decode_photos`.
        device: as for `decode_photos`.
        kept: where the photos are kept; None decodes them every time.
        first: number of the first photo in `kept`.
    """

    def __init__(
        self,
        images: Images,
        max_side: int | None,
        workers: int,
        device: torch.device,
        kept: KeptPhotos | None,
        first: int,
    ) -> None:
        self._files, self._how = images.files(), Decoding(max_side)
        self._workers, self._device = workers, device
        self._kept, self._first = kept, first
        self._photos: list[DecodedPhoto | ImageError] = []

    def __iter__(self) -> Iterator[DecodedPhoto | ImageError]:
        """Yield the photos in order; an error takes the place of a photo that cannot be decoded."""
        if len(self._photos) == len(self._files):
            yield from self._photos
            return
        remembered: list[DecodedPhoto | ImageError] = []
        with closing(decode_photos(self._files, self._how, self._workers, self._device)) as photos:
            for number, photo in enumerate(photos, self._first):
                if isinstance(photo, ImageError):
                    remembered.append(photo)
                elif self._kept is not None and self._kept.add(number, photo.pixels):
                    remembered.append(photo._replace(pixels=self._kept.photo(number)))
                yield photo
        self._photos = remembered
