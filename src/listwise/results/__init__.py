"""Evaluate a model on a benchmark: metrics, table and HTML report."""

from listwise.results.describe import BenchmarkDescriptors, describe_benchmark
from listwise.results.evaluate import Evaluation, evaluate, open_benchmark

__all__ = ["BenchmarkDescriptors", "Evaluation", "describe_benchmark", "evaluate", "open_benchmark"]
