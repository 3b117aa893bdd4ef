"""Measure how good ranked lists are: average precision and the protocols of the benchmarks.

The functions take arrays only: descriptors, scores or ranks.
"""

from listwise.evaluation.compare import Gain, compare_ap
from listwise.evaluation.evaluate import (
    Results,
    average_precision,
    evaluate_descriptors,
    evaluate_labelled,
    evaluate_ranks,
    evaluate_revisited,
    evaluate_scores,
    judged_images,
    mean_average_precision,
    ranks_of_positives,
)
from listwise.evaluation.hierarchical import HierarchicalResult, evaluate_hierarchical
from listwise.evaluation.judged import JudgedQueries, Protocol
from listwise.evaluation.metrics import ProtocolResult
from listwise.evaluation.ranks import rank_judged, rank_scores

__all__ = ["Gain", "HierarchicalResult", "JudgedQueries", "Protocol", "ProtocolResult", "Results"]
__all__ += [
    "average_precision",
    "compare_ap",
    "evaluate_descriptors",
    "evaluate_hierarchical",
    "evaluate_labelled",
    "evaluate_ranks",
]
__all__ += ["evaluate_revisited", "evaluate_scores", "judged_images", "mean_average_precision"]
__all__ += ["rank_judged", "rank_scores", "ranks_of_positives"]
