"""Helpers for the losses on CPU and GPU: blocks of a range, and the precision of sums."""

import torch


def blocks(start: int, stop: int, size: int) -> list[slice]:
    """Divide the range from start to stop into blocks of a size; the last may be smaller."""
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for products, histograms and sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)
