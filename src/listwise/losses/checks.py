"""Check the input of the losses, with one error message per mistake."""

import math
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses.lists import accumulation_dtype

# Rounding to bfloat16 changes the length by up to 2⁻⁸; missing normalization by far more.
UNIT_TOLERANCE = 0.01


def check_count(name: str, value: SupportsIndex, least: int, other: str = "") -> int:
    """Check a whole number of any type, such as NumPy's, and return it as an int."""
    try:
        count = index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise InputError(f"{name} must be a whole number of at least {least}{other}, not {value!r}")
    return count


def check_above_zero(name: str, value: float) -> None:
    """Check that a number is above zero."""
    if not value > 0:
        raise InputError(f"{name} must be above zero, not {value}")


def check_range(name: str, value: float, most: float = math.inf) -> None:
    """Check that a number is at least zero, and at most `most`."""
    if not 0 <= value <= most:
        allowed = "at least zero" if most == math.inf else f"from 0 to {most}"
        raise InputError(f"{name} must be {allowed}, not {value}")


def check_integers(name: str, values: Tensor) -> None:
    """Check that a tensor has integers."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise InputError(f"{name} must be integers, not {values.dtype}")


def check_labels(labels: Tensor, name: str = "labels") -> None:
    """Check that labels are integers [B]."""
    if not isinstance(labels, Tensor) or labels.dim() != 1:
        raise InputError(f"{name} must be a tensor [B], not {_shape(labels)}")
    check_integers(name, labels)


def check_label_range(labels: Tensor, count: int) -> None:
    """Check that labels are from 0 to count - 1."""
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= count:
        raise InputError(f"labels must be from 0 to {count - 1}, but range from {low} to {high}")


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
    check_shapes(references, reference_labels, 1, ("references", "reference_labels"))
    kinds = [(rows.shape[1], rows.dtype, str(rows.device)) for rows in (references, descriptors)]
    if kinds[0] != kinds[1]:
        raise InputError(
            f"references are {kinds[0]} but descriptors are {kinds[1]}: give both the same "
            "dimension and type, on one device"
        )
    check_unit(references, "references")


def check_unit(descriptors: Tensor, name: str = "descriptors") -> None:
    """Check that descriptors are finite and have unit length."""
    norms = torch.linalg.vector_norm(
        descriptors.detach(), dim=1, dtype=accumulation_dtype(descriptors.dtype)
    )
    check_lengths((norms - 1).abs().max().item(), name)


def check_shapes(
    rows: Tensor,
    labels: Tensor,
    least: int = 2,
    names: tuple[str, str] = ("descriptors", "labels"),
) -> None:
    """Check shapes and types of a batch, [B, C] and [B], but not its values."""
    name, label_name = names
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        raise InputError(f"{name} must be a tensor [B, C], not {_shape(rows)}")
    if not rows.is_floating_point():
        raise InputError(f"{name} must be floating-point, not {rows.dtype}")
    check_labels(labels, label_name)
    if len(labels) != len(rows):
        raise InputError(
            f"{len(rows)} {name} but {len(labels)} {label_name}: give one label per image"
        )
    if labels.device != rows.device:
        raise InputError(
            f"{name} are on {rows.device} but {label_name} on {labels.device}: move the labels to "
            f"{rows.device}"
        )
    if len(rows) < least:
        needed = "one image" if least == 1 else "two images, a query and an image to rank"
        raise InputError(f"{len(rows)} {name}: give at least {needed}")


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


def query_weights(weights: Tensor | None, size: int, like: Tensor) -> Tensor:
    """Check the weights and return them for descriptors `like`; ones by default: [B]."""
    dtype = accumulation_dtype(like.dtype)
    if weights is None:
        return torch.ones(size, dtype=dtype, device=like.device)
    check_weight_shape(weights, size)
    check_weights(bool((weights.isfinite() & (weights >= 0)).all()))
    return weights.to(like.device, dtype)


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
