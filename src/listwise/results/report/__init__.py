"""The HTML report of an evaluation: metrics, curves, and the results of each query."""

from listwise.results.report.build import MatchFunction, ModelSearch, report_models
from listwise.results.report.content import ModelResult, TableRow
from listwise.results.report.curves import precision_recall_curve
from listwise.results.report.page import write_report

__all__ = ["MatchFunction", "ModelResult", "ModelSearch", "TableRow"]
__all__ += ["precision_recall_curve", "report_models", "write_report"]
