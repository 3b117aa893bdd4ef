"""Finding the nearest descriptors: exactly, in an index, and with expanded queries."""

from listwise.search.exact import ExactIndex, exact_search
from listwise.search.expansion import (
    VectorIndex,
    alpha_query_expansion,
    database_augmentation,
)
from listwise.search.filling import add_descriptors, add_photos, header_of
from listwise.search.index import (
    Entry,
    Index,
    IndexHeader,
    NewEntries,
    SearchIntent,
    create_index,
    open_index,
)

__all__ = [
    "Entry",
    "ExactIndex",
    "Index",
    "IndexHeader",
    "NewEntries",
    "SearchIntent",
    "VectorIndex",
    "add_descriptors",
    "add_photos",
    "alpha_query_expansion",
    "create_index",
    "database_augmentation",
    "exact_search",
    "header_of",
    "open_index",
]
