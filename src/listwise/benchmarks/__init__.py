"""Benchmarks of speed and memory, one module each, run by `listwise benchmark NAME`."""
