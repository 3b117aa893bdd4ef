"""Measurements of speed and memory, one module each: `python -m benchmarks PART`, in a clone."""
