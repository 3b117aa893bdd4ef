"""Local features of photos, and spatial verification of two photos.

The subpackages `asmk` and `delf` hold search by visual words and deep local features. OpenCV is
imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from listwise.local.features import Features, hessian_affine, photo_features
    from listwise.local.verification import Verification, verify

__all__ = ["Features", "Verification", "hessian_affine", "photo_features", "verify"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'listwise.local' has no attribute {name!r}")
    home = "verification" if name in ("Verification", "verify") else "features"
    value = globals()[name] = getattr(import_module(f"listwise.local.{home}"), name)
    return value
