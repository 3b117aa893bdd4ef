"""Embed a pool of photos with the current network, in all processes, and mine tuples from it."""

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


class MiningResult(NamedTuple):
    """Mined tuples [T, 2 + N] as indices of photos, and the number of photos that were embedded."""

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
) -> MiningResult:
    """Embed the photos that a miner needs, and let it choose tuples.

    Each process embeds a share of the photos. As in the papers, photos are whole.

    Args:
        miner: chooses the photos and the tuples.
        update: the update before which tuples are mined.
        net: the current network.
        images: all training photos.
        max_side: the long side that larger photos are reduced to.
        workers: processes that decode photos.
        autocast: dtype in which the network runs.
        on_progress: called with the number of photos that this process has embedded, and of all
            its photos.
        on_errors: called with the errors of photos that cannot be read; it may raise.
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
        # The last bits of scores may differ between machines, and with them the hardest tuples.
        shared = tuples.to(device)
        dist.broadcast(shared, 0)
        tuples = shared.cpu()
    return MiningResult(tuples.numpy(), sum(parts))
