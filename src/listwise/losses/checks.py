"""Check the input of the losses, with one error message per mistake."""

from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.autograd import forward_ad

from listwise.errors import InputError
from listwise.losses.tiles import accumulation_dtype

# Rounding to bfloat16 changes the length by up to 2⁻⁸; missing normalization by far more.
UNIT_TOLERANCE = 0.01


def check_bins(bins: SupportsIndex) -> int:
    """Check the number of bins, and return it."""
    return check_count("bins", bins, 2)


def check_count(name: str, value: SupportsIndex, least: int, other: str = "") -> int:
    """Check a whole number of any type, such as NumPy's, and return it as an int."""
    try:
        count = index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise InputError(f"{name} must be a whole number of at least {least}{other}, not {value!r}")
    return count


def check_labels(labels: Tensor) -> None:
    """Check that labels are integers [B]."""
    if not isinstance(labels, Tensor) or labels.dim() != 1:
        raise InputError(f"labels must be a tensor [B], not {_shape(labels)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(f"labels must be integers, one class number per image, not {labels.dtype}")


def check_batch(descriptors: Tensor, labels: Tensor, least: int = 2) -> None:
    """Check shapes, types, finite values and unit length of a batch: [B, C] and [B]."""
    check_shapes(descriptors, labels, least)
    check_unit(descriptors)


def check_references(
    descriptors: Tensor, references: Tensor | None, reference_labels: Tensor | None
) -> None:
    """Check references [N, C] and their labels [N], if given, for a batch [B, C]."""
    if references is None and reference_labels is None:
        return
    if references is None or reference_labels is None:
        missing = "references" if references is None else "reference_labels"
        raise InputError(f"give both `references` and `reference_labels`: {missing} is missing")
    if not isinstance(references, Tensor) or references.dim() != 2:
        raise InputError(f"references must be a tensor [N, C], not {_shape(references)}")
    if references.shape[1] != descriptors.shape[1] or references.dtype != descriptors.dtype:
        raise InputError(
            f"references are {_shape(references)} {references.dtype} but descriptors are "
            f"{_shape(descriptors)} {descriptors.dtype}: give both the same dimension and type"
        )
    check_labels(reference_labels)
    if len(references) != len(reference_labels) or len(references) == 0:
        raise InputError(
            f"{len(references)} references but {len(reference_labels)} reference_labels: give one "
            "label per reference, and at least one reference"
        )
    if {references.device, reference_labels.device} != {descriptors.device}:
        raise InputError(
            f"descriptors are on {descriptors.device}, references on {references.device} and "
            f"reference_labels on {reference_labels.device}: move all to {descriptors.device}"
        )
    check_unit(references, "references")


def check_unit(descriptors: Tensor, name: str = "descriptors") -> None:
    """Check that descriptors are finite and have unit length."""
    norms = torch.linalg.vector_norm(
        descriptors.detach(), dim=1, dtype=accumulation_dtype(descriptors.dtype)
    )
    check_lengths((norms - 1).abs().max().item(), name)


def check_shapes(descriptors: Tensor, labels: Tensor, least: int = 2) -> None:
    """Check shapes and types of a batch, [B, C] and [B], but not its values."""
    if not isinstance(descriptors, Tensor) or descriptors.dim() != 2:
        raise InputError(f"descriptors must be a tensor [B, C], not {_shape(descriptors)}")
    if not descriptors.is_floating_point():
        raise InputError(f"descriptors must be floating-point, not {descriptors.dtype}")
    check_labels(labels)
    if len(labels) != len(descriptors):
        raise InputError(
            f"{len(descriptors)} descriptors but {len(labels)} labels: give one label per image"
        )
    if labels.device != descriptors.device:
        raise InputError(
            f"descriptors are on {descriptors.device} but labels on {labels.device}: "
            f"move the labels to {descriptors.device}"
        )
    if len(descriptors) < least:
        raise InputError("a batch needs at least two images: a query and an image to rank")


def check_lengths(worst: float, name: str = "descriptors") -> None:
    """Raise an `InputError` if the largest difference of a length from 1 is too large."""
    if worst != worst or worst == float("inf"):
        raise InputError(
            f"{name} contain NaN or infinite values: check the network that computed them"
        )
    if worst > UNIT_TOLERANCE:
        raise InputError(
            f"{name} must have unit length (one is off by {worst:.3g}): "
            f"pass torch.nn.functional.normalize({name})"
        )


def check_scores(scores: Tensor, relevance: Tensor) -> Tensor:
    """Check scores in [−1, 1] and their relevance, both [Q, N]; return the relevance as bool."""
    for name, tensor in (("scores", scores), ("relevance", relevance)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            raise InputError(f"{name} must be a tensor [Q, N], not {_shape(tensor)}")
    if scores.shape != relevance.shape:
        raise InputError(
            f"scores are {_shape(scores)} but relevance is {_shape(relevance)}: "
            "give both the same shape"
        )
    if scores.numel() == 0:
        raise InputError(f"scores are {_shape(scores)}: give at least one query and one image")
    if not scores.is_floating_point():
        raise InputError(f"scores must be floating-point, not {scores.dtype}")
    low, high = (bound.item() for bound in scores.detach().aminmax())
    if not (low >= -1 - UNIT_TOLERANCE and high <= 1 + UNIT_TOLERANCE):
        raise InputError(
            f"scores must be cosine similarities in [-1, 1] without NaN, but range from {low:.4g} "
            f"to {high:.4g}: normalize the descriptors first"
        )
    if relevance.dtype == torch.bool:
        return relevance
    relevant = relevance == 1
    if not (relevant | (relevance == 0)).all():
        raise InputError("relevance must be 0 or 1 (or bool) for every score")
    return relevant


def check_weight_shape(weights: Tensor, size: int) -> None:
    """Check that there is one weight per image, [B], but not their values."""
    if not isinstance(weights, Tensor) or weights.shape != (size,):
        raise InputError(f"weights must be a tensor [{size}], one per image, not {_shape(weights)}")


def check_weights(valid: bool) -> None:
    """Raise an `InputError` unless all weights are finite and not negative."""
    if not valid:
        raise InputError("weights must be finite and not negative")


def check_forward_mode(tensor: Tensor) -> None:
    """Raise an `InputError` if a tensor has a tangent, which the operators would drop."""
    if torch.compiler.is_compiling():
        return
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise InputError(
            "the average precision losses have no forward-mode derivative (torch.func.jvp, dual "
            "numbers): use backward(), torch.autograd.grad, torch.func.grad or torch.func.vjp"
        )


def check_positives(total: float, within_batch: bool = True) -> None:
    """Raise an `InputError` if the queries that have a positive have no weight in total."""
    if not total > 0 and not within_batch:
        raise InputError(
            "no query has a positive: no reference has the label of a query (or its weight is "
            "zero); give references of the same classes"
        )
    if not total > 0:
        raise InputError(
            "no query has a positive: every class of this batch has a single image "
            "(or a weight of zero); sample at least two images of some class"
        )


def check_queries(queries: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """Check the rows (start, stop) of the queries, and return them; all rows by default."""
    start, stop = queries or (0, size)
    if not 0 <= start < stop <= size:
        raise InputError(f"queries must be rows (start, stop) of {size} images, not {queries}")
    return start, stop


def query_weights(
    weights: Tensor | None, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Check the weights and return them; ones by default: [B]."""
    if weights is None:
        return torch.ones(size, dtype=dtype, device=device)
    check_weight_shape(weights, size)
    check_weights(bool((weights.isfinite() & (weights >= 0)).all()))
    return weights.to(device, dtype)


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
