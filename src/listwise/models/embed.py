"""Whole photos to descriptors, photos of one shape together."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import tee
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from listwise.data import ImageError, Images, load_image, whole_image
from listwise.data.gpu_photos import CHUNK_PIXELS, Wanted, decoded_photos, gpu_decodes
from listwise.data.labelled import size_or_error
from listwise.data.workers import ignore_interrupts
from listwise.errors import InputError
from listwise.models.folding import Twin
from listwise.models.net import RetrievalNet

# Pixels in a batch: enough to keep a device busy, few enough for a small one.
BATCH_PIXELS = {"cpu": 2**20, "cuda": 2**24}
# Rows that may wait on a GPU to be fetched: fetching waits for all that was asked of the GPU.
WAITING = 1024
# Starting a worker takes about as long as decoding this many pixels.
START_PIXELS = 2**22
# Batches that a GPU decodes before it has described them.
BATCHES_AHEAD = 4


class Embedded(NamedTuple):
    """Descriptors [n, C] of the photos at positions `kept`, and the errors of the others.

    `sizes` are the widths and heights of the photos (of the box where there is one), before any
    reduction.
    """

    descriptors: Tensor
    kept: list[int]
    errors: list[str]
    sizes: list[tuple[int, int]]


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
        workers: processes that decode, at most; fewer for few or small photos. Where the network's
            GPU can, it decodes and reduces the photos itself and these are threads that read
            files; the descriptors then differ a little, as the decoders do.
        autocast: dtype in which the network runs.
        on_progress: called with the number of photos just done, unreadable ones too.

    Returns:
        Descriptors on the CPU, in the order of the photos.
    """
    (found,) = embed_parts(
        net,
        images,
        [range(len(images))],
        describe=inference_network(net, autocast),
        max_side=max_side,
        workers=workers,
        autocast=autocast,
        on_progress=on_progress,
    )
    return found


def inference_network(net: RetrievalNet, autocast: torch.dtype | None) -> RetrievalNet:
    """The network that computes what `net` does now, under autocast to that dtype, soonest."""
    if autocast is None:
        return net
    side = net.config.image_size
    with torch.inference_mode(False):
        example = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        twin = Twin(net, example.to(next(net.parameters()).device), autocast).module.eval()
    assert isinstance(twin, RetrievalNet)
    return twin


def embed_parts(
    net: RetrievalNet,
    images: Images,
    parts: Sequence[range],
    *,
    describe: Callable[[Tensor], Tensor] | None = None,
    max_side: int | None = None,
    workers: int = 0,
    autocast: torch.dtype | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Iterator[Embedded]:
    """`embed_photos` part by part, in one go: the next part is decoded while one is computed.

    A part's descriptors depend on its own photos alone, to the last bit.

    Args:
        net: the network; in evaluation mode until the last part is taken.
        images: photos.
        parts: the positions that belong together; those in `Embedded.kept` are among them.
        describe: makes descriptors [B, C] of photos uint8 [B, 3, H, W]; the network by default.
        max_side: as for `embed_photos`, like all that follow.
        workers: processes that decode, or threads that read.
        autocast: dtype in which the network runs.
        on_progress: called with the number of photos just done.
    """
    device = next(net.parameters()).device
    plan = _Plan(images, parts, max_side, "cuda" if device.type == "cuda" else "cpu")
    batches = (
        _decode_there(plan, images, max_side, device, max(1, workers))
        if gpu_decodes(device)
        else _load(plan, images, max_side, device, workers)
    )
    training = net.training
    net.eval()
    try:
        for number in range(len(parts)):
            count, unread = plan.part(number)
            on_progress(len(unread))
            # Once for a part: autocast keeps its casts of the weights as long as it lasts.
            with (
                torch.inference_mode(),
                torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
            ):
                found, errors = _embed(batches, count, describe or net, device, on_progress)
            kept = sorted(found)
            yield Embedded(
                torch.stack([found[i][0] for i in kept]) if kept else torch.empty(0, net.dim),
                kept,
                [*unread, *errors],
                [found[i][1] for i in kept],
            )
    finally:
        net.train(training)
        batches.close()


Found = dict[int, tuple[Tensor, tuple[int, int]]]
"""Descriptor [C] and size of each photo, by its position."""


def _embed(
    batches: Iterator["_Batch"],
    count: int,
    describe: Callable[[Tensor], Tensor],
    device: torch.device,
    on_progress: Callable[[int], object],
) -> tuple[Found, list[str]]:
    """The descriptors of as many batches, and the errors of photos that cannot be read."""
    found: Found = {}
    errors: list[str] = []
    waiting: list[tuple[_Group, Tensor]] = []
    for _ in range(count):
        batch = next(batches)
        for group in batch.groups:
            waiting.append((group, _descriptors(describe, group.photos, device)))
            if sum(len(rows) for _, rows in waiting) >= WAITING:
                found.update(_fetch(waiting))
                waiting.clear()
        errors += batch.errors
        on_progress(len(batch.errors) + sum(len(group.indices) for group in batch.groups))
    found.update(_fetch(waiting))
    return found, errors


def _descriptors(
    describe: Callable[[Tensor], Tensor], photos: Tensor, device: torch.device
) -> Tensor:
    """Descriptors [n, C] of photos, on the device, where they may not be ready yet."""
    try:
        return describe(photos.to(device, non_blocking=True))
    except torch.OutOfMemoryError as error:
        count, _, height, width = photos.shape
        raise InputError(
            f"{count} photos of {width} × {height} at once do not fit into the GPU's memory: "
            "choose a smaller `max_side` (in training: `val_max_side`)"
        ) from error


def _fetch(waiting: "list[tuple[_Group, Tensor]]") -> Found:
    if not waiting:
        return {}
    indices = [index for group, _ in waiting for index in group.indices]
    # Pinning memory makes lists of tuples.
    sizes = [(width, height) for group, _ in waiting for width, height in group.sizes]
    rows = torch.cat([rows for _, rows in waiting]).cpu()
    return dict(zip(indices, zip(rows, sizes, strict=True), strict=True))


class _Group(NamedTuple):
    """Photos of one shape, uint8 [n, 3, H, W], their positions and sizes before reduction."""

    photos: Tensor
    indices: list[int]
    sizes: list[tuple[int, int]]


class _Batch(NamedTuple):
    groups: list[_Group]
    errors: list[str]


class _Decoded(NamedTuple):
    position: int
    photo: Tensor
    size: tuple[int, int]


class _Photos(Dataset[_Decoded | str]):
    def __init__(self, images: Images, max_side: int | None) -> None:
        self.images = images
        self.max_side = max_side

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> _Decoded | str:
        try:
            photo = load_image(self.images.paths[index], self.images.box(index))
        except ImageError as error:
            return str(error)
        return _Decoded(index, whole_image(photo, self.max_side), photo.size)


def _stack(decoded: list[_Decoded | str]) -> _Batch:
    """One batch; should a header have lied, its photo is alone in a group of its true shape."""
    shapes: dict[torch.Size, list[_Decoded]] = {}
    for entry in decoded:
        if not isinstance(entry, str):
            shapes.setdefault(entry.photo.shape, []).append(entry)
    groups = [
        _Group(
            default_collate([entry.photo for entry in group]),  # into shared memory at once
            [entry.position for entry in group],
            [entry.size for entry in group],
        )
        for group in shapes.values()
    ]
    return _Batch(groups, [entry for entry in decoded if isinstance(entry, str)])


def _load(
    plan: "_Plan", images: Images, max_side: int | None, device: torch.device, workers: int
) -> Generator[_Batch, None, None]:
    """The batches of a plan, decoded by processes."""
    batches = iter(
        DataLoader(
            _Photos(images, max_side),
            batch_sampler=plan,
            num_workers=min(workers, plan.worthwhile_workers()),
            collate_fn=_stack,
            worker_init_fn=ignore_interrupts,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),
        )
    )
    try:
        yield from batches
    finally:
        # Left to the garbage collector, workers are waited for in vain, five seconds for each.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


def _decode_there(
    plan: "_Plan", images: Images, max_side: int | None, device: torch.device, threads: int
) -> Generator[_Batch, None, None]:
    """The batches of a plan, decoded by a GPU on a stream beside the current one."""
    read, made = tee(plan)
    wanted = (Wanted(images.paths[i], images.box(i)) for batch in read for i in batch)
    stream: torch.cuda.Stream | None = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    in_use: deque[torch.cuda.Event] = deque()
    with closing(decoded_photos(wanted, device, threads)) as photos:
        for indices in made:
            with torch.cuda.stream(stream) if stream else nullcontext():
                batch = _reduce_and_stack(indices, photos, max_side)
            if stream:
                user = torch.cuda.current_stream(device)
                user.wait_stream(stream)
                for group in batch.groups:
                    group.photos.record_stream(user)
            yield batch
            if stream:
                # Whoever asked has told the GPU what to do with it, and may be far ahead of it.
                in_use.append(torch.cuda.current_stream(device).record_event())
                if len(in_use) > BATCHES_AHEAD:
                    in_use.popleft().synchronize()


def _reduce_and_stack(
    indices: list[int], photos: Iterator[Tensor | ImageError], max_side: int | None
) -> _Batch:
    """The next photos in one batch; large ones are reduced before more are decoded."""
    decoded: list[_Decoded | str] = []
    large: list[tuple[int, Tensor]] = []
    pixels = 0
    for index, photo in zip(indices, photos, strict=False):
        if isinstance(photo, ImageError):
            decoded.append(str(photo))
            continue
        _, height, width = photo.shape
        if _reduced(width, height, max_side) == (width, height):
            decoded.append(_Decoded(index, photo, (width, height)))
            continue
        large.append((index, photo))
        pixels += height * width
        if pixels >= CHUNK_PIXELS:
            decoded += _reduce(large, max_side)
            large, pixels = [], 0
    return _stack(decoded + _reduce(large, max_side))


def _reduce(photos: list[tuple[int, Tensor]], max_side: int | None) -> list[_Decoded | str]:
    """Photos and their positions, reduced on their GPU."""
    if not photos:
        return []
    from listwise.data.gpu_resample import resize_photos  # needs Triton

    shapes: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for index, photo in photos:
        _, height, width = photo.shape
        shapes.setdefault(_reduced(width, height, max_side), []).append((index, photo))
    return [
        _Decoded(index, small, (photo.shape[2], photo.shape[1]))
        for (width, height), group in shapes.items()
        for (index, photo), small in zip(
            group, resize_photos([photo for _, photo in group], width, height), strict=True
        )
    ]


def _reduced(width: int, height: int, max_side: int | None) -> tuple[int, int]:
    """The size of a photo of that size, whose long side is to be `max_side` at most."""
    scale = min(1.0, (max_side or max(width, height)) / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


class _Plan:
    """Batch sampler: photos of one part and one shape together; headers are read when needed."""

    def __init__(
        self, images: Images, parts: Sequence[range], max_side: int | None, device: str
    ) -> None:
        self.images = images
        self.parts = parts
        self.max_side = max_side
        self.pixels = BATCH_PIXELS[device]
        self.known: dict[int, tuple[int, list[str]]] = {}
        self.batches: dict[int, list[list[int]]] = {}
        self.mean_pixels = 0.0

    def _read(self, number: int) -> None:
        if number not in self.known:
            shapes, errors = _shapes(self.images, self.parts[number], self.max_side)
            self.batches[number] = _same_shape(shapes, self.pixels)
            pixels = sum(width * height for width, height in shapes.values())
            self.mean_pixels = pixels / max(1, len(shapes))
            self.known[number] = len(self.batches[number]), errors

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self.parts)):
            self._read(number)
            yield from self.batches.pop(number)

    def worthwhile_workers(self) -> int:
        """As many as make starting them and decoding by them the quickest in sum."""
        if not self.parts:
            return 0
        self._read(0)
        pixels = self.mean_pixels * sum(len(part) for part in self.parts)
        return math.ceil(math.sqrt(pixels / START_PIXELS))

    def part(self, number: int) -> tuple[int, list[str]]:
        """How many batches a part has, and the errors of what has no readable header."""
        self._read(number)
        return self.known[number]


def _shapes(
    images: Images, part: range, max_side: int | None
) -> tuple[dict[int, tuple[int, int]], list[str]]:
    """Width and height each photo will have, read from its header, and what cannot be read."""
    shapes: dict[int, tuple[int, int]] = {}
    errors: list[str] = []
    paths, boxes = [images.paths[i] for i in part], [images.box(i) for i in part]
    with ThreadPoolExecutor() as pool:
        for index, found in zip(part, pool.map(size_or_error, paths, boxes), strict=True):
            if isinstance(found, ImageError):
                errors.append(str(found))
                continue
            shapes[index] = _reduced(*found, max_side)
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
