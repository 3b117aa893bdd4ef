"""The weights of a run: how they start, and how updates change them.

A random projection would have to be learned from nothing, in few updates. The principal directions
of the pooled vectors are a better start: on landmark photos, the untrained network is already
better than with a random projection, and so is the trained one.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from listwise.data import Images
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.lora import add_lora
from listwise.settings import TrainConfig
from listwise.training.objective import Loss

PCA_PHOTOS = 4096  # maximum number of photos that are described
_POWER = 0.25  # of the variances that directions are divided by, as in the paper's whitening
_SHRINKAGE = 0.1  # part of the mean variance in each variance, also for directions without any
RATE_FACTOR: Final = "rate_factor"  # key of the factor of a group's learning rate
_AVERAGE: Final = "average"


class Teacher(Protocol):
    """The model to learn from; `listwise.descriptors.Model` is one."""

    @property
    def dim(self) -> int:
        """Number of dimensions of a descriptor."""

    @property
    def fingerprint(self) -> str:
        """Identifies network and whitening."""

    def describe(self, images: Images, *, on_progress: Callable[[int], object]) -> Any:
        """Return the descriptors [n, dim] of the photos that can be read, and their positions."""


@dataclass(frozen=True)
class OwnParts:
    """The objects that a user gave as settings; the config has their names.

    Attributes:
        loss: the loss.
        modules: the backbone and the pooling, where they were given.
        teacher: the model to learn from.
    """

    loss: Loss | None = None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    teacher: Teacher | None = None


def make_net(config: TrainConfig, modules: Mapping[str, nn.Module]) -> RetrievalNet:
    """Create the network of a run with its initial weights; `modules` are those of `OwnParts`."""
    net = RetrievalNet(
        modules.get("backbone", config.backbone),
        modules.get("pooling", config.pooling),
        config.projection,
        config.weights,
        # A PCA, as which the projection starts, is learned from unit vectors.
        normalize_pooled=config.projection is not None and not config.teacher,
    )
    if config.lora:
        add_lora(net, config.lora, config.lora_alpha)
    return net


def half_precision(config: TrainConfig) -> torch.dtype | None:
    """Return the dtype for autocast; None without it."""
    return torch.bfloat16 if config.precision == "bfloat16" else None


def start_projection(layer: nn.Linear, vectors: Tensor) -> bool:
    """Set a layer to the principal directions of vectors, divided by their variance^0.25.

    Args:
        layer: from C to D dimensions.
        vectors: unit vectors that the layer gets as its input: [n, C].

    Returns:
        Whether the layer was changed: it is not if D is larger than C, or if n is less than two.
    """
    dim, width = layer.weight.shape
    if dim > width or len(vectors) < 2:
        return False
    rows = vectors.double()
    mean = rows.mean(dim=0)
    rows = rows - mean
    variances, directions = torch.linalg.eigh(rows.T @ rows / len(rows))
    variances = (1 - _SHRINKAGE) * variances.clamp(min=0) + _SHRINKAGE * variances.mean()
    if not variances.mean() > 0:
        return False
    weight = (directions * variances**-_POWER).T.flip(0)[:dim]
    # The same size of the weights as at a random start, so that the learning rate suits them.
    weight = weight / (weight.std() * math.sqrt(3 * width))
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(-(weight @ mean))
    return True


def make_optimizer(config: TrainConfig, net: nn.Module, loss: nn.Module) -> torch.optim.Adam:
    """Create Adam for the parameters of a network and of its loss."""
    groups = layer_groups(net, config.layer_decay)
    of_loss = list(loss.parameters())
    if of_loss:
        groups.append({"params": of_loss, RATE_FACTOR: config.rate_factor})
    fused = next(net.parameters()).is_cuda  # one kernel for all parameters
    return torch.optim.Adam(
        groups, lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused
    )


def set_learning_rate(config: TrainConfig, optimizer: torch.optim.Optimizer, update: int) -> float:
    """Decrease the learning rate linearly to zero (section 4.2), after a linear warm-up."""
    rate = config.learning_rate * (1 - update / config.updates)
    rate *= min(1.0, (update + 1) / (config.warmup + 1))
    for group in optimizer.param_groups:
        group["lr"] = rate * group[RATE_FACTOR]
    return rate


def layer_groups(net: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Divide the parameters of a network into groups for an optimizer.

    The last layer of the backbone, the pooling and the projection have the full learning rate. Each
    layer before has `decay` times the rate of the next one. Layers are those of timm: the blocks of
    a transformer, or of the stages of a convolutional network.

    Args:
        net: the network; its backbone must be a timm model unless `decay` is 1.
        decay: from 0 to 1; 1 puts all parameters into one group.

    Returns:
        Groups with `params` and `rate_factor`, from the first layer to the last.
    """
    if decay == 1:
        return [{"params": list(net.parameters()), RATE_FACTOR: 1.0}]
    backbone: Any = getattr(net, "backbone", None)
    if not isinstance(net, RetrievalNet) or not hasattr(backbone, "group_matcher"):
        raise InputError(
            "`layer_decay` needs a timm backbone, which knows the order of its layers: leave it out"
        )
    groups = [
        {"params": group["params"], RATE_FACTOR: group["lr_scale"]}
        for group in param_groups_layer_decay(backbone, layer_decay=decay)
    ]
    others = [p for name, p in net.named_parameters() if not name.startswith("backbone.")]
    return [*groups, {"params": others, RATE_FACTOR: 1.0}]


class WeightAverage:
    """An exponential moving average (EMA) of the weights that an optimizer trains.

    The average of a weight is part of its state in the optimizer, so a checkpoint of the optimizer
    has it.

    Args:
        net: the network.
        optimizer: the optimizer of its weights.
        decay: share of the average that an update keeps, from 0 to 1. The first updates keep less,
            because the average starts with the weights after the first of them.
    """

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._net, self._optimizer, self._decay = net, optimizer, decay

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Add the weights after an update, counted from 0, to the average."""
        share = 1 - min(self._decay, (1 + update) / (10 + update))
        for weight in self._net.parameters():
            state = self._optimizer.state.get(weight)
            if state:  # else it has no gradient and does not change
                if _AVERAGE not in state:
                    state[_AVERAGE] = weight.detach().clone()
                state[_AVERAGE].lerp_(weight.detach(), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the network its average weights inside this context."""
        kept: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for weight in self._net.parameters():
                average = self._optimizer.state.get(weight, {}).get(_AVERAGE)
                if average is not None:
                    kept.append((weight, weight.detach().clone()))
                    weight.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for trained, value in kept:
                    trained.copy_(value)
