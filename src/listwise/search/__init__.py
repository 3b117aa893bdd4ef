"""Search for the nearest descriptors: exact search, indexes of photos, expansion, refinement.

A module is imported when one of its names is first used.
"""

from typing import TYPE_CHECKING

from listwise.optional import import_when_used

if TYPE_CHECKING:
    from listwise.search.checking import CheckResult
    from listwise.search.duplicates import DuplicateGroup
    from listwise.search.engines import create_store, open_store
    from listwise.search.entries import DamagedIndexError, Entry, NewEntries
    from listwise.search.exact import ExactIndex, exact_search
    from listwise.search.filling import Added, add_descriptors, add_photos
    from listwise.search.filters import Facet, Filter, parse_filter
    from listwise.search.generation import Generation, header_of
    from listwise.search.hits import Hit
    from listwise.search.index import Index
    from listwise.search.marks import Conflict, Mark, MarkedClass, MarkedQuery, Marks, MarkTable
    from listwise.search.methods import SearchIntent
    from listwise.search.opening import check_index, open_index
    from listwise.search.options import SearchOptions
    from listwise.search.refinement import (
        VectorIndex,
        alpha_query_expansion,
        database_augmentation,
        diffuse,
        diffusion_scores,
        refined_search,
        superglobal_scores,
    )
    from listwise.search.store import IndexHeader, IndexUpgradedError, Store
    from listwise.search.stored_marks import ClassProgress, IndexMarks, Suggestion
    from listwise.search.syncing import Synced
    from listwise.search.upgrading import ResultChange, UpgradeChanges, UpgradeResult

__all__ = ["Added", "CheckResult", "ClassProgress", "Conflict", "DamagedIndexError"]
__all__ += ["DuplicateGroup", "Entry", "ExactIndex", "Facet", "Filter", "Generation", "Hit"]
__all__ += ["Index", "IndexHeader", "IndexMarks", "IndexUpgradedError", "Mark", "MarkTable"]
__all__ += ["MarkedClass", "MarkedQuery", "Marks", "NewEntries", "ResultChange"]
__all__ += ["SearchIntent", "SearchOptions"]
__all__ += ["Store", "Suggestion", "Synced", "UpgradeChanges", "UpgradeResult", "VectorIndex"]
__all__ += ["add_descriptors", "add_photos", "alpha_query_expansion", "check_index"]
__all__ += ["create_store", "database_augmentation", "diffuse", "diffusion_scores", "exact_search"]
__all__ += ["header_of", "open_index", "open_store", "parse_filter", "refined_search"]
__all__ += ["superglobal_scores"]

_MODULES = ["entries", "engines", "store", "options", "filters", "methods", "marks", "exact"]
_MODULES += ["refinement", "hits", "checking", "duplicates", "filling", "generation", "index"]
_MODULES += ["opening", "stored_marks", "syncing", "upgrading"]

__getattr__, __dir__ = import_when_used(__name__, __all__, _MODULES)
