"""The network: an image becomes a unit descriptor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from listwise.errors import InputError
from listwise.models.backbone import feature_map, pooled_length
from listwise.models.pooling import POOLINGS, make_pooling
from listwise.models.storage import NetConfig, fingerprint, read_network, write_network
from listwise.models.weights import fit_state, load_backbone
from listwise.plugins import CUSTOM, custom_name


class RetrievalNet(nn.Module):
    """Backbone → pooling → optional projection → L2: images [B, 3, H, W] -> [B, dim], unit rows.

    Images are uint8, or floating point in [0, 1]; the network normalises them itself with the
    mean and deviation of its backbone, and takes any size that the backbone takes. Batch norm is
    frozen: it uses its running statistics in training too, while its scale and shift are learned.

    Args:
        backbone: the name of a timm model, or a module of your own that maps normalised images
            [B, 3, H, W] to a feature map [B, C, h, w].
        pooling: one of `listwise.models.POOLINGS`, the name of one that an installed package
            brings, or a module of your own that maps [B, C, h, w] to [B, D].
        projection: output dimensions of a linear layer after the pooling; none by default.
        weights: a file, or one of "auto", "pretrained", "imagenet-package" and "random"
            (see `listwise.models.weights.load_backbone`); a module of your own keeps its weights.
        normalize_pooled: L2 between pooling and projection too, as some released networks have it.
        mean: of an RGB image in [0, 1]; what the backbone was trained with by default (its
            `pretrained_cfg`), or ImageNet's.
        std: as `mean`, the standard deviation.

    Example:
        >>> net = RetrievalNet("resnet18", weights="random")
        >>> net(torch.zeros(2, 3, 97, 130, dtype=torch.uint8)).shape
        torch.Size([2, 512])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: str | nn.Module = "resnet101",
        pooling: str | nn.Module = "gem",
        projection: int | None = None,
        weights: str | Path = "auto",
        normalize_pooled: bool = False,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if projection is not None and projection < 1:
            raise InputError(f"projection must be 1 or more dimensions, not {projection}")
        names = {"backbone": _name("backbone", backbone), "pooling": _name("pooling", pooling)}
        self.pooling = make_pooling(pooling)
        self.backbone, source = load_backbone(backbone, weights)
        preprocessing = timm.data.resolve_model_data_config(self.backbone)
        side = preprocessing["input_size"][-1]
        if isinstance(backbone, str) and pooling in POOLINGS:
            features = int(self.backbone.num_features)  # type: ignore[arg-type]
        else:
            self.eval()
            features = pooled_length(self.backbone, self.pooling, side)
        self.projection = nn.Linear(features, projection) if projection else None
        self.dim = projection or features
        self.config = NetConfig(
            **names,
            projection=projection,
            normalize_pooled=normalize_pooled,
            mean=_three("mean", mean or preprocessing["mean"]),
            std=_three("std", std or preprocessing["std"]),
            image_size=side,
            provenance={"weights": source, "timm": timm.__version__},
        )
        self._register_preprocessing()
        # A backbone of the user's own may be anywhere, and in any precision.
        example = next(self.backbone.parameters(), None)
        if example is not None:
            self.to(device=example.device, dtype=example.dtype)
        self.train()

    def _register_preprocessing(self) -> None:
        for name, values in (("mean", self.config.mean), ("std", self.config.std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Descriptors of images: [B, 3, H, W], uint8 or float in [0, 1] -> [B, dim], unit rows."""
        vectors = self.pooling(self.features(images))
        if self.config.normalize_pooled:
            vectors = F.normalize(vectors, dim=1)
        if self.projection is not None:
            with torch.autocast(vectors.device.type, enabled=False):
                vectors = self.projection(vectors.to(self.mean.dtype))
        # Half precision has too few digits to tell neighbours apart.
        return F.normalize(vectors if vectors.dtype == torch.float64 else vectors.float(), dim=1)

    def features(self, images: Tensor) -> Tensor:
        """The backbone's feature map: [B, 3, H, W], uint8 or float in [0, 1] -> [B, C, h, w]."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise InputError(f"images must be [B, 3, H, W], not {list(images.shape)}")
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        elif not images.is_floating_point():
            raise InputError(f"images must be uint8, or float in [0, 1], not {images.dtype}")
        return feature_map(self.backbone, (images.to(self.mean.dtype) - self.mean) / self.std)

    def train(self, mode: bool = True) -> Self:
        """Set training mode for everything but batch norm, which stays frozen."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def fingerprint(self) -> str:
        """SHA-256 of architecture, preprocessing and weights: equal if the descriptors must be."""
        return fingerprint(self.config, self.state_dict())

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` and `config.json` into `folder`, each of them atomically."""
        write_network(Path(folder), self.config, self.state_dict())

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str | torch.device = "cpu",
        *,
        backbone: nn.Module | None = None,
        pooling: nn.Module | None = None,
    ) -> Self:
        """Open a saved folder, in evaluation mode; nothing in it is executed.

        A network that was made with a backbone or pooling of your own needs that module again; its
        weights are replaced by those of the folder.
        """
        config, state = read_network(Path(folder))
        missing = []
        for kind, part in (("backbone", backbone), ("pooling", pooling)):
            recorded = getattr(config, kind)
            if part is not None and not recorded.startswith(CUSTOM):
                raise InputError(f"{folder} has the {kind} {recorded!r}: pass no {kind} of yours")
            if part is None and recorded.startswith(CUSTOM):
                missing.append((kind, recorded.removeprefix(CUSTOM)))
        if missing:
            made_of = " and ".join(f"a {kind} of your own, {name}" for kind, name in missing)
            how = ", ".join(f"{kind}={name.rpartition('.')[2]}()" for kind, name in missing)
            raise InputError(
                f"{folder} has {made_of}: pass it again, as in RetrievalNet.load(folder, {how})"
            )
        failure = f"{folder} does not fit its own config.json"
        net = cls.build(config, state, failure, backbone=backbone, pooling=pooling)
        return net.to(device=device)

    @classmethod
    def build(
        cls,
        config: NetConfig,
        state: dict[str, Tensor],
        failure: str,
        *,
        backbone: nn.Module | None = None,
        pooling: nn.Module | None = None,
    ) -> Self:
        """The network that `config` describes with the weights of `state`, in evaluation mode.

        `failure` opens the message of the `InputError` if the two do not fit.
        """
        net = cls(
            backbone or config.backbone,
            pooling or config.pooling,
            config.projection,
            weights="auto" if backbone else "random",
            normalize_pooled=config.normalize_pooled,
            mean=config.mean,
            std=config.std,
        )
        net.config = config
        net.to(dtype=next((t.dtype for t in state.values() if t.is_floating_point()), None))
        fit_state(net, state, failure)
        return net.eval()


def _name(kind: str, part: object) -> str:
    """What the config records of a backbone or pooling."""
    if isinstance(part, str):
        return part
    if isinstance(part, nn.Module):
        return custom_name(part)
    what = type(part).__name__
    if isinstance(part, type):
        what = f"a class: pass {part.__name__}()"
    raise InputError(f"{kind} must be a name or an nn.Module, not {what}")


def _three(name: str, values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) != 3:
        raise InputError(f"{name} must be three numbers, one a colour, not {list(values)}")
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def live_batch_norms(module: nn.Module) -> list[str]:
    """Names of the batch norms that would mix the images of a batch: those not frozen."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    ]
