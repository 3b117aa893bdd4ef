"""Toy landmarks: a small data set of drawn buildings, generated from a seed."""

from listwise.data.toy.dataset import (
    TOY_GROUND_TRUTH,
    TOY_LABELS,
    TOY_PARAMETERS,
    TOY_PHOTOS,
    make_toy_landmarks,
)

__all__ = ["TOY_GROUND_TRUTH", "TOY_LABELS", "TOY_PARAMETERS", "TOY_PHOTOS", "make_toy_landmarks"]
