"""Deep local features (DELF): the network, and the locations of a photo with most attention."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, JsonValue
from timm.models.resnet import ResNet
from torch import Tensor, nn

from listwise.data import DecodedPhoto, Decoding, Images, PhotoFile, decode_photos
from listwise.data.pipeline import batch_by_shape
from listwise.errors import InputError
from listwise.files import FileHeader
from listwise.local.features import Features
from listwise.machine import Machine
from listwise.models.backbone import check_backbone, create_backbone, feature_map
from listwise.models.embed import BATCH_PIXELS
from listwise.models.storage import MODEL_FILE, read_parts, state_digest, write_parts
from listwise.models.weights import fit_state

_STAGE = 3
SMALLEST = 64  # minimum short side of a level in pixels; smaller levels are mostly border


@dataclass(frozen=True)
class DelfSettings:
    """Settings of the extraction of deep local features.

    Photos with a long side above `max_side` are reduced to it. A scale is used if the long side of
    the scaled photo is at most `max_side`: a photo of 362 pixels is used at up to 724 pixels, one
    of 4000 at up to 1024, and both take about the same time.

    Attributes:
        count: maximum number of features per photo.
        scales: scales of the image pyramid, largest first; by default from 2 to 0.25 in steps of √2
            (Noh et al. 2017).
        max_side: maximum long side of a scaled photo, in pixels.
    """

    count: int = 1000
    scales: tuple[float, ...] = tuple(2.0 ** (half / 2) for half in range(2, -5, -1))
    max_side: int = 1024


DEFAULT = DelfSettings()


class DelfConfig(FileHeader):
    """Architecture and origin of a DELF network.

    Attributes:
        backbone: name of a ResNet of timm.
        hidden: channels between the two layers of the attention.
        dim: dimensions of a descriptor.
        mean: mean of the RGB channels, for images in [0, 1].
        std: standard deviation of the RGB channels.
        provenance: any information about the training.
    """

    model_config = ConfigDict(extra="forbid", frozen=False)

    kind: Literal["delf"] = "delf"
    backbone: str
    hidden: int
    dim: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    provenance: dict[str, JsonValue] = Field({})


class Delf(nn.Module):
    """A ResNet up to its third stage, an attention over its locations, and a PCA.

    Batch norm is frozen. Location (column, row) of a feature map is centered on the pixel
    (`stride` · column, `stride` · row).

    Args:
        config: the architecture.
        backbone: the ResNet of timm that `config` names, with its weights; its stages after the
            third are removed. Random weights by default.
    """

    mean: Tensor
    std: Tensor
    pca_mean: Tensor
    pca_projection: Tensor

    def __init__(self, config: DelfConfig, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        if backbone is None:
            check_backbone(config.backbone)
            backbone = create_backbone(config.backbone)
        self.backbone = resnet(backbone, config.backbone)
        self.backbone.layer4 = nn.Identity()
        self.channels = int(self.backbone.feature_info[_STAGE]["num_chs"])
        self.stride = int(self.backbone.feature_info[_STAGE]["reduction"])
        if config.dim > self.channels:
            raise InputError(
                f"`dim` is {config.dim}, but the local features of {config.backbone} have "
                f"{self.channels} dimensions: give {self.channels} or less"
            )
        self.attention = nn.Sequential(
            nn.Conv2d(self.channels, config.hidden, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(config.hidden, 1, 1),
            nn.Softplus(),
        )
        for name, values in (("mean", config.mean), ("std", config.std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)
        self.register_buffer("pca_mean", torch.zeros(self.channels))
        self.register_buffer("pca_projection", torch.eye(config.dim, self.channels))

    def features(self, images: Tensor) -> Tensor:
        """Compute dense features: [B, 3, H, W], float in [0, 1] -> [B, C, h, w]."""
        return feature_map(self.backbone, (images - self.mean) / self.std)

    def scores(self, features: Tensor) -> Tensor:
        """Compute the attention of each location, 0 or more: [B, C, h, w] -> [B, h, w]."""
        scores: Tensor = self.attention(features)
        return scores[:, 0]

    def describe(self, features: Tensor) -> Tensor:
        """Compute the descriptors of locations: [n, C] -> [n, D], unit rows."""
        rows = F.normalize(features.float(), dim=1)
        return F.normalize((rows - self.pca_mean) @ self.pca_projection.T, dim=1)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the attention; the backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        return self

    def fingerprint(self) -> str:
        """Return the SHA-256 of architecture, preprocessing and weights."""
        fields = self.config.model_dump(exclude={"provenance", *FileHeader.model_fields})
        return state_digest(fields, self.state_dict())

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` to a folder, atomically."""
        write_parts(Path(folder) / MODEL_FILE, self.config, self.state_dict())

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> Self:
        """Load a network in evaluation mode; no code in the folder is executed."""
        path = Path(folder) / MODEL_FILE
        config, state = read_parts(path, DelfConfig, "DELF network")
        net = cls(config)
        fit_state(net, state, f"the weights in {path} do not fit its settings")
        # Convolutions are faster with channels last, also on CPUs.
        return net.to(device).to(memory_format=torch.channels_last).eval()


def resize(photos: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize photos to (height, width): uint8 [B, 3, H, W] -> float in [0, 1] [B, 3, h, w]."""
    pixels = photos.contiguous(memory_format=torch.channels_last).float() / 255
    if pixels.shape[2:] == size:
        return pixels
    return F.interpolate(pixels, size, mode="bilinear", align_corners=False, antialias=True)


def resnet(backbone: nn.Module, name: str) -> ResNet:
    """Return the backbone if it is a ResNet of timm; raise an error otherwise."""
    if not isinstance(backbone, ResNet):
        raise InputError(
            f"{name} is not a ResNet of timm, which deep local features need: "
            "give resnet50, resnet101 or another ResNet as `backbone`"
        )
    return backbone


def pyramid_sizes(
    width: int, height: int, settings: DelfSettings = DEFAULT
) -> list[tuple[int, int]]:
    """Return the widths and heights of the image pyramid, largest first; at least one."""
    sizes = [(max(1, round(width * s)), max(1, round(height * s))) for s in settings.scales]
    allowed = [size for size in sizes if max(size) <= settings.max_side] or sizes[-1:]
    return [size for size in allowed if min(size) >= SMALLEST] or allowed[:1]


class Locations(NamedTuple):
    """Locations of B photos of one shape, highest attention first.

    Shapes: `places` [B, n, 3], `features` [B, n, C], and `kept` bool [B, n], whether the attention
    is above 0. A place is x, y and scale. The scale is the distance between neighboring locations
    of its pyramid level, in pixels of the photo.
    """

    places: Tensor
    features: Tensor
    kept: Tensor


@torch.inference_mode()
def detect(
    net: Delf, photos: Tensor, settings: DelfSettings = DEFAULT, autocast: torch.dtype | None = None
) -> list[Features]:
    """Extract the features with the highest attention, photos of one shape: uint8 [B, 3, H, W]."""
    places, features, kept = find_locations(net, photos, settings, autocast)
    descriptors = net.describe(features.flatten(0, 1)).view(*features.shape[:2], -1)
    # A single copy from the GPU: every copy waits for it.
    values = torch.cat([places, descriptors, kept[..., None]], dim=2).cpu().numpy()
    return [_features(rows[rows[:, -1] > 0, :-1]) for rows in values]


@torch.inference_mode()
def find_locations(
    net: Delf, photos: Tensor, settings: DelfSettings = DEFAULT, autocast: torch.dtype | None = None
) -> Locations:
    """Find the locations with the highest attention in photos of one shape: uint8 [B, 3, H, W]."""
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
    return Locations(everywhere[chosen], picked, best > 0)


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
    def name(self) -> str:
        """Name of the extractor: the network and the settings."""
        scales = ",".join(f"{scale:.3g}" for scale in self.settings.scales)
        _, fingerprint = _load(Path(self.folder), Machine.detect(self.device).device)
        return (
            f"delf-{fingerprint[:16]}-{self.settings.count}"
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

    @property
    def on_gpu(self) -> bool:
        """Whether the network is on a GPU, where `extract_many` is faster than many processes."""
        return Machine.detect(self.device).device.startswith("cuda")

    def extract_many(
        self, images: Images, indices: Sequence[int], workers: int | None = None
    ) -> Generator[tuple[int, tuple[int, int, Features] | str], None, None]:
        """Yield the positions of photos, with width, height and features, or an error, of each.

        Photos of one shape come together. `workers` is the number of processes that decode; by
        default it depends on the cores.
        """
        count = Machine.detect(self.device).workers() if workers is None else workers
        files = [images.file(index) for index in indices]
        sizes = batch_sizes(self.settings, self.net.mean.device)
        with closing(decode_photos(files, decoding(self.settings), count)) as photos:
            for batch in batch_by_shape(photos, sizes):
                found: dict[int, tuple[int, int, Features] | str] = {**batch.errors}
                features = self._detect(batch.photos, batch.pixels)
                for position, photo, each in zip(
                    batch.positions, batch.photos, features, strict=True
                ):
                    found[position] = (*photo.whole, each)
                yield from ((indices[position], result) for position, result in found.items())

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


def batch_sizes(settings: DelfSettings, device: torch.device) -> Callable[[int, int], int]:
    """Return how many photos of a width and height keep a device busy and fit into its memory."""

    def count(width: int, height: int) -> int:
        largest = pyramid_sizes(width, height, settings)[0]
        return max(1, BATCH_PIXELS[device.type] // math.prod(largest))

    return count


@lru_cache(maxsize=2)
def _load(folder: Path, device: str) -> tuple[Delf, str]:
    """Load the network of a folder; returns it and its fingerprint."""
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
    shapes = np.broadcast_to(np.eye(2), (len(rows), 2, 2))
    arrays = (rows[:, :2], rows[:, 2], shapes, rows[:, 3:])
    return Features(*(np.ascontiguousarray(array, np.float32) for array in arrays))
