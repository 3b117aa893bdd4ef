"""What the losses share on CPU and GPU: blocks of a range, and the precision of sums."""

import torch


def blocks(start: int, stop: int, size: int) -> list[slice]:
    """The range from start to stop, cut into pieces of a size; the last may be smaller."""
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of products, histograms and sums: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
