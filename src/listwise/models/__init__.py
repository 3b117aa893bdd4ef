"""Networks that turn images into unit descriptors: backbone, pooling, projection and L2."""

from listwise.imports import import_timm

import_timm()  # before the modules below do, as it is faster

from listwise.models.imported import import_checkpoint  # noqa: E402
from listwise.models.net import RetrievalNet  # noqa: E402
from listwise.models.pooling import POOLINGS  # noqa: E402

__all__ = ["POOLINGS", "RetrievalNet", "import_checkpoint"]
