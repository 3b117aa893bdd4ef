"""Choose the dimension, power and shrinkage of a whitening by validation on labelled photos."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from listwise.data import LabelledImages, hold_out_classes
from listwise.descriptors.whitening import (
    PrincipalDirections,
    Shrinkage,
    Whitening,
    matching_pairs,
)
from listwise.errors import InputError
from listwise.evaluation import Gain, compare_ap, evaluate_labelled
from listwise.progress import aligned

TRAIN_SPLIT, VAL_SPLIT = "train", "val"
POWERS = (0.0, 0.125, 0.25, 0.375, 0.5)
# Dimensions to try, as divisors of those of the network.
PARTS = (1, 2, 4, 8)
FOLDS = 5
# More photos are not searched for each candidate: the time grows with their square.
MOST_VALIDATED = 2000

Float32 = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
AP = npt.NDArray[np.float64]
T = TypeVar("T")
Batches = Callable[[Positions], Iterable[Float32]]


class Fold(NamedTuple):
    """Positions of photos: a whitening is learned from some and validated on others.

    Attributes:
        learn: the photos that the whitening is learned from.
        validate: the photos that are searched for and searched in, each among the others. None of
            them is in `learn`: a whitening treats the photos it was learned from differently, so
            that photos of other classes would be easy to tell apart.
    """

    learn: Positions
    validate: Positions


def select(
    candidates: Mapping[T, AP], before: AP, labels: npt.NDArray[np.int64]
) -> tuple[T, AP, Gain]:
    """Find the candidate with the highest mAP on validation photos, the first of equal ones.

    Args:
        candidates: candidate -> average precision of each photo; NaN without a positive.
        before: the average precision to compare with.
        labels: the class of each photo.

    Returns:
        The candidate, its average precision of each photo, and its gain over `before`, which is
        clear if it is above two standard errors.
    """
    best = max(candidates, key=lambda each: float(np.nanmean(candidates[each])))
    return best, candidates[best], compare_ap(candidates[best], before, labels)


class WhiteningSettings(NamedTuple):
    """The settings of a whitening; `power` and `shrinkage` are None for a supervised one."""

    dim: int
    power: float | None
    shrinkage: Shrinkage | None

    def whitening(self, directions: PrincipalDirections) -> Whitening:
        """Return the whitening with these settings."""
        return directions.whitening(self.dim, self.power or 0.0, self.shrinkage or 0.0)

    def __str__(self) -> str:
        power = "" if self.power is None else f", power {self.power:g}"
        shrunk = f", shrinkage {self.shrinkage}" if self.shrinkage else ""
        return f"{self.dim} dimensions{power}{shrunk}"


@dataclass(frozen=True, eq=False)
class WhiteningChoice:
    """The result of `choose_whitening`.

    Attributes:
        start_map: validation mAP before: without a whitening, or with the one to compare with.
        best: the settings with the highest validation mAP.
        maps: the best settings of each dimension, the smallest first -> validation mAP.
        gain: the mAP of `best` minus `start_map`, with its standard error.
        queries: the number of validation photos.
        classes: the number of their classes.
        directions: what was learned in each fold.
    """

    start_map: float
    best: WhiteningSettings
    maps: Mapping[WhiteningSettings, float]
    gain: Gain
    queries: int
    classes: int
    directions: tuple[PrincipalDirections, ...]

    @property
    def validation_map(self) -> float:
        """The validation mAP of `best`."""
        return self.maps[self.best]

    def table(self) -> str:
        """Format the best settings of each dimension as a plain text table, mAP in percent."""
        rows = {"none": self.start_map} | {str(each): value for each, value in self.maps.items()}
        shown = [[name, f"{100 * value:.1f}"] for name, value in rows.items()]
        return "\n".join(aligned([["whitening", "mAP"], *shown], 1))

    def __str__(self) -> str:
        value, error = 100 * self.gain.value, 100 * self.gain.error
        return (
            f"validation mAP {100 * self.start_map:.1f} without whitening, "
            f"{100 * self.validation_map:.1f} with the best ({value:+.1f} ± {error:.1f}, "
            f"{self.queries} photos of {self.classes} classes{searched_in(len(self.directions))})"
        )


def searched_in(parts: int) -> str:
    """Return the end of a sentence that says which photos a validation has searched."""
    if parts == 1:
        return ""
    return f", each searched in one of {parts} parts; listwise evaluate searches all together"


def without_test_split(images: LabelledImages) -> LabelledImages:
    """Return the photos to learn from and to validate on: not the test split of a table."""
    if images.splits is None or not {TRAIN_SPLIT, VAL_SPLIT} & set(images.splits):
        return images
    wanted = {TRAIN_SPLIT, VAL_SPLIT} if TRAIN_SPLIT in images.splits else set(images.splits)
    return images.subset([i for i, split in enumerate(images.splits) if split in wanted - {"test"}])


def validation_folds(images: LabelledImages) -> tuple[list[Fold], Positions]:
    """Divide photos for the validation of a whitening.

    A table with the split "val" is validated on this split, and the whitening is learned from the
    other photos. Otherwise each class is validated with a whitening learned from other classes: in
    two to five folds, or on held-out classes if there are many photos.

    Returns:
        The folds, and the photos that the final whitening is learned from.

    Raises:
        InputError: fewer than four classes have two photos or more.
    """
    everything = np.arange(len(images))
    if images.splits is not None and VAL_SPLIT in images.splits:
        val = np.array(images.splits) == VAL_SPLIT
        learn = everything[~val]
        if not len(learn):
            raise InputError(
                'every photo has the split "val": whitening needs photos to learn from'
            )
        chosen = _at_most(images.labels, everything[val])
        if np.bincount(images.labels[chosen]).max() < 2:
            raise InputError('validation needs a class with two photos of the split "val"')
        return [Fold(learn, chosen)], learn
    several = np.flatnonzero(images.class_sizes() >= 2)
    if len(several) < 4:
        raise InputError(
            "validation needs at least 4 classes of two or more photos, but only "
            f"{len(several)} have that many"
        )
    if len(images) > 2 * MOST_VALIDATED:
        _, held_out = hold_out_classes(images, 0.2, seed=0)
        val = np.isin(np.array(images.class_names)[images.labels], held_out.class_names)
        chosen = _at_most(images.labels, everything[val])
        return [Fold(everything[~val], chosen)], everything
    shuffled = np.random.default_rng(0).permutation(several)
    folds = []
    # Few classes in a fold make short, easy lists.
    count = min(max(2, len(several) // 8), FOLDS)
    for classes in np.array_split(shuffled, count):
        held = np.isin(images.labels, classes)
        folds.append(Fold(everything[~held], everything[held]))
    return folds, everything


def _at_most(labels: npt.NDArray[np.int64], positions: Positions) -> Positions:
    """Keep whole classes, drawn at random, until there are about `MOST_VALIDATED` photos."""
    if len(positions) <= MOST_VALIDATED:
        return positions
    classes, sizes = np.unique(labels[positions], return_counts=True)
    order = np.random.default_rng(0).permutation(len(classes))
    count = max(2, int(np.searchsorted(np.cumsum(sizes[order]), MOST_VALIDATED, side="right")))
    return positions[np.isin(labels[positions], classes[order[:count]])]


def learn_directions(
    batches: Iterable[Float32], labels: npt.NDArray[np.int64] | None
) -> PrincipalDirections:
    """Learn directions from descriptors, or from pairs of equal labels if labels are given."""
    if labels is None:
        return PrincipalDirections.of(batches)
    descriptors = np.concatenate(list(batches))
    # The differences of pairs must span all dimensions, with several pairs per dimension.
    enough = math.ceil(8 * descriptors.shape[1] / len(np.unique(labels)))
    pairs = matching_pairs(labels, enough, seed=0)
    return PrincipalDirections.of_pairs(descriptors, pairs)


def choose_whitening(
    folds: Sequence[Fold],
    batches: Batches,
    labels: npt.NDArray[np.int64],
    *,
    dim: int | None = None,
    power: float | None = None,
    shrinkage: Shrinkage | None = None,
    supervised: bool = False,
    current: Whitening | None = None,
) -> WhiteningChoice:
    """Find the whitening with the highest mAP on validation photos.

    All candidates of a fold come from one eigendecomposition. What is given is not chosen.

    Args:
        folds: from `validation_folds`.
        batches: returns the descriptors at some positions, in batches [n, C].
        labels: the class of each photo, [N].
        dim: the number of dimensions.
        power: the power of the variances.
        shrinkage: the shrinkage of the variances.
        supervised: learn from pairs of photos with the same label.
        current: the whitening to compare with; none by default.
    """
    parts: list[AP] = []
    found: dict[WhiteningSettings, list[AP]] = {}
    learned: list[PrincipalDirections] = []
    for fold in folds:
        own = labels[fold.validate]
        plain = np.concatenate(list(batches(fold.validate)))
        start = plain if current is None else current.apply(plain)
        parts.append(evaluate_labelled(start, own).per_query_ap)
        directions = learn_directions(
            batches(fold.learn), labels[fold.learn] if supervised else None
        )
        learned.append(directions)
        for settings, rows in _candidates(directions, plain, dim, power, shrinkage):
            found.setdefault(settings, []).append(evaluate_labelled(rows, own).per_query_ap)
    candidates = {key: np.concatenate(ap) for key, ap in found.items() if len(ap) == len(folds)}
    if not candidates:
        raise InputError(
            "no whitening of this `dim` can be learned: choose a smaller one, or learn from more "
            "photos"
        )
    start_ap = np.concatenate(parts)
    classes = labels[np.concatenate([fold.validate for fold in folds])]
    # The first candidates have the fewest dimensions and are the simplest.
    best, _, gain = select(candidates, start_ap, classes)
    of_dim: dict[int, WhiteningSettings] = {}
    maps = {key: float(np.nanmean(ap)) for key, ap in candidates.items()}
    for key in candidates:
        if key.dim not in of_dim or maps[key] > maps[of_dim[key.dim]]:
            of_dim[key.dim] = key
    return WhiteningChoice(
        start_map=float(np.nanmean(start_ap)),
        best=best,
        maps={key: maps[key] for key in of_dim.values()},
        gain=gain,
        queries=int((~np.isnan(start_ap)).sum()),
        classes=len(np.unique(classes)),
        directions=tuple(learned),
    )


def _candidates(
    directions: PrincipalDirections,
    descriptors: Float32,
    dim: int | None,
    power: float | None,
    shrinkage: Shrinkage | None,
) -> Iterator[tuple[WhiteningSettings, Float32]]:
    """Yield the settings of each whitening that can be learned, and the whitened descriptors."""
    projected = directions.project(descriptors)
    width = projected.shape[1]
    dims = sorted({max(1, width // part) for part in PARTS}) if dim is None else [dim]
    powers: Sequence[float] = POWERS if power is None else (power,)
    shrinkages: Sequence[Shrinkage] = (0.0, "ledoit-wolf") if shrinkage is None else (shrinkage,)
    pca = directions.method == "pca"
    if not pca:
        powers, shrinkages = (0.0,), (0.0,)
    for size, amount, exponent in product(dims, shrinkages, powers):
        if size > directions.varying(amount):
            continue
        factors = directions.factors(size, exponent, amount).astype(np.float32)
        rows = projected[:, :size] * (factors / factors.max())
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        yield WhiteningSettings(size, *((exponent, amount) if pca else (None, None))), rows
