"""A tiny model for the photos, and an index of some."""

from index_examples import *  # noqa: F403
