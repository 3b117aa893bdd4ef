import resource

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from listwise.errors import InputError
from listwise.training.run.checkpoint import Progress, load_checkpoint, save_checkpoint


def make(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))
    net[3].weight = nn.Parameter(net[3].weight.t().contiguous().t())  # with gaps between rows
    return net, torch.optim.Adam(net.parameters(), lr=0.1)


def train(net, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.rand(2, 3, 4, 4)).square().sum().backward()
        optimizer.step()


def test_a_saved_state_comes_back_to_the_bit(tmp_path):
    net, optimizer = make(0)
    train(net, optimizer, 3)
    progress = Progress(update=3, best_map=0.1 + 0.2, micro_batch=7, counts={"forwards": 6})
    save_checkpoint(tmp_path / "c.safetensors", net, optimizer, progress)
    train(net, optimizer, 2)

    again, other_optimizer = make(1)
    torch.manual_seed(99)
    assert load_checkpoint(tmp_path / "c.safetensors", again, other_optimizer) == progress
    train(again, other_optimizer, 2)
    for key, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    for old, new in zip(
        optimizer.state_dict()["state"].values(),
        other_optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert old.keys() == new.keys() >= {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_state_before_the_first_step_can_be_saved(tmp_path):
    net, optimizer = make(0)
    save_checkpoint(tmp_path / "c.safetensors", net, optimizer, Progress())
    assert load_checkpoint(tmp_path / "c.safetensors", net, optimizer) == Progress()


def test_a_damaged_file_is_one_line(tmp_path):
    net, optimizer = make(0)
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, net, optimizer, Progress())
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:40], b"", b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged") as caught:
            load_checkpoint(path, net, optimizer)
        assert "\n" not in str(caught.value)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="not a checkpoint"):
        load_checkpoint(path, net, optimizer)


def test_a_state_of_another_network_is_refused(tmp_path):
    net, optimizer = make(0)
    save_checkpoint(tmp_path / "c.safetensors", net, optimizer, Progress())
    other = nn.Linear(2, 2)
    with pytest.raises(InputError, match="does not fit the network") as caught:
        load_checkpoint(tmp_path / "c.safetensors", other, torch.optim.Adam(other.parameters()))
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    net, optimizer = make(0)
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, net, optimizer, Progress(update=1))
    train(net, optimizer, 1)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot write"):
            save_checkpoint(path, net, optimizer, Progress(update=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_checkpoint(path, net, optimizer).update == 1
