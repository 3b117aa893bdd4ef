"""Draw the images of a batch, reproducibly from a seed and the number of the update."""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def draw_batch(
    labels: npt.NDArray[np.int64],
    batch_size: int,
    seed: int,
    update: int,
    classes_per_batch: int | None = None,
) -> Indices:
    """Draw the indices of the images of one batch, without repetition.

    Every class has two images in the batch (one, if it has only one). The rest is drawn uniformly
    from all images, so large classes have more (section 4.2, "Class sampling").

    If `classes_per_batch` is set, or the batch is too small for two images of every class, only
    some random classes take part. Classes with a single image are then chosen last, because a
    query of such a class has no positive.

    Shapes: labels [N] -> [B] in random order. B is `batch_size`, or less if the classes that take
    part have fewer images.
    """
    generator = np.random.default_rng([seed, update])
    shuffled = generator.permutation(len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    order = generator.permutation(len(classes))
    order = order[np.argsort(sizes[order] == 1, kind="stable")]
    classes = classes[order[: min(classes_per_batch or len(classes), max(1, batch_size // 2))]]
    shuffled = shuffled[np.isin(labels[shuffled], classes)]
    paired = place_in_class(labels[shuffled]) < 2
    # In this order the remaining images of small classes come late, so it is shuffled again.
    rest = generator.permutation(shuffled[~paired])
    return generator.permutation(np.concatenate([shuffled[paired], rest])[:batch_size])


def place_in_class(labels: npt.NDArray[np.int64]) -> Indices:
    """Count, for each entry, the earlier entries with the same label: [N] -> [N]."""
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    lengths = np.diff(np.r_[starts, len(labels)])
    place = np.empty(len(labels), dtype=np.int64)
    place[order] = np.arange(len(labels)) - np.repeat(starts, lengths)
    return place
