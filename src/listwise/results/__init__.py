"""A model on a benchmark: its figures, its table and its report page."""

from listwise.results.describe import BenchmarkDescriptors, describe_benchmark
from listwise.results.evaluate import Evaluation, evaluate, open_benchmark

__all__ = ["BenchmarkDescriptors", "Evaluation", "describe_benchmark", "evaluate", "open_benchmark"]
