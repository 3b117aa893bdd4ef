"""Networks: image → unit descriptor."""

from listwise.models.net import RetrievalNet
from listwise.models.pooling import POOLINGS

__all__ = ["POOLINGS", "RetrievalNet"]
