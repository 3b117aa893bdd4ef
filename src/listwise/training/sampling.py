"""Which images make a batch: repeatable from a seed and the number of the update."""

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
    """Indices of the images of one batch, none twice.

    Every class takes part with two images (one, if it has no more) and the rest is drawn from
    all images alike, so large classes have more (section 4.2, "Class sampling"). With
    `classes_per_batch`, so many random classes take the place of all. Where a batch is too
    small for two images of each class, as many random classes as it can hold take part. If not
    all classes take part, those of a single image, in which nothing can be found, come last.

    Fewer than `batch_size` come if the classes that take part have fewer. Shapes: labels [N] -> [B]
    in random order.
    """
    generator = np.random.default_rng([seed, update])
    shuffled = generator.permutation(len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    order = generator.permutation(len(classes))
    order = order[np.argsort(sizes[order] == 1, kind="stable")]
    classes = classes[order[: min(classes_per_batch or len(classes), max(1, batch_size // 2))]]
    shuffled = shuffled[np.isin(labels[shuffled], classes)]
    paired = place_in_class(labels[shuffled]) < 2
    # What is left of a small class stands late in this order: it must be shuffled again.
    rest = generator.permutation(shuffled[~paired])
    return generator.permutation(np.concatenate([shuffled[paired], rest])[:batch_size])


def place_in_class(labels: npt.NDArray[np.int64]) -> Indices:
    """How many earlier entries have the same label: [N]."""
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    lengths = np.diff(np.r_[starts, len(labels)])
    place = np.empty(len(labels), dtype=np.int64)
    place[order] = np.arange(len(labels)) - np.repeat(starts, lengths)
    return place
