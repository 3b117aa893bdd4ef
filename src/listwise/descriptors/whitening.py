"""`Whitening`: a learned mean and projection, applied to every descriptor of a model."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from listwise.errors import InputError
from listwise.models.storage import WhiteningInfo

# Directions whose variance is a smaller share of the largest are rounding noise.
NEGLIGIBLE: Final = 1e-10
# Rows that are converted to float64 at a time.
BLOCK: Final = 4096

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Shrinkage = float | Literal["ledoit-wolf"]


@dataclass(frozen=True, eq=False)
class Whitening:
    """Map descriptors x [n, C] to L2(projection · (x − mean)) [n, D].

    `Whitening.learn` learns one from descriptors.

    Attributes:
        mean: float32 [C].
        projection: float32 [D, C].
        info: how it was learned.
    """

    mean: Float32
    projection: Float32
    info: WhiteningInfo

    def __post_init__(self) -> None:
        if self.mean.dtype != np.float32 or self.projection.dtype != np.float32:
            raise InputError("the mean and the projection of a whitening must be float32")
        if self.projection.ndim != 2 or self.mean.shape != self.projection.shape[1:]:
            raise InputError(
                "a whitening needs a mean [C] and a projection [D, C], not "
                f"{list(self.mean.shape)} and {list(self.projection.shape)}"
            )
        if not (np.isfinite(self.mean).all() and np.isfinite(self.projection).all()):
            raise InputError("the whitening contains values that are not finite: learn it again")

    @property
    def dim(self) -> int:
        """Number D of output dimensions."""
        return len(self.projection)

    @overload
    def apply(self, descriptors: npt.NDArray[np.floating]) -> Float32: ...
    @overload
    def apply(self, descriptors: Tensor) -> Tensor: ...
    def apply(self, descriptors: npt.NDArray[np.floating] | Tensor) -> Float32 | Tensor:
        """Whiten descriptors: [n, C] -> float32 [n, D], unit rows; arrays or tensors."""
        if descriptors.ndim != 2 or descriptors.shape[1] != len(self.mean):
            raise InputError(
                f"descriptors must be [n, {len(self.mean)}], not {list(descriptors.shape)}"
            )
        if isinstance(descriptors, Tensor):
            mean = torch.from_numpy(self.mean).to(descriptors.device)
            projection = torch.from_numpy(self.projection).to(descriptors.device)
            return F.normalize((descriptors.float() - mean) @ projection.T, dim=1)
        rows = (descriptors.astype(np.float32, copy=False) - self.mean) @ self.projection.T
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return np.asarray(rows / np.maximum(lengths, 1e-12), dtype=np.float32)

    @classmethod
    def prefix(cls, dimensions: int, dim: int) -> "Whitening":
        """Return a whitening that only keeps the first dimensions: [n, dimensions] -> [n, dim]."""
        identity = np.eye(dimensions, dtype=np.float32)
        info = WhiteningInfo(method="prefix")
        return cls(np.zeros(dimensions, np.float32), identity, info).truncate(dim)

    def truncate(self, dim: int) -> "Whitening":
        """Return the whitening that keeps the first `dim` of its output dimensions.

        The directions of a learned whitening are in the order of their variance, so the first ones
        are the best to keep.
        """
        if not isinstance(dim, int | np.integer) or not 1 <= dim <= self.dim:
            raise InputError(f"`dim` must be from 1 to {self.dim}, not {dim!r}")
        return replace(self, projection=self.projection[:dim])

    def learned_at(self, max_side: int | None, scales: Sequence[float]) -> "Whitening":
        """Return the whitening with the size and the scales of the photos it was learned from."""
        at = {"max_side": max_side or 0, "scales": tuple(scales)}
        return replace(self, info=self.info.model_copy(update=at))

    def fingerprint(self) -> str:
        """Return the SHA-256 of the mean and the projection."""
        digest = hashlib.sha256(repr(self.projection.shape).encode())
        digest.update(self.mean.tobytes())
        digest.update(self.projection.tobytes())
        return digest.hexdigest()

    @classmethod
    def learn(
        cls,
        batches: Iterable[npt.NDArray[np.floating]],
        dim: int | None = None,
        power: float = 0.25,
        shrinkage: Shrinkage = 0.0,
    ) -> "Whitening":
        """Learn a PCA that divides by λ^`power`, where λ is the variance of a direction.

        The batches are read once, and memory does not depend on their number.

        Args:
            batches: descriptors, each batch [n, C].
            dim: number of directions to keep, those with the most variance first; by default all
                that vary. With shrinkage, all C directions vary.
            power: 0.25 is the paper's square-rooted PCA (section 4.2), 0.5 is full whitening, and
                0 is a rotation.
            shrinkage: a number s from 0 to 1 replaces λ by (1 − s)·λ + s·(mean of all λ), which
                keeps directions with little variance from being amplified too much.
                "ledoit-wolf" estimates s from the descriptors (Ledoit and Wolf 2004).
        """
        return PrincipalDirections.of(batches).whitening(dim, power, shrinkage)

    @classmethod
    def learn_supervised(
        cls,
        descriptors: npt.NDArray[np.floating],
        pairs: npt.NDArray[np.integer],
        dim: int | None = None,
    ) -> "Whitening":
        """Learn from matching pairs: whiten the differences within pairs, then apply a PCA.

        After Radenović et al. (2018): m is the mean of the pairs' first photos, S the covariance of
        their differences, L its Cholesky factor, and D the principal directions of L⁻¹ (x − m). The
        projection is Dᵀ L⁻¹.

        Args:
            descriptors: those of all photos, in pairs or not: [N, C].
            pairs: positions of matching photos: [P, 2].
            dim: number of directions to keep, those with the most variance first; by default all
                that vary.
        """
        return PrincipalDirections.of_pairs(descriptors, pairs).whitening(dim)


@dataclass(frozen=True, eq=False)
class PrincipalDirections:
    """The principal directions of descriptors, and whitenings of any dimension and power by them.

    One eigendecomposition is enough for all of them: a shrinkage of the covariance towards a
    multiple of the identity changes the variances and not the directions.

    Attributes:
        mean: subtracted from descriptors, float64 [C].
        rows: the projection on the directions, those with the most variance first, [C, C].
        variances: the variances along the directions, [C].
        count: the number of descriptors.
        ledoit_wolf: the shrinkage that Ledoit and Wolf (2004) estimate; None if learned from pairs.
        method: how `rows` were learned.
    """

    mean: Float64
    rows: Float64
    variances: Float64
    count: int
    ledoit_wolf: float | None
    method: Literal["pca", "supervised"]

    @classmethod
    def of(cls, batches: Iterable[npt.NDArray[np.floating]]) -> "PrincipalDirections":
        """Compute the principal directions of descriptors, in batches [n, C]."""
        moments = _moments(batches)
        if moments.count < 2:
            raise InputError("learning a whitening needs at least two descriptors")
        variances, directions = _principal(moments.covariance())
        shrinkage = moments.ledoit_wolf()
        return cls(moments.mean, directions.T, variances, moments.count, shrinkage, "pca")

    @classmethod
    def of_pairs(
        cls, descriptors: npt.NDArray[np.floating], pairs: npt.NDArray[np.integer]
    ) -> "PrincipalDirections":
        """Compute the directions of `Whitening.learn_supervised`: [N, C] and positions [P, 2]."""
        count = len(descriptors)
        pairs = np.asarray(pairs)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or not len(pairs):
            raise InputError(
                f"`pairs` must be positions [P, 2] with P >= 1, not {list(pairs.shape)}"
            )
        if pairs.min() < 0 or pairs.max() >= count:
            raise InputError(f"`pairs` contains positions outside the {count} descriptors")
        anchors, partners = pairs.T
        mean = _moments(descriptors[rows] for rows in _sliced(anchors)).mean
        within = _moments(
            descriptors[first].astype(np.float64) - descriptors[second]
            for first, second in zip(_sliced(anchors), _sliced(partners), strict=True)
        )
        inverse = np.linalg.inv(_cholesky(within.second_moment(0.0)))
        spread = _moments(_sliced(descriptors)).second_moment(mean)
        variances, directions = _principal(inverse @ spread @ inverse.T)
        return cls(mean, directions.T @ inverse, variances, count, None, "supervised")

    def whitening(
        self, dim: int | None = None, power: float = 0.25, shrinkage: Shrinkage = 0.0
    ) -> Whitening:
        """Return a whitening; the arguments are those of `Whitening.learn`.

        `power` and `shrinkage` have no effect on directions that were learned from pairs.
        """
        factors = self.factors(dim, power, shrinkage)
        projection = self.rows[: len(factors)] * factors[:, None]
        # A common factor has no effect after L2, and keeps the values near 1.
        projection = projection / np.abs(projection).max()
        info = WhiteningInfo(method=self.method, learned_from=self.count)
        if self.method == "pca":
            amount = self._amount(shrinkage) or None
            info = info.model_copy(update={"power": power, "shrinkage": amount})
        return Whitening(self.mean.astype(np.float32), projection.astype(np.float32), info)

    def factors(
        self, dim: int | None = None, power: float = 0.25, shrinkage: Shrinkage = 0.0
    ) -> Float64:
        """Return what a whitening multiplies each kept direction by, [dim]: λ^−power."""
        if not 0 <= power <= 1:
            raise InputError(f"`power` must be between 0 and 1, not {power}")
        varying = self.varying(shrinkage)
        if dim is not None and dim < 1:
            raise InputError(f"`dim` must be 1 or more, not {dim}")
        if not varying:
            raise InputError(
                f"the {self.count} descriptors are all equal: learn from photos that differ"
            )
        if dim is not None and dim > varying:
            raise InputError(
                f"`dim` is {dim}, but the {self.count} descriptors vary in {varying} dimensions "
                f"only: choose at most {varying}, or learn from more photos"
            )
        kept = self._shrunk(shrinkage)[: dim or varying]
        return np.asarray(kept**-power) if self.method == "pca" else np.ones_like(kept)

    def varying(self, shrinkage: Shrinkage = 0.0) -> int:
        """Return the number of directions whose variance is not zero after the shrinkage."""
        variances = self._shrunk(shrinkage)
        return int((variances > max(variances[0], 0.0) * NEGLIGIBLE).sum())

    def project(self, descriptors: npt.NDArray[np.floating]) -> Float32:
        """Return the coordinates of descriptors along the directions: [n, C] -> [n, C]."""
        rows = self.rows.astype(np.float32)
        return np.asarray((descriptors - self.mean).astype(np.float32) @ rows.T, np.float32)

    def _shrunk(self, shrinkage: Shrinkage) -> Float64:
        amount = self._amount(shrinkage)
        return np.asarray((1 - amount) * self.variances + amount * self.variances.mean())

    def _amount(self, shrinkage: Shrinkage) -> float:
        if self.ledoit_wolf is None:
            return 0.0
        if isinstance(shrinkage, str):
            if shrinkage != "ledoit-wolf":
                raise InputError(
                    f'`shrinkage` must be a number or "ledoit-wolf", not {shrinkage!r}'
                )
            return self.ledoit_wolf
        if not 0 <= shrinkage <= 1:
            raise InputError(f"`shrinkage` must be between 0 and 1, not {shrinkage}")
        return float(shrinkage)


def matching_pairs(
    labels: npt.NDArray[np.integer], per_class: int, seed: int
) -> npt.NDArray[np.int64]:
    """Draw pairs of photos with equal labels, at most `per_class` for each class.

    Shapes: labels [N] -> positions [P, 2].
    """
    generator = np.random.default_rng(seed)
    labels = np.asarray(labels)
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=labels[order][:1] - 1))
    pairs = []
    for members in np.split(order, starts[1:]):
        possible = len(members) * (len(members) - 1) // 2
        drawn = generator.choice(possible, min(per_class, possible), replace=False)
        # Pair number n is (i, j), j < i, in the order 10, 20, 21, 30, 31, 32 ...
        later = ((1 + np.sqrt(1 + 8 * drawn)) / 2).astype(np.int64)
        earlier = drawn - later * (later - 1) // 2
        pairs.append(generator.permuted(members[np.stack([later, earlier], axis=1)], axis=1))
    found = np.concatenate(pairs).astype(np.int64) if pairs else np.empty((0, 2), np.int64)
    if not len(found):
        raise InputError(
            "no two photos have the same label: matching pairs need classes of two photos or more"
        )
    return found


@dataclass
class _Moments:
    """Sums over rows x of (x − shift), of its outer products and higher moments, in float64."""

    count: int
    shift: Float64
    total: Float64
    products: Float64
    fourth: float  # sum of ‖x − shift‖⁴
    third: Float64  # sum of ‖x − shift‖² (x − shift)

    @property
    def mean(self) -> Float64:
        return self.shift + self.total / self.count

    def second_moment(self, center: "Float64 | float") -> Float64:
        """Mean of (x − center)(x − center)ᵀ: [C, C]."""
        offset = self.mean - center
        return self.covariance() + np.outer(offset, offset)

    def covariance(self) -> Float64:
        off = self.total / self.count
        return np.asarray(self.products / self.count - np.outer(off, off))

    def ledoit_wolf(self) -> float:
        """Shrinkage of the covariance S towards its mean variance times the identity.

        After Ledoit and Wolf (2004): the mean of ‖(x − mean)(x − mean)ᵀ − S‖² over the rows,
        divided by their number and by ‖S − mean variance · I‖², at most 1.
        """
        offset = self.total / self.count
        squared = float(offset @ offset)
        # The sum of ‖y − offset‖⁴ over rows y = x − shift, without reading the rows again.
        fourth = (
            self.fourth
            + 4 * float(offset @ self.products @ offset)
            + self.count * squared**2
            - 4 * float(self.third @ offset)
            + 2 * squared * float(np.trace(self.products))
            - 4 * squared * float(self.total @ offset)
        )
        covariance = self.covariance()
        size = float((covariance**2).sum())
        spread = size - float(np.trace(covariance)) ** 2 / len(covariance)
        error = (fourth / self.count - size) / self.count
        return min(1.0, max(0.0, error / spread)) if spread > NEGLIGIBLE * size else 1.0


def _moments(batches: Iterable[npt.NDArray[np.floating]]) -> _Moments:
    moments: _Moments | None = None
    for number, batch in enumerate(batches):
        if batch.ndim != 2 or (moments is not None and batch.shape[1] != len(moments.shift)):
            dims = "C" if moments is None else len(moments.shift)
            raise InputError(f"batch {number} must be [n, {dims}], not {list(batch.shape)}")
        for part in _sliced(batch):
            rows = part.astype(np.float64)
            if moments is None:
                # A shift near the mean keeps digits that a mean far from zero would cost.
                shift = rows.mean(axis=0)
                dim = len(shift)
                empty = np.zeros(dim)
                moments = _Moments(0, shift, empty, np.zeros((dim, dim)), 0.0, empty.copy())
            rows -= moments.shift
            moments.count += len(rows)
            moments.total += rows.sum(axis=0)
            moments.products += rows.T @ rows
            lengths = np.einsum("nc,nc->n", rows, rows)
            moments.fourth += float(lengths @ lengths)
            moments.third += lengths @ rows
            if not np.isfinite(moments.total).all():
                raise InputError(
                    f"batch {number} of the descriptors contains values that are not finite"
                )
    if moments is None:
        raise InputError("no descriptors to learn a whitening from: give at least two")
    return moments


def _sliced(rows: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(rows), BLOCK):
        yield rows[start : start + BLOCK]


def _principal(matrix: Float64) -> tuple[Float64, Float64]:
    """Eigenvalues [C] of a symmetric matrix, largest first, and directions [C, C] in columns."""
    values, directions = np.linalg.eigh((matrix + matrix.T) / 2)
    # The sign of an eigenvector is arbitrary; fixing it makes results repeatable.
    largest = directions[np.abs(directions).argmax(axis=0), np.arange(len(values))]
    return values[::-1], (directions * np.where(largest < 0, -1.0, 1.0))[:, ::-1]


def _cholesky(matrix: Float64) -> Float64:
    """Return the Cholesky factor, adding to the diagonal until the matrix is positive definite."""
    level = float(np.trace(matrix)) / len(matrix)
    if level == 0:
        raise InputError(
            "the two photos of every pair have the same descriptor: learn from photos that differ"
        )
    added = 0.0
    while True:
        try:
            factor = np.linalg.cholesky(matrix + added * np.eye(len(matrix)))
        except np.linalg.LinAlgError:
            pass
        else:
            # Rounding can make a singular matrix look positive.
            if np.diag(factor).min() ** 2 > NEGLIGIBLE * level:
                return np.asarray(factor, np.float64)
        added = 10 * added or 1e-6 * level
