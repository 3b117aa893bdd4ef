"""The training loss: one named in the settings, or any callable of descriptors and labels.

A cross-batch memory (Wang et al., CVPR 2020) gives it descriptors of earlier batches as references.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.losses import (
    ContrastiveLoss,
    FastAPLoss,
    HierarchicalAPLoss,
    InfoNCELoss,
    MatryoshkaLoss,
    MultiSimilarityLoss,
    ProxyAnchorLoss,
    QuantizedAPLoss,
    RecallAtKLoss,
    RoadmapLoss,
    SmoothAPLoss,
    TieAwareAPLoss,
    TripletLoss,
)
from listwise.losses.checks import check_count
from listwise.losses.tuples import TupleLoss
from listwise.plugins import load_installed
from listwise.settings import TrainConfig

Loss = Callable[..., Tensor]
"""A callable of descriptors [B, C] and labels [B] that returns a scalar to minimize.

It may take two more arguments, with these names:

- `weights` [B]: the weights of the queries.
- `queries` (start, stop): rows of the batch. The loss then returns only the share of these queries.
  The shares of all rows of the batch must add up to its loss. Needed for several processes.
"""


# Name -> a function of the settings, the training classes and the dimension of a descriptor.
LOSSES: dict[str, Callable[[TrainConfig, Sequence[str], int], Loss]] = {
    "ap": lambda config, *_: QuantizedAPLoss(config.bins),
    "tie-aware": lambda config, *_: TieAwareAPLoss(config.bins),
    "triplet": lambda config, *_: bind_tuples(
        TripletLoss(config.triplet.margin, config.triplet.form), config.triplet.tuples
    ),
    "contrastive": lambda config, *_: bind_tuples(
        ContrastiveLoss(config.contrastive.margin, config.contrastive.negatives),
        config.contrastive.tuples,
    ),
    "fastap": lambda config, *_: FastAPLoss(),
    "smoothap": lambda config, *_: SmoothAPLoss(),
    "recall-at-k": lambda config, *_: RecallAtKLoss(virtual=config.recall_at_k.virtual),
    "infonce": lambda config, *_: InfoNCELoss(),
    "roadmap": lambda config, *_: RoadmapLoss(),
    "multi-similarity": lambda config, *_: MultiSimilarityLoss(),
    "proxy-anchor": lambda config, names, dim: ProxyAnchorLoss(
        len(names), dim, config.proxy_anchor.margin, config.proxy_anchor.scale
    ),
    "hierarchical-ap": lambda config, names, dim: HierarchicalAPLoss(
        _levels(names), dim, config.hierarchical_ap.alpha, config.hierarchical_ap.clustering
    ),
}


def make_loss(config: TrainConfig, class_names: Sequence[str] = ("a", "b"), dim: int = 1) -> Loss:
    """Create the loss that the settings name: a built-in one, or one of an installed package.

    Args:
        config: the settings.
        class_names: the training classes, for a loss with proxies or levels.
        dim: the number of dimensions of a descriptor, for a loss with proxies.
    """
    if config.loss in LOSSES:
        return LOSSES[config.loss](config, class_names, dim)
    found = load_installed("loss", config.loss)
    loss: Loss = found() if isinstance(found, type) else found
    return loss


def _levels(class_names: Sequence[str]) -> Tensor:
    from listwise.data.labelled import label_levels  # the step works without photos

    return torch.from_numpy(label_levels(class_names))


def with_lengths(loss: Loss, lengths: Sequence[int], dim: int) -> Loss:
    """Return a loss of descriptors [B, dim] that also trains their prefixes of these lengths."""
    if not lengths:
        return loss
    if max(lengths) > dim:
        raise InputError(
            f"`matryoshka` has the length {max(lengths)}, but descriptors have {dim} dimensions: "
            "give shorter lengths"
        )
    return MatryoshkaLoss(loss, [dim, *lengths])


def accepted_arguments(loss: Loss) -> frozenset[str]:
    """Return which of `weights` and `queries` a loss takes, without calling it."""
    if isinstance(loss, type):
        raise InputError(f"loss must be a callable, not a class: pass {loss.__name__}()")
    if not callable(loss):
        raise InputError(
            f"loss must be a callable of descriptors and labels, not {type(loss).__name__}"
        )
    if isinstance(loss, MatryoshkaLoss):
        return accepted_arguments(loss.loss)
    bound = loss.keywords.keys() if isinstance(loss, partial) else ()
    if isinstance(loss, nn.Module):  # its __call__ takes any arguments
        loss = loss.forward
    elif isinstance(loss, partial) and isinstance(loss.func, nn.Module):
        loss = partial(loss.func.forward, *loss.args, **loss.keywords)
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # a function without a Python signature
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
    """Return the module with the parameters of a loss; an empty module if it is a function."""
    found = loss.func if isinstance(loss, partial) else loss
    return found if isinstance(found, nn.Module) else nn.Identity()


def check_processes(loss: Loss, processes: int) -> None:
    """Raise an `InputError` if several processes cannot share a loss."""
    if processes > 1 and "queries" not in accepted_arguments(loss):
        raise InputError(
            f"this loss works in one process only, but there are {processes}: give it an argument "
            "queries=(start, stop) that makes it return the share of these rows of the batch; "
            "the shares must add up to the loss"
        )


def bind_tuples(loss: TupleLoss, count: int) -> Loss:
    """Return a loss for batches that consist of `count` tuples, one after the other."""
    width = 2 + loss.negatives
    return partial(loss, tuples=torch.arange(count * width).view(count, width))


class CrossBatchMemory:
    """Descriptors of the photos of earlier batches, which the queries of a batch rank too.

    The descriptors are those that the network computed in the update in which a photo was last
    seen, so they are slightly out of date. They get no gradient. Every photo is at most once in a
    ranked list: a photo that is in the batch has no copy from the memory in any list.

    Args:
        size: maximum number of photos; the photos seen longest ago are removed.
        warmup: number of updates at the start that add nothing, because the descriptors of a
            network that changes fast are out of date soon.

    Attributes:
        descriptors: [n, C] descriptors, the oldest first.
        labels: [n] their labels.
        photos: [n] the numbers of their photos.
        updates: the number of updates so far.

    Examples:
        >>> memory = CrossBatchMemory(size=3)
        >>> memory.add(torch.eye(2), torch.tensor([4, 5]), torch.tensor([0, 1]))
        >>> memory.references(torch.tensor([1]))[1]
        tensor([4])
    """

    def __init__(self, size: int, warmup: int = 0) -> None:
        self.size = check_count("size", size, 1)
        self.warmup = check_count("warmup", warmup, 0)
        self.updates = 0
        self.descriptors: Tensor | None = None
        self.labels = torch.empty(0, dtype=torch.int64)
        self.photos = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.photos)

    def references(self, photos: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return descriptors and labels of all photos in memory that are not in a batch.

        Args:
            photos: [B] the numbers of the photos of the batch.

        Returns:
            Descriptors [n, C], None if there are none, and labels [n].
        """
        if self.descriptors is None:
            return None, self.labels
        kept = ~torch.isin(self.photos, photos.to(self.photos.device))
        return self.descriptors[kept], self.labels[kept]

    def add(self, descriptors: Tensor, labels: Tensor, photos: Tensor) -> None:
        """Add the descriptors [B, C], labels [B] and photos [B] of an update."""
        self.updates += 1
        if self.updates <= self.warmup:
            return
        new, labels = descriptors.detach(), labels.to(descriptors.device)
        photos = photos.to(descriptors.device)
        # If a photo is in the batch twice, the last crop is kept.
        later = (photos[:, None] == photos).triu(1).any(1)
        new, labels, photos = new[~later], labels[~later], photos[~later]
        if self.descriptors is not None:  # on the CPU in a resumed run
            known = self.photos.to(photos.device)
            kept = ~torch.isin(known, photos)
            new = torch.cat([self.descriptors.to(new)[kept], new])
            labels = torch.cat([self.labels.to(labels)[kept], labels])
            photos = torch.cat([known[kept], photos])
        last = slice(max(0, len(photos) - self.size), None)
        self.descriptors, self.labels, self.photos = (
            new[last].clone(),
            labels[last].clone(),
            photos[last].clone(),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint."""
        tensors = {"updates": torch.tensor(self.updates)}
        if self.descriptors is not None:
            tensors["descriptors"] = self.descriptors
            tensors |= {"labels": self.labels, "photos": self.photos}
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `state_dict`."""
        self.updates = int(tensors["updates"])
        if "descriptors" in tensors:
            self.descriptors = tensors["descriptors"]
            self.labels, self.photos = tensors["labels"], tensors["photos"]
