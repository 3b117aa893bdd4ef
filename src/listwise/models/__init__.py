"""Networks that turn images into unit descriptors: backbone, pooling, projection and L2."""

from listwise.models.imported import import_checkpoint
from listwise.models.net import RetrievalNet
from listwise.models.pooling import POOLINGS

__all__ = ["POOLINGS", "RetrievalNet", "import_checkpoint"]
