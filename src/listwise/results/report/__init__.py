"""A page that shows how well models search: figures, curves, and what each query found."""

from listwise.results.report.build import ModelSearch, report_models
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
    "ListEntry",
    "Match",
    "ModelResult",
    "ModelSearch",
    "PointsOf",
    "QueryResult",
    "RankedList",
    "TableRow",
    "precision_recall_curve",
    "report_models",
    "write_report",
]
