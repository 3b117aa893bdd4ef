"""Losses for retrieval: each maps descriptors and labels to a scalar to minimize."""

from listwise.losses.average_precision import QuantizedAPLoss, TieAwareAPLoss, quantized_ap
from listwise.losses.base import class_balanced_weights
from listwise.losses.contrastive import ContrastiveLoss
from listwise.losses.hierarchical import HierarchicalAPLoss
from listwise.losses.infonce import InfoNCELoss
from listwise.losses.matryoshka import MatryoshkaLoss
from listwise.losses.metric_learning import FastAPLoss, MultiSimilarityLoss
from listwise.losses.proxy_anchor import ProxyAnchorLoss
from listwise.losses.recall_at_k import RecallAtKLoss
from listwise.losses.roadmap import RoadmapLoss
from listwise.losses.smooth_ap import SmoothAPLoss
from listwise.losses.triplet import TripletLoss

__all__ = ["ContrastiveLoss", "FastAPLoss", "HierarchicalAPLoss", "InfoNCELoss"]
__all__ += ["MatryoshkaLoss"]
__all__ += ["MultiSimilarityLoss", "ProxyAnchorLoss", "QuantizedAPLoss", "RecallAtKLoss"]
__all__ += ["RoadmapLoss", "SmoothAPLoss", "TieAwareAPLoss", "TripletLoss"]
__all__ += ["class_balanced_weights", "quantized_ap"]
