"""The loss that is trained: one that a config names, or any callable of descriptors and labels."""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.losses import (
    ContrastiveLoss,
    FastAPLoss,
    MultiSimilarityLoss,
    QuantizedAPLoss,
    SmoothAPLoss,
    TieAwareAPLoss,
    TripletLoss,
)
from listwise.losses.tuples import TupleLoss
from listwise.plugins import load_installed
from listwise.settings import TrainConfig

Loss = Callable[..., Tensor]
"""A callable of descriptors [B, C] and labels [B] that returns a scalar to minimise.

It may take two arguments more, by these names. `weights` [B] are the weights of the queries.
`queries` (start, stop) are rows of the batch: the loss then returns their share alone, and the
shares of a partition of the batch add up to the loss of the batch. Several processes need that.
"""


LOSSES: dict[str, Callable[[TrainConfig], Loss]] = {
    "ap": lambda config: QuantizedAPLoss(config.bins),
    "tie-aware": lambda config: TieAwareAPLoss(config.bins),
    "triplet": lambda config: of_mined_tuples(
        TripletLoss(config.triplet.margin, config.triplet.form), config.triplet.tuples
    ),
    "contrastive": lambda config: of_mined_tuples(
        ContrastiveLoss(config.contrastive.margin, config.contrastive.negatives),
        config.contrastive.tuples,
    ),
    "fastap": lambda config: FastAPLoss(),
    "smoothap": lambda config: SmoothAPLoss(),
    "multi-similarity": lambda config: MultiSimilarityLoss(),
}


def make_loss(config: TrainConfig) -> Loss:
    """The loss that a config names: built in, with its settings, or of an installed package."""
    if config.loss in LOSSES:
        return LOSSES[config.loss](config)
    found = load_installed("loss", config.loss)
    loss: Loss = found() if isinstance(found, type) else found
    return loss


def accepted_arguments(loss: Loss) -> frozenset[str]:
    """Which of `weights` and `queries` a loss takes, by its signature; it is not called."""
    if isinstance(loss, type):
        raise InputError(f"loss must be a callable, not a class: pass {loss.__name__}()")
    if not callable(loss):
        raise InputError(
            f"loss must be a callable of descriptors and labels, not {type(loss).__name__}"
        )
    bound = loss.keywords.keys() if isinstance(loss, partial) else ()
    if isinstance(loss, nn.Module):  # whose __call__ takes anything
        loss = loss.forward
    elif isinstance(loss, partial) and isinstance(loss.func, nn.Module):
        loss = partial(loss.func.forward, *loss.args, **loss.keywords)
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # a function that is not written in Python
        return frozenset()
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InputError(
            f"the loss cannot be called as loss(descriptors, labels): {error}"
        ) from None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name for name, parameter in signature.parameters.items() if parameter.kind in kinds}
    return frozenset({"weights", "queries"} & named.difference(bound))


def loss_module(loss: Loss) -> nn.Module:
    """The module that a loss is, with its parameters; an empty one for any other callable."""
    found = loss.func if isinstance(loss, partial) else loss
    return found if isinstance(found, nn.Module) else nn.Identity()


def check_processes(loss: Loss, processes: int) -> None:
    """Refuse a loss that several processes cannot share."""
    if processes > 1 and "queries" not in accepted_arguments(loss):
        raise InputError(
            f"this loss works on one process alone, and there are {processes}: for several, let it "
            "take queries=(start, stop) and return the share of those rows of the batch, so that "
            "the shares add up to the loss"
        )


def of_mined_tuples(loss: TupleLoss, count: int) -> Loss:
    """The loss of batches that hold so many tuples one after the other."""
    width = 2 + loss.negatives
    return partial(loss, tuples=torch.arange(count * width).view(count, width))
