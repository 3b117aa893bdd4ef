"""Whole photos to descriptors, photos of one shape together."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from listwise.data import ImageError, Images, image_size, load_image, whole_image
from listwise.models.net import RetrievalNet

# Pixels in a batch: enough to keep a device busy, few enough for a small one.
BATCH_PIXELS = {"cpu": 2**20, "cuda": 2**24}


class Embedded(NamedTuple):
    """Descriptors [n, C] of the photos at positions `kept`, and the errors of the others."""

    descriptors: Tensor
    kept: list[int]
    errors: list[str]


def embed_photos(
    net: RetrievalNet,
    images: Images,
    *,
    max_side: int | None = None,
    workers: int = 0,
    autocast: torch.dtype | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Embedded:
    """Descriptors of whole photos, in evaluation mode, on the network's device.

    Args:
        net: the network; its mode is put back at the end.
        images: photos; each one's box is cut out first, if it has one.
        max_side: long side that larger photos are reduced to.
        workers: processes that decode.
        autocast: dtype in which the network runs.
        on_progress: called with the number of photos just done.

    Returns:
        Descriptors on the CPU, in the order of the photos.
    """
    device = next(net.parameters()).device
    shapes, errors = _shapes(images, max_side)
    batches = _same_shape(shapes, BATCH_PIXELS["cuda" if device.type == "cuda" else "cpu"])
    loader = DataLoader(
        _Photos(images, max_side),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=list,
        generator=torch.Generator(),
    )
    found: dict[int, Tensor] = {}
    training = net.training
    net.eval()
    try:
        with (
            torch.inference_mode(),
            torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
        ):
            for photos in loader:
                good = [(index, photo) for index, photo in photos if isinstance(photo, Tensor)]
                errors += [photo for _, photo in photos if not isinstance(photo, Tensor)]
                for group in _equal_shapes(good):
                    stacked = torch.stack([photo for _, photo in group]).to(device)
                    rows = net(stacked).cpu()
                    found.update(zip((index for index, _ in group), rows, strict=True))
                on_progress(len(photos))
    finally:
        net.train(training)
    kept = sorted(found)
    rows = torch.stack([found[i] for i in kept]) if kept else torch.empty(0, net.dim)
    return Embedded(rows, kept, errors)


class _Photos(Dataset[tuple[int, Tensor | str]]):
    def __init__(self, images: Images, max_side: int | None) -> None:
        self.images = images
        self.max_side = max_side

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        try:
            photo = load_image(self.images.paths[index], self.images.box(index))
        except ImageError as error:
            return index, str(error)
        return index, whole_image(photo, self.max_side)


def _shapes(images: Images, max_side: int | None) -> tuple[dict[int, tuple[int, int]], list[str]]:
    """Width and height each photo will have, read from its header, and what cannot be read."""
    shapes: dict[int, tuple[int, int]] = {}
    errors: list[str] = []
    for index, path in enumerate(images.paths):
        try:
            width, height = image_size(path, images.box(index))
        except ImageError as error:
            errors.append(str(error))
            continue
        scale = min(1.0, (max_side or max(width, height)) / max(width, height))
        shapes[index] = max(1, round(width * scale)), max(1, round(height * scale))
    return shapes, errors


def _same_shape(shapes: dict[int, tuple[int, int]], pixels: int) -> list[list[int]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for index, shape in shapes.items():
        groups.setdefault(shape, []).append(index)
    batches = []
    for (width, height), members in groups.items():
        size = max(1, pixels // (width * height))
        batches += [members[i : i + size] for i in range(0, len(members), size)]
    return batches


def _equal_shapes(photos: list[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Photos grouped by the shape they really have, should a header have lied."""
    groups: dict[torch.Size, list[tuple[int, Tensor]]] = {}
    for index, photo in photos:
        groups.setdefault(photo.shape, []).append((index, photo))
    yield from groups.values()
