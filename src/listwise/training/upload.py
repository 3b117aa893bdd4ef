"""Micro-batches that travel to the GPU while the one before is computed."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def arriving(crops: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The micro-batches [b, 3, H, W], in turn; those in pinned memory are sent ahead, one each."""
    if device.type != "cuda" or not all(crop.is_pinned() for crop in crops):
        yield from crops
        return
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(crop: Tensor) -> Tensor:
        side.wait_stream(here)  # beside the work of one micro-batch, and not further ahead
        with torch.cuda.stream(side):
            return crop.to(device, non_blocking=True)

    coming = send(crops[0])
    for following in (*crops[1:], None):
        here.wait_stream(side)
        arrived = coming
        arrived.record_stream(here)
        if following is not None:
            coming = send(following)
        yield arrived
