"""The DELF network: dense features, and an attention score for each location."""

from pathlib import Path
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, JsonValue
from timm.models.resnet import ResNet
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.files import write_tensors, write_text
from listwise.models.backbone import check_backbone, create_backbone, feature_map
from listwise.models.storage import (
    CONFIG_FILE,
    FINGERPRINT,
    FORMAT_VERSION,
    WEIGHTS_FILE,
    check_fingerprint,
    read_config,
    read_weights,
    state_digest,
)
from listwise.models.weights import fit_state

_STAGE = 3


class DelfConfig(BaseModel):
    """Architecture and origin of a DELF network.

    Attributes:
        backbone: name of a ResNet of timm.
        hidden: channels between the two layers of the attention.
        dim: dimensions of a descriptor.
        mean: mean of the RGB channels, for images in [0, 1].
        std: standard deviation of the RGB channels.
        provenance: any information about the training.
    """

    model_config = ConfigDict(extra="forbid")

    format_version: int = FORMAT_VERSION
    kind: Literal["delf"] = "delf"
    backbone: str
    hidden: int
    dim: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    provenance: dict[str, JsonValue] = {}


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
        fields = self.config.model_dump(exclude={"provenance", "format_version"})
        return state_digest(fields, self.state_dict())

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.json`, each atomically, the config last."""
        folder = Path(folder)
        fingerprint = {FINGERPRINT: self.fingerprint()}
        write_tensors(folder / WEIGHTS_FILE, self.state_dict(), fingerprint)
        write_text(folder / CONFIG_FILE, self.config.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> Self:
        """Load a network in evaluation mode; no code in the folder is executed."""
        folder = Path(folder)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise InputError(
                    f"{folder} is not a DELF network: expected {name}; "
                    "give the folder that listwise local train wrote"
                )
        net = cls(read_config(folder / CONFIG_FILE, DelfConfig, "DELF network"))
        state, saved = read_weights(folder / WEIGHTS_FILE)
        fit_state(net, state, f"the weights in {folder} do not fit its config.json")
        check_fingerprint(folder, saved, net.fingerprint())
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
