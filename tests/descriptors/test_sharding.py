"""Shares of photos for several processes."""

import pytest

from listwise.data import Images
from listwise.descriptors import Shard

PHOTOS = Images(tuple(f"{i}.jpg" for i in range(11)), tuple("abcdefghijk"), None)


@pytest.mark.parametrize("count", [1, 2, 3, 11, 13])
def test_shares_are_even_and_together_everything_once(count):
    shares = [Shard(index, count).images(PHOTOS) for index in range(count)]
    assert [name for share in shares for name in share.ids] == list(PHOTOS.ids)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_each_process_of_torchrun_has_its_own_file(monkeypatch, tmp_path):
    assert Shard.from_torchrun() == Shard(0, 1)
    assert Shard().file(tmp_path / "out.parquet") == tmp_path / "out.parquet"
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "12")
    shard = Shard.from_torchrun()
    assert shard == Shard(2, 12)
    assert shard.file(tmp_path / "out.parquet") == tmp_path / "out-00003-of-00012.parquet"


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert Shard(5, 8).device() == "cuda:1"
    assert Shard(5, 8).device("cpu") == "cpu"
    assert Shard().device() == "auto"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert Shard(5, 8).device() == "auto"
