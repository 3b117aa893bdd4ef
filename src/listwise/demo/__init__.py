"""The demo, and its toy landmarks: photos of invented buildings, drawn from a seed."""

from listwise.demo.dataset import TOY_LABELS, TOY_PHOTOS, make_toy_landmarks

__all__ = ["TOY_LABELS", "TOY_PHOTOS", "make_toy_landmarks"]
