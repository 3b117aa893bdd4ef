"""Extract deep local features (DELF): the locations of a photo with the highest attention."""

import multiprocessing
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from listwise.data import DecodedPhoto, Decoding, Images, PhotoFile, decode_photos, whole_image
from listwise.data.pipeline import batch_by_shape
from listwise.local.delf.net import Delf, resize
from listwise.local.delf.settings import DelfSettings
from listwise.local.features import Features
from listwise.machine import Machine
from listwise.models.embed import BATCH_PIXELS

WINDOW = 2048  # photos that are grouped by shape at a time
SMALLEST = 64  # minimum short side of a level in pixels; smaller levels are mostly border
DEFAULT = DelfSettings()


def pyramid_sizes(
    width: int, height: int, settings: DelfSettings = DEFAULT
) -> list[tuple[int, int]]:
    """Return the widths and heights of the image pyramid, largest first; at least one."""
    sizes = [(max(1, round(width * s)), max(1, round(height * s))) for s in settings.scales]
    allowed = [size for size in sizes if max(size) <= settings.max_side] or sizes[-1:]
    return [size for size in allowed if min(size) >= SMALLEST] or allowed[:1]


class Locations(NamedTuple):
    """Locations of a photo, highest attention first: `places` [n, 3] and `features` [n, C].

    A place is x, y and scale. The scale is the distance between neighboring locations of its
    pyramid level, in pixels of the photo.
    """

    places: Tensor
    features: Tensor


@torch.inference_mode()
def find_locations(
    net: Delf, photos: Tensor, settings: DelfSettings = DEFAULT, autocast: torch.dtype | None = None
) -> list[Locations]:
    """Find the locations with the highest attention in photos of one shape: uint8 [B, 3, H, W]."""
    places, features, kept = _best_locations(net, photos, settings, autocast)
    return [
        Locations(where[chosen], what[chosen])
        for where, what, chosen in zip(places, features, kept, strict=True)
    ]


@torch.inference_mode()
def detect(
    net: Delf, photos: Tensor, settings: DelfSettings = DEFAULT, autocast: torch.dtype | None = None
) -> list[Features]:
    """Extract the features with the highest attention, photos of one shape: uint8 [B, 3, H, W]."""
    places, features, kept = _best_locations(net, photos, settings, autocast)
    descriptors = net.describe(features.flatten(0, 1)).view(*features.shape[:2], -1)
    # A single copy from the GPU: every copy waits for it.
    values = torch.cat([places, descriptors, kept[..., None]], dim=2).cpu().numpy()
    return [_features(rows[rows[:, -1] > 0, :-1]) for rows in values]


def _best_locations(
    net: Delf, photos: Tensor, settings: DelfSettings, autocast: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return places [B, n, 3], features [B, n, C] and whether the attention is above 0 [B, n]."""
    height, width = photos.shape[2:]
    scores, features, places = [], [], []
    for columns, rows in pyramid_sizes(width, height, settings):
        with torch.autocast(photos.device.type, dtype=autocast, enabled=autocast is not None):
            level = net.features(resize(photos, (rows, columns)))
            scores.append(net.scores(level).float().flatten(1))
        features.append(level.flatten(2).transpose(1, 2))
        zoom = torch.tensor([width / columns, height / rows], device=photos.device)
        places.append(_level_locations(level.shape[2], level.shape[3], net.stride, zoom))
    everything, everywhere = torch.cat(features, dim=1), torch.cat(places)
    count = min(settings.count, everything.shape[1])
    best, chosen = torch.cat(scores, dim=1).topk(count, dim=1)
    picked = everything.gather(1, chosen[..., None].expand(-1, -1, everything.shape[2]))
    return everywhere[chosen], picked, best > 0


@dataclass(frozen=True)
class DelfExtractor:
    """Extractor of deep local features with the network in a folder; it can be pickled.

    Args:
        folder: folder that `listwise local train` wrote.
        settings: number of features, image pyramid and photo size.
        device: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
        bfloat16: run the network in bfloat16; by default on a GPU that supports it.
    """

    folder: str | Path
    settings: DelfSettings = DEFAULT
    device: str = "auto"
    bfloat16: bool | None = None

    @property
    def net(self) -> Delf:
        """The network; loaded once per process."""
        return _load(Path(self.folder), Machine.detect(self.device).device)[0]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the network."""
        return _load(Path(self.folder), Machine.detect(self.device).device)[1]

    @property
    def name(self) -> str:
        """Name of the extractor: the network and the settings."""
        scales = ",".join(f"{scale:.3g}" for scale in self.settings.scales)
        return (
            f"delf-{self.fingerprint[:16]}-{self.settings.count}"
            f"-side{self.settings.max_side}-scales{scales}"
        )

    @property
    def dim(self) -> int:
        """Dimensions D of a descriptor."""
        return self.net.config.dim

    def __call__(self, file: PhotoFile) -> Features:
        """Extract the features of a photo or of its box, in pixels of the upright whole photo."""
        photo = file.decode(decoding(self.settings))
        return self._detect([photo], photo.pixels[None])[0]

    def features(self, photo: Image.Image) -> Features:
        """Extract the features of an upright photo."""
        pixels = whole_image(photo.convert("RGB"), self.settings.max_side)
        return self._detect([DecodedPhoto(pixels, photo.size, photo.size)], pixels[None])[0]

    @property
    def prefers_batches(self) -> bool:
        """Whether `extract_many` is faster than one process per core: on a GPU."""
        return Machine.detect(self.device).device.startswith("cuda")

    def extract_many(
        self, images: Images, indices: Sequence[int], workers: int | None = None
    ) -> Generator[tuple[int, int, Features] | str, None, None]:
        """Yield width, height and features, or an error, of each photo at these positions.

        `workers` is the number of processes that decode; by default it depends on the cores.
        """
        count = Machine.detect(self.device).workers() if workers is None else workers
        files = [images.file(index) for index in indices]
        with closing(decode_photos(files, decoding(self.settings), count)) as photos:
            for start in range(0, len(indices), WINDOW):
                window = islice(photos, min(WINDOW, len(indices) - start))
                found: dict[int, tuple[int, int, Features] | str] = {}
                for batch in batch_by_shape(window, self._batch_size):
                    found.update(batch.errors)
                    features = self._detect(batch.photos, batch.pixels)
                    for position, photo, each in zip(
                        batch.positions, batch.photos, features, strict=True
                    ):
                        found[position] = (*photo.whole, each)
                yield from (found.pop(position) for position in sorted(found))

    def _batch_size(self, width: int, height: int) -> int:
        """Return the batch size for photos of this size."""
        return photos_at_once(width, height, self.settings, self.net.mean.device)

    def _detect(self, photos: Sequence[DecodedPhoto], pixels: Tensor) -> list[Features]:
        """Extract features of `pixels` uint8 [B, 3, H, W], each in pixels of its whole photo."""
        if not photos:
            return []
        device = self.net.mean.device
        half = Machine.detect(str(device)).bfloat16 if self.bfloat16 is None else self.bfloat16
        found = detect(self.net, pixels.to(device), self.settings, torch.bfloat16 if half else None)
        return [
            # Large JPEG files are decoded at a fraction of their size.
            each.scaled(photo.size[0] / pixels.shape[3]).moved(*photo.corner)
            for photo, each in zip(photos, found, strict=True)
        ]


def decoding(settings: DelfSettings) -> Decoding:
    """Return how photos are decoded: large JPEG files at a fraction of their size."""
    return Decoding(settings.max_side, min_side=settings.max_side)


def photos_at_once(width: int, height: int, settings: DelfSettings, device: torch.device) -> int:
    """Return how many photos of this size keep a device busy and fit into its memory."""
    columns, rows = pyramid_sizes(width, height, settings)[0]
    return max(1, BATCH_PIXELS[device.type] // (columns * rows))


@lru_cache(maxsize=2)
def _load(folder: Path, device: str) -> tuple[Delf, str]:
    """Load the network of a folder; returns it and its fingerprint."""
    if multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)  # a worker process has one core
    net = Delf.load(folder, device)
    return net, net.fingerprint()


def _level_locations(rows: int, columns: int, stride: int, zoom: Tensor) -> Tensor:
    """Return x, y and scale of all locations of a level, row by row: [rows · columns, 3].

    Values are in pixels of the photo, which is `zoom` [2] times larger than the level.
    """
    y, x = (torch.arange(side, device=zoom.device) for side in (rows, columns))
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1).reshape(-1, 2)
    # Kernels and padding are symmetric: location 0 is centered on the first pixel.
    points = (stride * grid + 0.5) * zoom - 0.5
    return torch.cat([points, (stride * zoom.prod().sqrt()).expand(len(grid), 1)], dim=1)


def _features(rows: NDArray[np.float32]) -> Features:
    """Build features from rows of x, y, scale and descriptor: [n, 3 + D]; regions are circles."""
    shapes = np.broadcast_to(np.eye(2, dtype=np.float32), (len(rows), 2, 2))
    return Features(
        np.ascontiguousarray(rows[:, :2]),
        np.ascontiguousarray(rows[:, 2]),
        np.ascontiguousarray(shapes),
        np.ascontiguousarray(rows[:, 3:]),
    )
