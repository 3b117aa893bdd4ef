"""Mining with the network as it is, by all processes together."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from listwise.data import LabelledImages
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.training.distributed import failing_together, gather_numbers, gather_rows, world
from listwise.training.mining.miners import Miner
from listwise.training.sampling import Indices


class Mined(NamedTuple):
    """Tuples [T, 2 + N] of photos, and how many photos were embedded to find them."""

    tuples: Indices
    forwards: int


def mine_tuples(
    miner: Miner,
    update: int,
    net: RetrievalNet,
    images: LabelledImages,
    *,
    max_side: int,
    workers: int,
    autocast: torch.dtype | None,
    on_progress: Callable[[int, int], object],
    on_errors: Callable[[Sequence[str]], object],
) -> Mined:
    """Embed the photos that a miner needs, a share in each process, and let it choose.

    Photos are embedded whole, at the size of the training crops, as the papers do it.
    `on_progress` is called with the photos of this process done and their number, `on_errors` with
    the errors of photos that cannot be read; it may raise.
    """
    rank, processes = world()
    device = next(net.parameters()).device
    share = np.array_split(miner.photos(update), processes)[rank]
    done = 0

    def count(photos: int) -> None:
        nonlocal done
        done += photos
        on_progress(done, len(share))

    with failing_together(device):
        found = embed_photos(
            net,
            images.subset(share),
            max_side=max_side,
            workers=workers,
            autocast=autocast,
            on_progress=count,
        )
        on_errors(found.errors)
    parts = gather_numbers(len(found.kept), device)
    descriptors = gather_rows(found.descriptors.float().to(device), parts)
    photos = gather_rows(torch.from_numpy(share[found.kept]).to(device), parts)
    with failing_together(device):
        tuples = torch.from_numpy(miner.tuples(update, photos.cpu().numpy(), descriptors))
    if processes > 1:
        # Equal sums may differ in their last bits on other machines, and so what is hardest.
        shared = tuples.to(device)
        dist.broadcast(shared, 0)
        tuples = shared.cpu()
    return Mined(tuples.numpy(), sum(parts))
