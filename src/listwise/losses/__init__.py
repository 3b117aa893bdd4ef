"""Losses: descriptors and labels to a number to minimise. Nothing here knows of images."""

from listwise.losses.average_precision import QuantizedAPLoss, TieAwareAPLoss, quantized_ap
from listwise.losses.weights import class_balanced_weights

__all__ = ["QuantizedAPLoss", "TieAwareAPLoss", "class_balanced_weights", "quantized_ap"]
