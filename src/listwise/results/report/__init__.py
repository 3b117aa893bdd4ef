"""A page that shows how well models search: figures, curves, and what each query found."""

from listwise.results.report.build import (
    Gallery,
    Judged,
    Photos,
    judged_result,
    labelled_results,
    oxford_result,
    revisited_result,
)
from listwise.results.report.content import (
    ListEntry,
    Match,
    ModelResult,
    QueryResult,
    RankedList,
    TableRow,
)
from listwise.results.report.curves import precision_recall_curve
from listwise.results.report.matches import PointsOf
from listwise.results.report.page import write_report

__all__ = [
    "Gallery",
    "Judged",
    "ListEntry",
    "Match",
    "ModelResult",
    "Photos",
    "PointsOf",
    "QueryResult",
    "RankedList",
    "TableRow",
    "judged_result",
    "labelled_results",
    "oxford_result",
    "precision_recall_curve",
    "revisited_result",
    "write_report",
]
