"""Measured comparisons: one file each, run by `listwise benchmark NAME`."""
