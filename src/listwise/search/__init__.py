"""Finding the nearest descriptors, and expanding queries with them."""

from listwise.search.exact import ExactIndex, exact_search
from listwise.search.expansion import (
    VectorIndex,
    alpha_query_expansion,
    database_augmentation,
)

__all__ = [
    "ExactIndex",
    "VectorIndex",
    "alpha_query_expansion",
    "database_augmentation",
    "exact_search",
]
