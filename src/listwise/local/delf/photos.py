"""Photos for deep local features: decoded by worker processes, those of one shape together."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from listwise.data import ImageError, Images, image_size, load_image, whole_image
from listwise.data.labelled import size_or_error
from listwise.data.workers import ignore_interrupts

WINDOW = 2048  # photos among which those of one shape are looked for


class Decoded(NamedTuple):
    """A photo or its box: `pixels` uint8 [3, H, W], and how it lies in the upright whole photo.

    A point p of the pixels is (p + ½) · `zoom` − ½ + `corner`, in pixels of the photo, whose width
    and height are `size`.
    """

    position: int
    pixels: Tensor
    zoom: float
    corner: tuple[int, int]
    size: tuple[int, int]


class Batch(NamedTuple):
    """Photos of one shape, `pixels` uint8 [B, 3, H, W]; or errors, by position, and no photos."""

    photos: list[Decoded]
    pixels: Tensor
    errors: dict[int, str]


def decode(path: str, box: tuple[float, float, float, float] | None, max_side: int) -> Decoded:
    """A photo on disk or its box, with its long side reduced to `max_side`.

    Raises:
        ImageError: the file cannot be read.
    """
    size = image_size(path)
    photo = load_image(path, box, min_side=max_side)
    pixels = whole_image(photo, max_side)
    if box is not None:
        corner = max(0, round(box[0])), max(0, round(box[1]))
        return Decoded(0, pixels, photo.width / pixels.shape[2], corner, size)
    # Large JPEG files are decoded at a part of their size.
    return Decoded(0, pixels, size[0] / pixels.shape[2], (0, 0), size)


def photo_windows(
    images: Images,
    indices: Sequence[int],
    max_side: int,
    batch_size: Callable[[int, int], int],
    workers: int,
) -> Generator[tuple[Sequence[int], Iterator[Batch]], None, None]:
    """Stretches of the photos at these positions, each with its batches, which must be used up.

    Args:
        images: photos.
        indices: positions of those wanted.
        max_side: long side that larger ones are reduced to.
        batch_size: photos at once, from width and height.
        workers: processes that decode; 0 decodes here, when asked.
    """
    windows = [indices[start : start + WINDOW] for start in range(0, len(indices), WINDOW)]
    planned = [_plan(images, window, max_side, batch_size) for window in windows]
    batches = iter(
        DataLoader(
            _Photos(images, max_side),
            batch_sampler=[batch for plan in planned for batch in plan],
            num_workers=workers,
            collate_fn=_stack,
            worker_init_fn=ignore_interrupts,
            generator=torch.Generator(),
        )
    )
    try:
        for window, plan in zip(windows, planned, strict=True):
            yield window, (batch for _ in plan for batch in next(batches))
    finally:
        # Left to the garbage collector, workers are waited for in vain, five seconds for each.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


def _plan(
    images: Images, window: Sequence[int], max_side: int, batch_size: Callable[[int, int], int]
) -> list[list[int]]:
    """Positions of photos that will have about one shape, as their headers say."""
    paths, boxes = [images.paths[i] for i in window], [images.box(i) for i in window]
    shapes: dict[tuple[int, int], list[int]] = {}
    with ThreadPoolExecutor() as pool:
        for index, found in zip(window, pool.map(size_or_error, paths, boxes), strict=True):
            width, height = (1, 1) if isinstance(found, ImageError) else found
            scale = min(1.0, max_side / max(width, height))
            shape = max(1, round(width * scale)), max(1, round(height * scale))
            shapes.setdefault(shape, []).append(index)
    batches = []
    for shape, group in shapes.items():
        step = batch_size(*shape)
        batches += [group[start : start + step] for start in range(0, len(group), step)]
    return batches


class _Photos(Dataset[Decoded | tuple[int, str]]):
    def __init__(self, images: Images, max_side: int) -> None:
        self.images = images
        self.max_side = max_side

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Decoded | tuple[int, str]:
        try:
            found = decode(self.images.paths[index], self.images.box(index), self.max_side)
        except ImageError as error:
            return index, str(error)
        return found._replace(position=index)


def _stack(decoded: list[Decoded | tuple[int, str]]) -> list[Batch]:
    """What was planned as a batch; a photo whose header was not exact is in one of its own."""
    shapes: dict[torch.Size, list[Decoded]] = {}
    errors: dict[int, str] = {}
    for entry in decoded:
        if isinstance(entry, Decoded):
            shapes.setdefault(entry.pixels.shape, []).append(entry)
        else:
            errors[entry[0]] = entry[1]
    found = [
        Batch(
            [photo._replace(pixels=torch.empty(0)) for photo in group],  # once is enough
            torch.stack([photo.pixels for photo in group]),
            {},
        )
        for group in shapes.values()
    ]
    return [*found, Batch([], torch.empty(0), errors)] if errors else found
