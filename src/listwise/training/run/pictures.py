"""Pictures of what validation finds: a few fixed queries and the photos found for each."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from listwise.data import LabelledImages
from listwise.data.sheets import Tile, ranked_sheet


def choose_queries(labels: npt.NDArray[np.int64], count: int) -> list[int]:
    """The same few queries every time: the first image of evenly spread classes."""
    _, first, sizes = np.unique(labels, return_index=True, return_counts=True)
    usable = first[sizes > 1]
    picks = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
    return [int(usable[i]) for i in picks]


def ranked_list_picture(
    images: LabelledImages,
    descriptors: npt.NDArray[np.float32],
    queries: Sequence[int],
    count: int = 8,
) -> Image.Image:
    """A row for each query: the query, then the first `count` photos of its list.

    Shapes: descriptors [N, C] of all the images; queries are positions among them.
    """
    rows = []
    for query in queries:
        scores = descriptors @ descriptors[query]
        scores[query] = -np.inf
        row = [Tile(images.paths[query], "query", images.box(query))]
        for index in np.argsort(-scores, kind="stable")[: min(count, len(scores) - 1)]:
            right = images.labels[index] == images.labels[query]
            row.append(Tile(images.paths[index], "right" if right else "wrong", images.box(index)))
        rows.append(row)
    return ranked_sheet(rows)
