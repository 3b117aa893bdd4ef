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
    levels: Indices | None = None,
) -> Indices:
    """Draw the indices of the images of one batch, without repetition.

    Every class has two images in the batch (one, if it has only one). The rest is drawn uniformly
    from all images, so large classes have more (section 4.2, "Class sampling").

    If `classes_per_batch` is set, or the batch is too small for two images of every class, only
    some random classes take part. Classes with a single image are then chosen last, because a
    query of such a class has no positive. If `levels` are given, a class is chosen together with
    another class of its group, and groups in the same way, so that queries have positives at every
    level.

    Shapes: labels [N], levels [K, L] with a row per class -> [B] in random order. B is
    `batch_size`, or less if the classes that take part have fewer images.
    """
    generator = np.random.default_rng([seed, update])
    shuffled = generator.permutation(len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    order = generator.permutation(len(classes))
    order = order[np.argsort(sizes[order] == 1, kind="stable")]
    if levels is not None:
        several = sizes[order] > 1
        parts = (order[several], order[~several])
        groups = np.asarray(levels)[classes]
        order = np.concatenate([_with_relatives(part, groups, generator) for part in parts])
    classes = classes[order[: min(classes_per_batch or len(classes), max(1, batch_size // 2))]]
    shuffled = shuffled[np.isin(labels[shuffled], classes)]
    paired = place_in_class(labels[shuffled]) < 2
    # In this order the remaining images of small classes come late, so it is shuffled again.
    rest = generator.permutation(shuffled[~paired])
    return generator.permutation(np.concatenate([shuffled[paired], rest])[:batch_size])


def _with_relatives(order: Indices, levels: Indices, generator: np.random.Generator) -> Indices:
    """Reorder classes so that the first ones have others of their groups beside them.

    From fine to coarse groups, each class is joined with another class of its group, each of these
    pairs with a pair of another group, and so on. What is left over is joined with the last pair.

    Shapes: order [k] of rows of levels [K, L] -> [k].
    """
    units = order.reshape(-1, 1).tolist()
    for level in range(levels.shape[1] - 2, -1, -1):  # the last level is the class itself
        members: dict[int, list[list[int]]] = {}
        # Units of one finer group lie apart, so that different ones are joined.
        finer = levels[[unit[0] for unit in units], level + 1]
        for i in np.argsort(place_in_class(finer), kind="stable"):
            members.setdefault(int(levels[units[i][0], level]), []).append(units[i])
        joined = []
        for alike in members.values():
            starts = range(0, max(1, len(alike) - 1), 2)
            ends = [*starts[1:], len(alike)]
            pairs = [alike[start:end] for start, end in zip(starts, ends, strict=True)]
            joined += [[k for unit in pair for k in unit] for pair in pairs]
        units = [joined[i] for i in generator.permutation(len(joined))]
    return np.array([k for unit in units for k in unit], dtype=np.int64)


def place_in_class(labels: npt.NDArray[np.int64]) -> Indices:
    """Count, for each entry, the earlier entries with the same label: [N] -> [N]."""
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    lengths = np.diff(np.r_[starts, len(labels)])
    place = np.empty(len(labels), dtype=np.int64)
    place[order] = np.arange(len(labels)) - np.repeat(starts, lengths)
    return place
