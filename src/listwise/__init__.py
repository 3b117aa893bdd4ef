"""Listwise: image retrieval trained on the metric it is judged by."""

__version__ = "0.1.0"
