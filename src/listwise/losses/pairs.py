"""Sums over the pairs of a query and an image, in blocks that fit into memory."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ENTRIES = 2**24
"""Comparisons of scores that are in memory at a time."""


def sum_over_pairs(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], scores: Tensor, pairs: Tensor
) -> Tensor:
    """Sum a function of pairs over the images of each query: -> [Q].

    Args:
        function: maps the scores [Q, N], and the queries [R] and images [R] of some pairs, to a
            value for each of them [R].
        scores: [Q, N] scores of every query with every image.
        pairs: [Q, N] whether a query and an image are a pair.
    """
    query, image = torch.nonzero(pairs, as_tuple=True)
    sums = torch.zeros(len(scores), dtype=scores.dtype, device=scores.device)
    if not len(query):
        return sums
    places = torch.arange(len(query), device=scores.device)
    values = [
        # Recomputed in backward: all comparisons together are as many as images cubed.
        checkpoint(
            function,
            scores,
            query[block],
            image[block],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for block in places.chunk(-(-len(query) * scores.shape[1] // ENTRIES))
    ]
    return sums.index_put((query,), torch.cat(values), accumulate=True)
