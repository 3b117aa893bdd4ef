"""Search for the nearest descriptors: exact search, indexes of photos, expansion, refinement."""

from listwise.search.changes import ResultChange, UpgradeChanges
from listwise.search.checking import CheckResult
from listwise.search.checksums import DamagedIndexError
from listwise.search.classes import ClassProgress, Suggestion
from listwise.search.duplicates import DuplicateGroup
from listwise.search.entries import Entry, NewEntries
from listwise.search.exact import ExactIndex, exact_search
from listwise.search.expansion import VectorIndex, alpha_query_expansion, database_augmentation
from listwise.search.filling import Added, add_descriptors, add_photos
from listwise.search.filters import Facet, Filter, parse_filter
from listwise.search.generation import Generation, header_of
from listwise.search.generations import IndexUpgradedError
from listwise.search.hits import Hit
from listwise.search.index import Index
from listwise.search.marks import Conflict, Mark, MarkedClass, MarkedQuery, Marks, MarkTable
from listwise.search.opening import check_index, create_store, open_index, open_store
from listwise.search.refinement import (
    diffuse,
    diffusion_scores,
    refined_search,
    superglobal_scores,
)
from listwise.search.store import IndexHeader, SearchIntent, Store
from listwise.search.upgrading import UpgradeResult

__all__ = [
    "Added",
    "CheckResult",
    "ClassProgress",
    "Conflict",
    "DamagedIndexError",
    "DuplicateGroup",
    "Entry",
    "ExactIndex",
    "Facet",
    "Filter",
    "Generation",
    "Hit",
    "Index",
    "IndexHeader",
    "IndexUpgradedError",
    "Mark",
    "MarkTable",
    "MarkedClass",
    "MarkedQuery",
    "Marks",
    "NewEntries",
    "ResultChange",
    "Suggestion",
    "UpgradeChanges",
    "UpgradeResult",
]
__all__ += ["SearchIntent", "Store", "VectorIndex"]
__all__ += ["add_descriptors", "add_photos", "alpha_query_expansion", "check_index", "create_store"]
__all__ += [
    "database_augmentation",
    "diffuse",
    "diffusion_scores",
    "exact_search",
    "header_of",
    "open_index",
    "open_store",
    "parse_filter",
    "refined_search",
    "superglobal_scores",
]
