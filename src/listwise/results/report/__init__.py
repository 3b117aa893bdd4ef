"""A page that shows how well models search: figures, curves, and what each query found."""

from listwise.results.report.build import MatchFunction, ModelSearch, report_models
from listwise.results.report.content import ModelResult, TableRow
from listwise.results.report.curves import precision_recall_curve
from listwise.results.report.page import write_report

__all__ = ["MatchFunction", "ModelResult", "ModelSearch", "TableRow"]
__all__ += ["precision_recall_curve", "report_models", "write_report"]
