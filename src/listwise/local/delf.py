"""Deep local features with attention (DELF): the locations of a photo that tell most."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from listwise.data import Box, image_size, load_image, whole_image
from listwise.local.delf_net import Delf, resized
from listwise.local.delf_settings import DelfSettings
from listwise.local.features import Features
from listwise.models.embed import BATCH_PIXELS
from listwise.training.choices import Machine

SMALLEST = 64  # pixels of a level's short side: less is mostly border
SIMILAR = 0.6  # cosine of descriptors that may be of the same thing
DEFAULT = DelfSettings()


def levels(width: int, height: int, settings: DelfSettings = DEFAULT) -> list[tuple[int, int]]:
    """Widths and heights at which a photo is seen, the largest first; there is always one."""
    sizes = [
        (max(1, round(width * scale)), max(1, round(height * scale))) for scale in settings.scales
    ]
    allowed = [size for size in sizes if max(size) <= settings.max_side] or sizes[-1:]
    return [size for size in allowed if min(size) >= SMALLEST] or allowed[:1]


class Locations(NamedTuple):
    """Places in a photo, those of most attention first: x, y, scale [n, 3] and features [n, C].

    The scale is the distance between neighbouring locations at the size where one was found.
    """

    places: Tensor
    features: Tensor


@torch.inference_mode()
def attend(
    net: Delf, photos: Tensor, settings: DelfSettings = DEFAULT, autocast: torch.dtype | None = None
) -> list[Locations]:
    """The locations of most attention in photos of one shape: uint8 [B, 3, H, W]."""
    height, width = photos.shape[2:]
    scores, features, places = [], [], []
    for columns, rows in levels(width, height, settings):
        with torch.autocast(photos.device.type, dtype=autocast, enabled=autocast is not None):
            level = net.features(resized(photos, (rows, columns)))
            scores.append(net.scores(level).float().flatten(1))
        features.append(level.flatten(2).transpose(1, 2))
        zoom = torch.tensor([width / columns, height / rows], device=photos.device)
        places.append(_places(level.shape[2], level.shape[3], net.stride, zoom))
    everything, everywhere = torch.cat(features, dim=1), torch.cat(places)
    return [
        Locations(everywhere[kept], photo[kept])
        for photo, kept in zip(
            everything, _strongest(torch.cat(scores, dim=1), settings.count), strict=True
        )
    ]


@torch.inference_mode()
def detect(
    net: Delf, photos: Tensor, settings: DelfSettings = DEFAULT, autocast: torch.dtype | None = None
) -> list[Features]:
    """The features of most attention in photos of one shape: uint8 [B, 3, H, W]."""
    return [
        _features(places, net.describe(features))
        for places, features in attend(net, photos, settings, autocast)
    ]


def similar_pairs(
    query: NDArray[np.float32], other: NDArray[np.float32], least: float = SIMILAR
) -> NDArray[np.int64]:
    """Pairs of unit descriptors that are each other's nearest and similar enough: [m, 2].

    For `verify` in place of its ratio test, which would refuse most true pairs here: the second
    nearest of a location is mostly its neighbour, which sees nearly the same.
    """
    if not len(query) or not len(other):
        return np.zeros((0, 2), np.int64)
    products = query @ other.T
    nearest = products.argmax(axis=1)
    rows = np.arange(len(query))
    kept = (products.argmax(axis=0)[nearest] == rows) & (products[rows, nearest] >= least)
    return np.stack([rows[kept], nearest[kept]], axis=1).astype(np.int64)


@dataclass(frozen=True)
class DelfExtractor:
    """Takes deep local features with the network in a folder; copies of it may go to processes.

    Args:
        folder: what `listwise local train` made.
        settings: how features are taken.
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.
        bfloat16: run the network in half precision; by default where a GPU has it.
    """

    folder: str | Path
    settings: DelfSettings = DEFAULT
    device: str = "auto"
    bfloat16: bool | None = None

    @property
    def net(self) -> Delf:
        """The network, opened once in a process."""
        return _opened(Path(self.folder), Machine.this(self.device).device)[0]

    @property
    def fingerprint(self) -> str:
        """The network's."""
        return _opened(Path(self.folder), Machine.this(self.device).device)[1]

    @property
    def name(self) -> str:
        """What the features are of: the network and the settings."""
        scales = ",".join(f"{scale:.3g}" for scale in self.settings.scales)
        return (
            f"delf-{self.fingerprint[:16]}-{self.settings.count}"
            f"-side{self.settings.max_side}-scales{scales}"
        )

    @property
    def dim(self) -> int:
        """Dimensions of a descriptor."""
        return self.net.config.dim

    def __call__(self, path: str, box: Box | None = None) -> Features:
        """Features of a photo or its box, placed in the upright whole photo.

        Raises:
            ImageError: the file cannot be read.
        """
        photo = load_image(path, box, min_side=self.settings.max_side)
        found = self.features(photo)
        if box is not None:
            return found.moved(max(0, round(box[0])), max(0, round(box[1])))
        # Large JPEG files are decoded at a part of their size.
        return found.scaled(image_size(path)[0] / photo.width)

    def features(self, photo: Image.Image) -> Features:
        """Features of an upright photo."""
        return self.batch([photo])[0]

    def batch(self, photos: Sequence[Image.Image]) -> list[Features]:
        """Features of upright photos, those of one shape at once."""
        shapes: dict[torch.Size, list[tuple[int, Tensor]]] = {}
        for position, photo in enumerate(photos):
            pixels = whole_image(photo.convert("RGB"), self.settings.max_side)
            shapes.setdefault(pixels.shape, []).append((position, pixels))
        net = self.net
        device = net.mean.device
        half = Machine.this(str(device)).bfloat16 if self.bfloat16 is None else self.bfloat16
        found: dict[int, Features] = {}
        for (_, height, width), group in shapes.items():
            columns, rows = levels(width, height, self.settings)[0]
            size = max(1, BATCH_PIXELS[device.type] // (columns * rows))
            for start in range(0, len(group), size):
                positions, batch = zip(*group[start : start + size], strict=True)
                features = detect(
                    net,
                    torch.stack(batch).to(device),
                    self.settings,
                    torch.bfloat16 if half else None,
                )
                for position, each in zip(positions, features, strict=True):
                    found[position] = each.scaled(photos[position].width / width)
        return [found[position] for position in range(len(photos))]


@lru_cache(maxsize=2)
def _opened(folder: Path, device: str) -> tuple[Delf, str]:
    """A folder's network and its fingerprint."""
    if multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)  # a worker process has one core
    net = Delf.load(folder, device)
    return net, net.fingerprint()


def _places(rows: int, columns: int, stride: int, zoom: Tensor) -> Tensor:
    """x, y and scale in the photo of the locations of a level, row by row: [rows · columns, 3].

    `zoom` [2] is how much larger the photo is.
    """
    y, x = (torch.arange(side, device=zoom.device) for side in (rows, columns))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)
    # Kernels and their padding are symmetric: location 0 looks at the first pixel's middle.
    points = (stride * grid + 0.5) * zoom - 0.5
    return torch.cat([points, (stride * zoom.prod().sqrt()).expand(len(grid), 1)], dim=1)


def _strongest(scores: Tensor, count: int) -> list[Tensor]:
    """Where the `count` highest scores of each row are, above 0, the highest first: [B, n]."""
    best, chosen = scores.topk(min(count, scores.shape[1]), dim=1)
    return [row[values > 0] for row, values in zip(chosen, best, strict=True)]


def _features(places: Tensor, descriptors: Tensor) -> Features:
    """Features at places (x, y, scale) [n, 3], upright and round."""
    values = places.float().cpu().numpy()
    shapes = np.broadcast_to(np.eye(2, dtype=np.float32), (len(values), 2, 2))
    return Features(
        np.ascontiguousarray(values[:, :2]),
        np.ascontiguousarray(values[:, 2]),
        np.ascontiguousarray(shapes),
        descriptors.cpu().numpy(),
    )
