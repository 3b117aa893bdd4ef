"""How good ranked lists are."""

from listwise.evaluation.metrics import average_precision, mean_average_precision
from listwise.evaluation.revisited import ProtocolResult, RevisitedResult, evaluate_revisited

__all__ = [
    "ProtocolResult",
    "RevisitedResult",
    "average_precision",
    "evaluate_revisited",
    "mean_average_precision",
]
