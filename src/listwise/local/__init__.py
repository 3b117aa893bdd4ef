"""Local features of photos, and spatial verification of two photos.

The modules `codebook` and `asmk` hold search by visual words, `delf` deep local features.
"""

from listwise.local.features import Features, hessian_affine, photo_features
from listwise.local.verification import Verification, verify

__all__ = ["Features", "Verification", "hessian_affine", "photo_features", "verify"]
