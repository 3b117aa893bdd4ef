"""A tiny model for the photos."""

from index_examples import model_folder  # noqa: F401
