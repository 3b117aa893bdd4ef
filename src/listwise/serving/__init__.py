"""Search for people and programs: the server and its page."""

from listwise.serving.searcher import Hit, Searcher

__all__ = ["Hit", "Searcher"]
