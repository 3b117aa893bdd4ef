"""Decoded photos that stay in memory, so that each file is decoded once."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Host memory is allocated in blocks of this size; PyTorch rounds pinned memory up to powers of two.
HOST_BLOCK = 2**28

Numbers = npt.NDArray[np.int64]


class PhotoBlock(NamedTuple):
    """Photos of any sizes in one tensor.

    Attributes:
        pixels: uint8, with the values [3, H, W] of each photo.
        table: where the values of a photo start, its width and its height: [n, 3].
    """

    pixels: Tensor
    table: Numbers


def as_block(photos: Sequence[Tensor]) -> PhotoBlock:
    """Copy n photos uint8 [3, H, W] into one tensor."""
    sizes = np.array([(photo.shape[2], photo.shape[1]) for photo in photos], dtype=np.int64)
    return PhotoBlock(torch.cat([photo.flatten() for photo in photos]), block_table(sizes))


def block_table(sizes: Numbers) -> Numbers:
    """Return the table of photos that follow each other, from widths and heights [n, 2]."""
    values = 3 * sizes.prod(axis=1)
    return np.column_stack([np.cumsum(values) - values, sizes])


class KeptPhotos:
    """Decoded photos in the memory of a GPU, or in host memory that a GPU can copy from.

    Args:
        count: number of photos; they are numbered from 0.
        device: the GPU that uses the photos.
        budget: maximum number of bytes. Photos that no longer fit are not kept.
        on_device: keep the photos in the memory of the device, else in host memory.

    Attributes:
        unreadable: numbers of photos that cannot be decoded.
    """

    def __init__(self, count: int, device: torch.device, budget: int, on_device: bool) -> None:
        self.device, self.budget, self.on_device = device, budget, on_device
        self.unreadable: set[int] = set()
        # Place in its block, width and height; a width of 0 stands for a photo that is not kept.
        self._table = np.zeros((count, 3), dtype=np.int64)
        self._pixels: dict[int, Tensor] = {}
        self._blocks: list[Tensor] = []
        self._used = 0  # bytes of the last block
        self._adding = threading.Lock()

    def __len__(self) -> int:
        return len(self._pixels)

    @property
    def bytes(self) -> int:
        """Bytes of memory that were allocated for photos."""
        return sum(len(block) for block in self._blocks)

    def has(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return which of these photos are kept: [n] -> [n]."""
        kept: npt.NDArray[np.bool_] = self._table[numbers, 1] != 0
        return kept

    def add(self, number: int, pixels: Tensor) -> bool:
        """Keep a copy of a photo uint8 [3, H, W]; return False if it does not fit."""
        if number in self._pixels:
            return True
        with self._adding:
            place = self._allocate(pixels.numel())
            if place is None:
                return False
            kept = self._blocks[-1][place : place + pixels.numel()].view(pixels.shape)
        kept.copy_(pixels, non_blocking=True)
        self._pixels[number] = kept
        self._table[number] = place, kept.shape[2], kept.shape[1]
        return True

    def photo(self, number: int) -> Tensor:
        """Return a kept photo: uint8 [3, H, W] in the memory where it is kept."""
        return self._pixels[number]

    def sizes(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return widths and heights of kept photos: [n] -> [n], [n]."""
        return self._table[numbers, 1], self._table[numbers, 2]

    def on_gpu(self, numbers: Numbers) -> PhotoBlock:
        """Return kept photos in GPU memory, copied to it if necessary."""
        if self.on_device:
            return PhotoBlock(self._blocks[0], self._table[numbers])
        table = block_table(self._table[numbers, 1:])
        photos = [self._pixels[number].flatten() for number in numbers.tolist()]
        copies = torch.empty(sum(map(len, photos)), dtype=torch.uint8, device=self.device)
        for start, photo in zip(table[:, 0].tolist(), photos, strict=True):
            copies[start : start + len(photo)].copy_(photo, non_blocking=True)
        return PhotoBlock(copies, table)

    def _allocate(self, size: int) -> int | None:
        """Return a place in the last block, or None if the budget does not allow one."""
        if not self._blocks or self._used + size > len(self._blocks[-1]):
            # On the GPU everything at once, so that the free memory does not shrink later.
            wanted = self.budget if self.on_device else max(HOST_BLOCK, size)
            wanted = min(wanted, self.budget - self.bytes)
            if wanted < size:
                return None
            self._blocks.append(self._new_block(wanted))
            self._used = 0
        self._used += size
        return self._used - size

    @torch.inference_mode(False)  # another mode may write to the block later
    def _new_block(self, size: int) -> Tensor:
        gpu = self.device.type == "cuda"
        if not self.on_device:
            return torch.empty(size, dtype=torch.uint8, pin_memory=gpu)
        block = torch.empty(size, dtype=torch.uint8, device=self.device)
        if gpu:
            # Other streams will write to memory that kernels of this one may have yet to read.
            torch.cuda.synchronize(self.device)
        return block
