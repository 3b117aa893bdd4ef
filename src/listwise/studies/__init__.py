"""Models on benchmarks: where networks and protocols meet."""

from listwise.results.evaluate import Searched, evaluate_searched, search_benchmark

__all__ = ["Searched", "evaluate_searched", "search_benchmark"]
