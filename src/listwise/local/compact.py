"""Compact codes of the local features of a photo, which an index stores with its entry.

A code has a header of 18 bytes and 42 bytes per feature: 32 bytes for RootSIFT, 2 bits per value,
and 10 bytes for point, scale and shape.
"""

import struct
from typing import Final

import numpy as np
from PIL import Image

from listwise.errors import InputError
from listwise.local.features import Features, hessian_affine
from listwise.local.hessian import Float32
from listwise.local.verification import Pairs, nearest_pairs

MAX_BYTES: Final = 40_000
DIM: Final = 128
_HEADER: Final = struct.Struct("<BxHfffxx")  # version, number of features, left, top, step
_VERSION: Final = 1
_POINT, _FRAME, _CODES = 4, 6, DIM // 4  # bytes per feature
COUNT: Final = (MAX_BYTES - _HEADER.size) // (_POINT + _FRAME + _CODES)
"""Maximum number of features in a code."""

# The four values that approximate values of RootSIFT with the least squared error.
_LEVELS: Final = np.array([0.0271, 0.0648, 0.1046, 0.1557], np.float32)
_EDGES: Final = (_LEVELS[1:] + _LEVELS[:-1]) / 2
_COSINE: Final = 0.99  # mean cosine of a descriptor and its approximation
# Maximum ratio of the distances to the nearest and second nearest feature. It is larger than for
# exact descriptors: the error of the code brings the two distances closer together.
_MAX_RATIO: Final = 0.95
_DECODED: Final = _LEVELS[np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3]  # [256, 4]


def compact_features(
    photo: Image.Image,
    corner: tuple[int, int] = (0, 0),
    zoom: float = 1.0,
    count: int = COUNT,
) -> bytes:
    """Extract and encode the strongest Hessian-affine features of a photo: at most 40,000 bytes.

    Args:
        photo: an upright photo, a reduced one, or a part of one.
        corner: left and top edge of the part in the whole photo.
        zoom: width of the photo divided by the width of the reduced one.
        count: maximum number of features, at most `COUNT`.
    """
    return encode_features(hessian_affine(photo, count).scaled(zoom).moved(*corner))


def encode_features(features: Features) -> bytes:
    """Encode the first `COUNT` Hessian-affine features, [n, 128], in at most 40,000 bytes.

    Points are rounded to 1/65535 of the longer side of the area that they cover. Shapes must be
    lower triangular with determinant 1, as those of `hessian_affine` are.
    """
    points = features.points[:COUNT].astype(np.float64)
    count = len(points)
    corner = points.min(axis=0) if count else np.zeros(2)
    step = max(float((points - corner).max(initial=0.0)) / 65535, 1e-9)
    frames = np.stack(
        [features.scales[:count], features.shapes[:count, 0, 0], features.shapes[:count, 1, 0]], 1
    )
    codes = np.searchsorted(_EDGES, features.descriptors[:count]).astype(np.uint8)
    quads = codes.reshape(count, _CODES, 4) << np.array([0, 2, 4, 6], np.uint8)
    return b"".join(
        [
            _HEADER.pack(_VERSION, count, *corner, step),
            np.rint((points - corner) / step).astype("<u2").tobytes(),
            frames.astype("<f2").tobytes(),
            np.bitwise_or.reduce(quads, axis=2).tobytes(),
        ]
    )


def decode_features(content: bytes) -> Features:
    """Decode the features that `encode_features` encoded; rows of descriptors have norm 1.01."""
    try:
        version, count, left, top, step = _HEADER.unpack_from(content)
    except struct.error:
        version, count = 0, 0
    size = _HEADER.size + count * (_POINT + _FRAME + _CODES)
    if version != _VERSION or len(content) != size:
        raise InputError("local features are damaged or of a newer Listwise")
    start = _HEADER.size
    points = np.frombuffer(content, "<u2", 2 * count, start).reshape(-1, 2)
    frames = np.frombuffer(content, "<f2", 3 * count, start + _POINT * count).reshape(-1, 3)
    codes = np.frombuffer(content, np.uint8, _CODES * count, size - _CODES * count)
    scales, across, shear = frames.astype(np.float32).T
    shapes = np.zeros((count, 2, 2), np.float32)
    shapes[:, 0, 0], shapes[:, 1, 0], shapes[:, 1, 1] = across, shear, 1 / across
    descriptors: Float32 = _DECODED.take(codes, axis=0).reshape(count, DIM)
    # Products with exact descriptors are then correct on average.
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True) * np.float32(_COSINE)
    corner = np.array([left, top], np.float32) if count else np.zeros(2, np.float32)
    return Features(
        points.astype(np.float32) * np.float32(step if count else 0) + corner,
        scales,
        shapes,
        descriptors,
    )


def feature_count(content: bytes) -> int:
    """Return the number of features that `encode_features` encoded."""
    return int(_HEADER.unpack_from(content)[1])


def nearest_decoded(one: Features, two: Features) -> Pairs:
    """Return the features of two photos that may match, both from `decode_features`: [m, 2]."""
    return nearest_pairs(one.descriptors, two.descriptors, _MAX_RATIO)
