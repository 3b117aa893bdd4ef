"""What the losses require of their input, with a sentence for each thing that is wrong."""

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses.tiles import accumulation_dtype

# Rows rounded to bfloat16 are off unit length by up to 2⁻⁸; forgotten normalisation by far more.
UNIT_TOLERANCE = 0.01


def check_bins(bins: int) -> int:
    """A number of bins that spans [−1, 1]."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 2:
        raise InputError(f"bins must be a whole number of at least 2, not {bins!r}")
    return bins


def check_labels(labels: Tensor) -> None:
    """[B] integers."""
    if not isinstance(labels, Tensor) or labels.dim() != 1:
        raise InputError(f"labels must be a tensor [B], not {_shape(labels)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels must be integers, one class number an image, not {labels.dtype}")


def check_batch(descriptors: Tensor, labels: Tensor) -> None:
    """Shapes, types, finiteness and unit length of a batch: [B, C] and [B]."""
    check_shapes(descriptors, labels)
    norms = torch.linalg.vector_norm(
        descriptors.detach(), dim=1, dtype=accumulation_dtype(descriptors.dtype)
    )
    refuse_lengths((norms - 1).abs().max().item())


def check_shapes(descriptors: Tensor, labels: Tensor) -> None:
    """Shapes and types of a batch, [B, C] and [B], without a look at the numbers."""
    if not isinstance(descriptors, Tensor) or descriptors.dim() != 2:
        raise InputError(f"descriptors must be a tensor [B, C], not {_shape(descriptors)}")
    if not descriptors.is_floating_point():
        raise InputError(f"descriptors must be floating-point, not {descriptors.dtype}")
    check_labels(labels)
    if len(labels) != len(descriptors):
        raise InputError(
            f"{len(descriptors)} descriptors but {len(labels)} labels: give one label an image"
        )
    if labels.device != descriptors.device:
        raise InputError(
            f"descriptors are on {descriptors.device} but labels on {labels.device}: "
            "move the labels there"
        )
    if len(descriptors) < 2:
        raise InputError("a batch needs at least two images: a query and one to rank")


def refuse_lengths(worst: float) -> None:
    """Raise if the length of some descriptor is that far from 1."""
    if worst != worst or worst == float("inf"):
        raise InputError("descriptors hold NaN or infinite values: look at what produced them")
    if worst > UNIT_TOLERANCE:
        raise InputError(
            f"descriptors must have unit length (one is off by {worst:.3g}): "
            "pass torch.nn.functional.normalize(descriptors)"
        )


def check_scores(scores: Tensor, relevance: Tensor) -> Tensor:
    """A score matrix in [−1, 1] and its relevance, which comes back as bool: [Q, N] both."""
    for name, tensor in (("scores", scores), ("relevance", relevance)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            raise InputError(f"{name} must be a tensor [Q, N], not {_shape(tensor)}")
    if scores.shape != relevance.shape:
        raise InputError(
            f"scores are {_shape(scores)} but relevance is {_shape(relevance)}: "
            "give one judgement a score"
        )
    if scores.numel() == 0:
        raise InputError(f"scores are {_shape(scores)}: give at least one query and one image")
    if not scores.is_floating_point():
        raise InputError(f"scores must be floating-point, not {scores.dtype}")
    low, high = (bound.item() for bound in scores.detach().aminmax())
    if not (low >= -1 - UNIT_TOLERANCE and high <= 1 + UNIT_TOLERANCE):
        raise InputError(
            f"scores must be cosine similarities in [-1, 1] without NaN, but range from {low:.4g} "
            f"to {high:.4g}: normalise the descriptors they are made from"
        )
    if relevance.dtype == torch.bool:
        return relevance
    relevant = relevance == 1
    if not (relevant | (relevance == 0)).all():
        raise InputError("relevance must be 0 or 1 (or bool) for every score")
    return relevant


def check_weight_shape(weights: Tensor, size: int) -> None:
    """One weight an image, without a look at the numbers: [B]."""
    if not isinstance(weights, Tensor) or weights.shape != (size,):
        raise InputError(f"weights must be a tensor [{size}], one an image, not {_shape(weights)}")


def refuse_weights(sound: bool) -> None:
    """Raise if some weight is not finite or below zero."""
    if not sound:
        raise InputError("weights must be finite and not negative")


def refuse_no_positives(total: float) -> None:
    """Raise if the queries that have a positive weigh nothing together."""
    if not total > 0:
        raise InputError(
            "no query has a positive: every class of this batch has a single image "
            "(or a weight of zero); sample at least two images of some class"
        )


def check_queries(queries: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """Rows (start, stop) of a batch; all of them by default."""
    start, stop = queries or (0, size)
    if not 0 <= start < stop <= size:
        raise InputError(f"queries must be rows (start, stop) of {size} images, not {queries}")
    return start, stop


def query_weights(
    weights: Tensor | None, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The weights given, checked, or ones: [B]."""
    if weights is None:
        return torch.ones(size, dtype=dtype, device=device)
    check_weight_shape(weights, size)
    refuse_weights(bool((weights.isfinite() & (weights >= 0)).all()))
    return weights.to(device, dtype)


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
