"""Local features, their aggregation, and spatial verification."""

from listwise.optional import requires

with requires("local", "local features"):
    import pyarrow  # noqa: F401

    from listwise.local.features import Features, hessian_affine, photo_features
    from listwise.local.verification import Verified, verify

__all__ = ["Features", "Verified", "hessian_affine", "photo_features", "verify"]
