"""How good ranked lists are."""

from listwise.evaluation.labelled import (
    LabelledResult,
    evaluate_labelled,
    mean_average_precision,
)
from listwise.evaluation.metrics import average_precision
from listwise.evaluation.oxford import (
    evaluate_oxford,
    evaluate_oxford_ranks,
    judged_oxford_images,
)
from listwise.evaluation.protocol import ProtocolResult
from listwise.evaluation.ranks import rank_judged, rank_scores
from listwise.evaluation.revisited import (
    RevisitedResult,
    evaluate_ranks,
    evaluate_revisited,
    judged_images,
)

__all__ = [
    "LabelledResult",
    "ProtocolResult",
    "RevisitedResult",
    "average_precision",
    "evaluate_labelled",
    "evaluate_oxford",
    "evaluate_oxford_ranks",
    "evaluate_ranks",
    "evaluate_revisited",
    "judged_images",
    "judged_oxford_images",
    "mean_average_precision",
    "rank_judged",
    "rank_scores",
]
