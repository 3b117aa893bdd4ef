"""The retrieval network: turns images into unit descriptors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from listwise.errors import InputError
from listwise.models.backbone import pooled_length, split_features
from listwise.models.pooling import POOLINGS, TOKEN_POOLINGS, make_pooling, pool
from listwise.models.storage import (
    ModelFile,
    ModelInfo,
    NetConfig,
    fingerprint,
    model_path,
    read_model,
    write_model,
)
from listwise.models.weights import fit_state, load_backbone
from listwise.plugins import CUSTOM, custom_name

_ALL_POOLINGS = POOLINGS | TOKEN_POOLINGS
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


class Network(nn.Module):
    """Maps images [B, 3, H, W] to unit descriptors [B, dim]: a `RetrievalNet`, or an ONNX file."""

    config: NetConfig
    dim: int
    mean: Tensor

    def fingerprint(self) -> str:
        """Return the SHA-256 of everything that descriptors depend on."""
        raise NotImplementedError


class RetrievalNet(Network):
    """A network that maps images [B, 3, H, W] to unit descriptors [B, dim].

    It consists of a backbone, a pooling, an optional projection, and L2 normalization. Images are
    uint8, or floating-point in [0, 1], of any size that the backbone takes; the network normalizes
    them with the mean and standard deviation of its backbone. Batch norm is frozen: it uses its
    running statistics in training too, while its scale and shift are learned.

    Args:
        backbone: the name of a timm model, or a module of your own that maps normalized images
            [B, 3, H, W] to a feature map [B, C, h, w].
        pooling: a name in `listwise.models.POOLINGS`, the name of a pooling in an installed
            package, or a module of your own that maps [B, C, h, w] to [B, D]. For transformers
            also "cls" (the class token) and "cls+gem" (the class token and GeM of the patches).
        projection: output dimensions of a linear layer after the pooling; by default there is no
            such layer.
        weights: a file, or one of "auto", "pretrained", "imagenet-package" and "random"
            (see `listwise.models.weights.load_backbone`); a module of your own keeps its weights.
        normalize_pooled: also L2-normalize between pooling and projection, as some released
            networks do.
        mean: the RGB mean of images in [0, 1]; by default that of the backbone's
            `pretrained_cfg`, or of ImageNet.
        std: the RGB standard deviation, with the same default.

    Attributes:
        dim: the length of the descriptors.
        config: the architecture and preprocessing, as saved with the weights.

    Examples:
        >>> net = RetrievalNet("resnet18", weights="random")
        >>> net(torch.zeros(2, 3, 97, 130, dtype=torch.uint8)).shape
        torch.Size([2, 512])
    """

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
            raise InputError(f"projection must be at least 1 dimension, not {projection}")
        names = {"backbone": _name("backbone", backbone), "pooling": _name("pooling", pooling)}
        self.pooling = make_pooling(pooling)
        self.backbone, source = load_backbone(backbone, weights)
        preprocessing = timm.data.resolve_model_data_config(self.backbone)
        side = preprocessing["input_size"][-1]
        known = POOLINGS if getattr(self.backbone, "cls_token", None) is None else _ALL_POOLINGS
        if isinstance(backbone, str) and pooling in known:
            features = int(self.backbone.num_features)  # type: ignore[arg-type]
            features *= 2 if pooling == "cls+gem" else 1
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
        for name, values in (("mean", self.config.mean), ("std", self.config.std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)
        # A module of the user may be on any device and in any precision.
        example = next(self.backbone.parameters(), None)
        if example is not None:
            self.to(device=example.device, dtype=example.dtype)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        """Compute descriptors: [B, 3, H, W], uint8 or float in [0, 1] -> [B, dim], unit rows."""
        return self.finish(pool(self.pooling, *self._split_features(images)))

    def finish(self, vectors: Tensor) -> Tensor:
        """Project and normalize pooled vectors: [..., C] -> [..., dim], unit length."""
        if self.config.normalize_pooled:
            vectors = F.normalize(vectors, dim=-1)
        if self.projection is not None:
            with torch.autocast(vectors.device.type, enabled=False):
                vectors = self.projection(vectors.to(self.mean.dtype))
        # Half precision has too few digits to distinguish neighbors.
        return F.normalize(vectors if vectors.dtype == torch.float64 else vectors.float(), dim=-1)

    def features(self, images: Tensor) -> Tensor:
        """Compute the feature map: [B, 3, H, W], uint8 or float in [0, 1] -> [B, C, h, w]."""
        return self._split_features(images)[0]

    def _split_features(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the feature map [B, C, h, w], and the class token [B, C] if there is one."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise InputError(f"images must be [B, 3, H, W], not {list(images.shape)}")
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        elif not images.is_floating_point():
            raise InputError(f"images must be uint8, or float in [0, 1], not {images.dtype}")
        return split_features(self.backbone, (images.to(self.mean.dtype) - self.mean) / self.std)

    def train(self, mode: bool = True) -> Self:
        """Set training mode for everything but batch norm, which stays frozen."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BATCH_NORMS):
                module.eval()
        return self

    def fingerprint(self) -> str:
        """Return the SHA-256 of everything that descriptors depend on.

        That is the architecture, the preprocessing and the weights.
        """
        return fingerprint(self.config, self.plain_state())

    def save(self, folder: str | Path) -> None:
        """Write `model.safetensors` to a folder, atomically; or a file with this ending."""
        write_model(folder, ModelFile(ModelInfo(network=self.config), self.plain_state()))

    def plain_state(self) -> dict[str, Tensor]:
        """Return the state dict, with low-rank changes merged into the weights.

        Other parametrizations belong to a module of the user, which needs their tensors as they
        are. See `listwise.models.lora`.
        """
        state = dict(self.state_dict())
        for name, module in self.named_modules():
            parametrized = getattr(module, "parametrizations", None)
            if not isinstance(parametrized, nn.ModuleDict):
                continue
            for tensor, changes in parametrized.items():
                if not all(getattr(each, "merged", False) for each in cast(nn.ModuleList, changes)):
                    continue
                prefix = f"{name}.parametrizations.{tensor}."
                state = {key: value for key, value in state.items() if not key.startswith(prefix)}
                state[f"{name}.{tensor}"] = getattr(module, tensor).detach()
        return state

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str | torch.device = "cpu",
        *,
        backbone: nn.Module | None = None,
        pooling: nn.Module | None = None,
    ) -> Self:
        """Load a saved network, in evaluation mode; no code in the folder is run.

        Args:
            folder: the folder or file that `save` wrote.
            device: where to put the network.
            backbone: your backbone module, if the network was created with one; its weights are
                replaced by the saved ones.
            pooling: your pooling module, if the network was created with one.
        """
        path = model_path(folder)
        net = cls.of_file(read_model(path), path, backbone=backbone, pooling=pooling)
        return net.to(device=device)

    @classmethod
    def of_file(
        cls,
        content: ModelFile,
        path: Path,
        *,
        backbone: nn.Module | None = None,
        pooling: nn.Module | None = None,
    ) -> Self:
        """Create the network of a file that was read from `path`; `backbone` as in `load`."""
        config, missing = content.info.network, []
        for kind, part in (("backbone", backbone), ("pooling", pooling)):
            recorded = getattr(config, kind)
            if part is not None and not recorded.startswith(CUSTOM):
                raise InputError(f"{path} has the {kind} {recorded!r}: do not pass a `{kind}`")
            if part is None and recorded.startswith(CUSTOM):
                missing.append((kind, recorded.removeprefix(CUSTOM)))
        if missing:
            made_of = " and ".join(f"a {kind} of your own, {name}" for kind, name in missing)
            how = ", ".join(f"{kind}={name.rpartition('.')[2]}()" for kind, name in missing)
            raise InputError(
                f"{path} has {made_of}: pass it again, as in RetrievalNet.load(folder, {how})"
            )
        failure = f"the weights in {path} do not fit its settings"
        state = dict(content.state)
        return cls.build(config, state, failure, backbone=backbone, pooling=pooling)

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
        """Create the network of a config with the weights of a state dict, in evaluation mode.

        If the two do not fit, raises an `InputError` whose message starts with `failure`.
        """
        with _NoInitialization():  # the weights are replaced below
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


class _NoInitialization(TorchFunctionMode):
    """Leaves new weights as they are in memory: random numbers take a while to draw."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))


def _name(kind: str, part: object) -> str:
    """Return the name of a backbone or pooling for the config."""
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
        raise InputError(f"{name} must be three numbers, one per color channel, not {list(values)}")
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def live_batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the batch norm layers that are not frozen."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None)
    ]
