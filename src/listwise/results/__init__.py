"""Evaluate a model on a benchmark, and tune its settings on validation photos."""

from listwise.results.describe import BenchmarkDescriptors, describe_benchmark
from listwise.results.evaluate import Evaluation, evaluate, open_benchmark
from listwise.results.tuning import Tuning, TuningStep, tune

__all__ = ["BenchmarkDescriptors", "Evaluation", "Tuning", "TuningStep", "describe_benchmark"]
__all__ += ["evaluate", "open_benchmark", "tune"]
