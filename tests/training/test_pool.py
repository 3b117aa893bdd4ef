"""Mining by the network: what is embedded, and two processes against one."""

import gc
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_net import TINY_NET
from torch.nn.functional import normalize

from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.training import Trainer, prepare
from listwise.training.mining.pool import mine_tuples
from listwise.training.run.record import read_metrics

SETTINGS = {
    "backbone": TINY_NET,
    "weights": "random",
    "val_fraction": 0.3,
    "val_max_side": 48,
    "micro_batch": 4,
    "crops": {"size": 32},
    "updates": 3,
    "learning_rate": 1e-3,
    "validate_every": 3,
    "device": "cpu",
    "workers": 0,
    "triplet": {"tuples": 5, "pool": 25, "refresh": 10},
    "contrastive": {"tuples": 3, "negatives": 2, "pool": 9, "refresh": 6},
}


class AllOfThem:
    """A miner that wants some photos and tells what it was given."""

    period, per_update = 1, 1

    def photos(self, update):
        return np.array([1, 4, 5, 8 + update])

    def tuples(self, update, photos, descriptors):
        self.given = photos, descriptors
        return photos[None, :3]


def test_whole_photos_are_embedded_by_the_current_network(photos):
    plan = prepare(photos, SETTINGS)
    net, miner = RetrievalNet(TINY_NET, weights="random"), AllOfThem()
    seen, errors = [], []
    mined = mine_tuples(
        miner,
        2,
        net,
        plan.train,
        max_side=32,
        workers=0,
        autocast=None,
        on_progress=lambda done, total: seen.append((done, total)),
        on_errors=errors.extend,
    )
    wanted, descriptors = miner.given
    assert wanted.tolist() == [1, 4, 5, 10]
    expected = embed_photos(net, plan.train.subset(wanted), max_side=32).descriptors
    torch.testing.assert_close(descriptors, expected)
    torch.testing.assert_close(descriptors, normalize(descriptors, dim=1))
    assert mined.tuples.tolist() == [[1, 4, 5]]
    assert mined.forwards == 4
    assert seen[-1] == (4, 4)
    assert errors == []


def fit(photos, run, loss):
    trainer = Trainer(prepare(photos, SETTINGS | {"loss": loss}), run)
    return trainer.fit(), trainer._tuples


def worker(rank, folder, photos):
    gc.freeze()  # as in programs.py
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    results = {}
    for loss in ("triplet", "contrastive"):
        results[loss] = fit(photos, Path(folder) / loss, loss)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_mine_and_train_like_one(photos, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    mp.start_processes(worker, (str(tmp_path), photos), nprocs=2, start_method="forkserver")
    both = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for loss in ("triplet", "contrastive"):
        result, tuples = fit(photos, tmp_path / "one" / loss, loss)
        for other, other_tuples in (both[0][loss], both[1][loss]):
            np.testing.assert_array_equal(other_tuples, tuples)
            assert other.counts == result.counts
        lines = zip(
            read_metrics(tmp_path / "one" / loss), read_metrics(tmp_path / loss), strict=True
        )
        for line, other in lines:
            for name in ("loss", "validation_map", "forwards"):
                assert other.get(name) == pytest.approx(line.get(name), abs=1e-5)
    torch.set_num_threads(threads)
