"""Fixtures of the tests of labels."""

from label_examples import mixed, things

__all__ = ["mixed", "things"]
