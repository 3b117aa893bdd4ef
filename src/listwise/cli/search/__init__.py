"""`listwise search`: find photos in an index."""

from listwise.cli.search.command import EXAMPLES, search

__all__ = ["EXAMPLES", "search"]
