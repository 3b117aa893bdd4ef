"""Layer-wise learning rates: layers near the image learn more slowly than the last ones."""

from typing import Any, Final

from timm.models import group_parameters

from listwise.errors import InputError
from listwise.models import RetrievalNet

RATE_FACTOR: Final = "rate_factor"  # key of the factor of a group's learning rate


def layer_groups(net: RetrievalNet, decay: float) -> list[dict[str, Any]]:
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
    matcher: Any = getattr(net.backbone, "group_matcher", None)
    if matcher is None:
        raise InputError(
            "`layer_decay` needs a timm backbone, which knows the order of its layers: leave it out"
        )
    layers: dict[str, int] = group_parameters(net.backbone, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    groups: dict[int, list[Any]] = {}
    for name, parameter in net.named_parameters():
        layer = layers.get(name.removeprefix("backbone."), last)
        groups.setdefault(layer, []).append(parameter)
    return [
        {"params": groups[layer], RATE_FACTOR: decay ** (last - layer)} for layer in sorted(groups)
    ]
