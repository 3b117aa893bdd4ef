"""Losses for retrieval: each maps descriptors and labels to a scalar to minimize."""

from listwise.losses.average_precision import QuantizedAPLoss, TieAwareAPLoss, quantized_ap
from listwise.losses.base import MatryoshkaLoss, class_balanced_weights
from listwise.losses.hierarchical import HierarchicalAPLoss
from listwise.losses.metric_learning import (
    FastAPLoss,
    InfoNCELoss,
    MultiSimilarityLoss,
    ProxyAnchorLoss,
)
from listwise.losses.smooth_ranks import RecallAtKLoss, RoadmapLoss, SmoothAPLoss
from listwise.losses.tuples import ContrastiveLoss, TripletLoss

__all__ = ["ContrastiveLoss", "FastAPLoss", "HierarchicalAPLoss", "InfoNCELoss"]
__all__ += ["MatryoshkaLoss"]
__all__ += ["MultiSimilarityLoss", "ProxyAnchorLoss", "QuantizedAPLoss", "RecallAtKLoss"]
__all__ += ["RoadmapLoss", "SmoothAPLoss", "TieAwareAPLoss", "TripletLoss"]
__all__ += ["class_balanced_weights", "quantized_ap"]
